"""Who sits where in the next attempt, and what its ranks go on from. Pure functions.

A *member* is a process that trains or can. When one dies, its place is taken by a spare of the same
node, or by a new process; the others stay, with their state.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from eagleray.actors.trainer.seams import Bond, Seat, Standing

KEPT_JOURNALS = 4
"""Of the processes at one place; one that dies before it has taken over leaves that of the last."""


@dataclass(frozen=True)
class Place:
    """A place that Ray Train holds for a rank."""

    rank: int
    node_id: str
    gpu: int | None = None
    """Number of its GPU on the node."""
    pid: int = field(default=0, compare=False)
    """Of Ray Train's worker, which may change in the same place."""


@dataclass(frozen=True)
class Plan:
    """What one member does in an attempt.

    Attributes:
        seat: Of the member.
        local_rank: Among the ranks of its node.
        bond: How the ranks go on without a snapshot; None: from the newest complete one.
        inherited: Paths of the journals of those that sat here and died, the last one first.
        gpu: Number of its GPU on the node.
    """

    seat: Seat
    local_rank: int = 0
    bond: Bond | None = None
    inherited: tuple[str, ...] = ()
    gpu: int | None = None


class End(Enum):
    """How a member's part in an attempt ended."""

    FINISHED = "all steps are done"
    PAUSED = "all ranks have paused, with a snapshot of that step"
    INTERRUPTED = "a peer or an actor is gone"
    LOST = "the state that it was to go on from is gone"
    FAILED = "a failure that no retry can mend"


@dataclass(frozen=True)
class Outcome:
    """How a member's part in an attempt ended, and how far it came."""

    end: End
    standing: Standing | None = None
    """None: it holds no whole state."""
    is_noted: bool = False
    """Its own journal has what it alone knows."""
    message: str = ""


@dataclass(frozen=True)
class Verdict:
    """How the run ended; an empty message: well."""

    message: str = ""


def local_ranks(places: Iterable[Place]) -> dict[int, int]:
    """Rank -> its number among the ranks of its node."""
    counts: dict[str, int] = {}
    numbers = {}
    for place in sorted(places, key=lambda place: place.rank):
        numbers[place.rank] = counts.get(place.node_id, 0)
        counts[place.node_id] = numbers[place.rank] + 1
    return numbers


def taken_over(places: Mapping[int, Place], sitting: Mapping[int, str]) -> dict[int, int]:
    """Who of those that sit takes which place.

    Args:
        places: Rank -> its place now.
        sitting: Rank -> the node of the process that sat there.

    Returns:
        Rank -> the rank that its process had; without those for which there is none on the node.
    """
    kept = {rank: rank for rank, place in places.items() if sitting.get(rank) == place.node_id}
    free = [rank for rank in sorted(sitting) if rank not in kept]
    for rank in sorted(set(places) - set(kept)):
        other = next((each for each in free if sitting[each] == places[rank].node_id), None)
        if other is not None:
            free.remove(other)
            kept[rank] = other
    return kept


def bond_of(standings: Mapping[int, Standing | None]) -> Bond | None:
    """What the ranks can go on from.

    Args:
        standings: Rank -> how far the member there has come; None: it is new there.

    Returns:
        None if nobody holds a state, so that only a snapshot is left.
    """
    known = {rank: standing for rank, standing in standings.items() if standing is not None}
    if not known:
        return None
    done = max(standing.applied for standing in known.values())
    holders = [rank for rank, standing in known.items() if standing.applied == done]
    # What this one has decided and evaluated need not be done again.
    source = max(holders, key=lambda rank: (known[rank].decisions, known[rank].settled, -rank))
    are_all_there = len(known) == len(standings)
    is_settled = are_all_there and all(standing.settled == done for standing in known.values())
    is_shared = not are_all_there or len(holders) < len(known)
    return Bond(done, done if is_settled else max(0, done - 1), source, is_shared)


def laggards(newest: Mapping[int, int]) -> list[int]:
    """Of ranks that all wait, those that the others wait for.

    Args:
        newest: Rank -> the newest state in its journal. A rank notes a step before it waits for
            the others, so who has noted the fewest has not come to wait.
    """
    least = min(newest.values(), default=0)
    return [rank for rank, done in newest.items() if done == least]
