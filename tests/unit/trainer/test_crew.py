"""Who sits where, who waits, and who is ended, as places come and go."""

import asyncio
from dataclasses import dataclass, field

import pytest

from eagleray.actors.trainer import crew as crew_module
from eagleray.actors.trainer.crew import Crew, Member
from eagleray.actors.trainer.seams import Standing
from eagleray.actors.trainer.seating import Place


class Method:
    def __init__(self, process: "Process") -> None:
        self._process = process

    async def remote(self) -> None:
        self._process.is_warm = True


@dataclass(eq=False)
class Process:
    """Stands for the handle of a training process."""

    node_id: str
    is_warm: bool = False
    warm_up: Method = field(init=False)

    def __post_init__(self) -> None:
        self.warm_up = Method(self)


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """Processes that were ended."""
    gone: list[Process] = []
    monkeypatch.setattr(crew_module.ray, "kill", gone.append)
    return gone


def places(*nodes: str) -> dict[int, Place]:
    return {rank: Place(rank, node) for rank, node in enumerate(nodes)}


def trained(crew: Crew) -> dict[int, Process]:
    """Let all members hold a state; their processes."""
    for member in crew.members.values():
        member.standing, member.is_noted = Standing(7, 0, 7), True
    return {rank: member.handle for rank, member in crew.members.items()}


def holds_state(member: Member) -> bool:
    return member.standing is not None and member.is_noted


def test_who_stays_at_a_rank_keeps_its_state_and_who_changes_it_does_not(
    killed: list[Process],
) -> None:
    crew = Crew(Process, num_spares=0)
    crew.seat(places("a", "b", "c"))
    before = trained(crew)
    crew.seat(places("a", "c", "d"))
    assert crew.members[0].handle is before[0]
    assert holds_state(crew.members[0])
    # That of rank 2 sits at rank 1 now, whose samples and random numbers it does not know.
    assert crew.members[1].handle is before[2]
    assert not holds_state(crew.members[1])
    assert crew.members[2].handle.node_id == "d"
    assert killed == [before[1]]


def test_who_loses_its_place_waits_on_its_node_for_another_one(killed: list[Process]) -> None:
    crew = Crew(Process, num_spares=1)
    crew.seat(places("a", "a", "a"))
    before = trained(crew)
    crew.seat(places("a"))
    assert killed == [before[2]]
    crew.seat(places("a", "a", "b"))
    assert crew.members[1].handle is before[1]
    assert not holds_state(crew.members[1])


def test_those_for_new_places_are_made_and_warm_before_anybody_moves(
    killed: list[Process],
) -> None:
    crew = Crew(Process, num_spares=0)
    crew.seat(places("a"))
    sitting = trained(crew)
    asyncio.run(crew.welcome(places("a", "b", "b").values()))
    assert crew.members[0].handle is sitting[0]
    crew.seat(places("a", "b", "b"))
    fresh = [crew.members[rank].handle for rank in (1, 2)]
    assert [(process.node_id, process.is_warm) for process in fresh] == [("b", True)] * 2
    assert holds_state(crew.members[0])
    assert killed == []
