"""The training processes of one run: who sits at which rank, and who waits to take a place."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from eagleray.actors.trainer.seams import Standing
from eagleray.actors.trainer.seating import Place, taken_over

logger = logging.getLogger(__name__)


@dataclass
class Member:
    """A training process."""

    handle: Any
    node_id: str
    pid: int = 0
    standing: Standing | None = None
    """None: it holds no whole state."""
    is_noted: bool = False
    """Its own journal has what it alone knows."""
    journal: str = ""
    is_warm: bool = False

    def forget(self) -> None:
        """What it holds is of no use where it sits now."""
        self.standing, self.is_noted = None, False


class Crew:
    """Seats processes, and makes new ones.

    Args:
        make: Starts a process on a node, and gives its handle.
        num_spares: Warm processes beside those that train, on each node.
    """

    def __init__(self, make: Callable[[str], Any], num_spares: int) -> None:
        self._make, self._num_spares = make, num_spares
        self.members: dict[int, Member] = {}
        """By rank."""
        self._spares: list[Member] = []

    def expect(self, node_id: str, count: int) -> None:
        """Start processes on a node where ranks will sit."""
        self._spares += [self._created(node_id) for _ in range(count)]

    def seat(self, places: Mapping[int, Place]) -> None:
        """Put a process at each place; those that lose theirs stay as spares, or end."""
        before = self.members
        sitting = {rank: member.node_id for rank, member in before.items()}
        chosen = taken_over(places, sitting)
        self.members = {}
        for rank, place in sorted(places.items()):
            other = chosen.get(rank)
            if other is None:
                self.members[rank] = self._taken(place.node_id)
            else:
                self.members[rank] = before[other]
                if other != rank:
                    # What a rank alone knows is not this one's.
                    before[other].forget()
        nodes = {place.node_id for place in places.values()}
        for rank, member in before.items():
            if rank not in chosen.values():
                self._leave(member, nodes)

    async def prepare(self, world_size: int) -> list[int]:
        """Wait until all members are there, with their journals; the ranks of those that died."""

        async def one(member: Member) -> None:
            member.pid = await member.handle.pid.remote()
            member.journal = await member.handle.open_journal.remote(world_size)

        ranks = sorted(self.members)
        results = await asyncio.gather(
            *(one(self.members[rank]) for rank in ranks), return_exceptions=True
        )
        dead = []
        for rank, result in zip(ranks, results, strict=True):
            if isinstance(result, RayError):
                logger.warning("process of rank %d is not there: %s", rank, result)
                dead.append(rank)
            elif isinstance(result, BaseException):
                raise result
        return dead

    async def welcome(self, places: Iterable[Place]) -> None:
        """Have warm processes for places that are to be sat at soon, while others train."""
        wanted = Counter(place.node_id for place in places)
        there = Counter(member.node_id for member in (*self.members.values(), *self._spares))
        fresh = [self._created(node_id) for node_id in (wanted - there).elements()]
        self._spares += fresh
        await asyncio.gather(*map(self._warmed, fresh))

    async def fill_spares(self) -> None:
        """Have as many warm spares as wished on each node where somebody sits."""
        for node_id in sorted({member.node_id for member in self.members.values()}):
            for _ in range(self._num_spares - self._spares_on(node_id)):
                spare = self._created(node_id)
                self._spares.append(spare)
                await self._warmed(spare)

    async def _warmed(self, spare: Member) -> None:
        try:
            await spare.handle.warm_up.remote()
            spare.is_warm = True
        except RayError as error:
            # Deaths are met by a new process then, which takes seconds.
            logger.warning("a spare died while it warmed up: %s", error)
            if spare in self._spares:
                self._spares.remove(spare)

    def _spares_on(self, node_id: str) -> int:
        return sum(spare.node_id == node_id for spare in self._spares)

    def _taken(self, node_id: str) -> Member:
        for spare in self._spares:
            if spare.node_id == node_id:
                self._spares.remove(spare)
                return spare
        return self._created(node_id)

    def _created(self, node_id: str) -> Member:
        return Member(self._make(node_id), node_id)

    def _leave(self, member: Member, nodes: set[str]) -> None:
        if member.node_id in nodes and self._spares_on(member.node_id) < self._num_spares:
            member.forget()
            member.is_warm = True
            self._spares.append(member)
        else:
            ray.kill(member.handle)
