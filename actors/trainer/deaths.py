"""What the gang knows of why processes died: its own kills, the kernel's, what Ray says."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from ray.exceptions import RayError

from eagleray.actors.nodes import alive_ids
from eagleray.actors.trainer.crew import Member
from eagleray.actors.trainer.failures import Kind, is_killed_for_memory, kind_of_death
from eagleray.actors.trainer.memory_needs import out_of_memory
from eagleray.actors.trainer.seams import LoopSpec

logger = logging.getLogger(__name__)

_ANSWER_S = 2.0
_EXPLAIN_S = 1.0
"""How long the last word on a run waits for who can say why its process died."""


class Deaths:
    """Gathers causes as they are told, and names deaths; used on one event loop."""

    def __init__(self) -> None:
        self._killed: dict[int, str] = {}  # by us: process -> why
        self._starved: dict[int, str] = {}  # by the kernel, for its memory: process -> in words
        self._is_told = asyncio.Condition()

    def kill(self, pid: int, reason: str) -> None:
        """One of ours is about to kill a process."""
        self._killed[pid] = reason

    async def starve(self, pid: int, message: str) -> None:
        """The kernel's out-of-memory killer was at work when a process died."""
        async with self._is_told:
            self._starved[pid] = message
            self._is_told.notify_all()

    async def name(self, member: Member, spec: LoopSpec) -> tuple[Kind, str]:
        """Of which kind a death was, and how to say it."""
        if reason := self._killed.pop(member.pid, ""):
            return Kind.HANG, reason
        error: RayError | None = None
        try:
            await asyncio.wait_for(member.handle.pid.remote(), _ANSWER_S)
        except RayError as said:
            error = said
        except TimeoutError:
            logger.warning("nobody says of what process %d died", member.pid)
        kind = kind_of_death(error, is_node_alive=member.node_id in alive_ids())
        if is_killed_for_memory(error):
            cause = "Ray's memory monitor ended it, as its node was running low on memory"
            return kind, out_of_memory(cause, spec).what
        return kind, "its node is gone" if kind is Kind.PREEMPTION else "its process died"

    async def starved_of(self, dead: Mapping[int, int]) -> dict[int, str]:
        """Rank -> what the kernel ended its process for, if a worker says so in time.

        Args:
            dead: Rank -> its process.
        """
        pids = set(dead.values())
        async with self._is_told:
            with contextlib.suppress(asyncio.TimeoutError):
                is_told = self._is_told.wait_for(lambda: bool(pids & self._starved.keys()))
                await asyncio.wait_for(is_told, _EXPLAIN_S if pids else 0.0)
        return {rank: self._starved[pid] for rank, pid in dead.items() if pid in self._starved}
