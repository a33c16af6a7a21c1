"""The gang: the training processes of one run, and who of them sits where.

Ray Train holds the places: one small worker per rank, which starts in no time as it loads no torch,
and is placed, counted and replaced by Ray Train. The processes that train belong to this actor. So
a worker of Ray Train may die without a step being lost, and when a training process dies, the
others stay as they are: a spare takes its place, and all go on from the state that they hold.

Life: created by the run's driver under a name of the run; its processes end with it. Restarted by
Ray if its process dies: the new one starts new processes, which go on from a snapshot.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

from eagleray.actors.nodes import alive_ids, beside_this_process
from eagleray.actors.trainer.crew import Crew, Member
from eagleray.actors.trainer.deaths import Deaths
from eagleray.actors.trainer.failures import FailureCount, Kind, Limits
from eagleray.actors.trainer.memory_needs import out_of_memory
from eagleray.actors.trainer.phases import Interruption
from eagleray.actors.trainer.process_actor import create_process
from eagleray.actors.trainer.run_actors import RunActors
from eagleray.actors.trainer.seams import LoopSpec, Seat
from eagleray.actors.trainer.seating import (
    KEPT_JOURNALS,
    End,
    Outcome,
    Place,
    Plan,
    Verdict,
    bond_of,
    laggards,
    local_ranks,
)

logger = logging.getLogger(__name__)

_RETURN_S = 15.0
"""How long a member may take to leave an attempt that is over, before it is killed."""
_POLL_S = 20.0
_PAUSE_AGAIN_S = 2.0
"""A process that had not begun has not heard that it is to pause."""
_ALL_STUCK_S = 2.0
"""Within which all ranks are found to be stuck, once one is."""
_MESSAGE_CHARS = 2000


@dataclass(frozen=True)
class GangOptions:
    """How a gang lives.

    Attributes:
        limits: Of what is forgiven.
        spares: Warm processes beside those that train, on each node.
        stacks: Folder for the stacks of processes that hang.
    """

    limits: Limits
    spares: int
    stacks: Path


@dataclass
class Group:
    """The workers of Ray Train that hold the places of one of its attempts."""

    name: str
    world_size: int
    places: dict[int, Place] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether all workers have come."""
        return len(self.places) == self.world_size


class Gang:
    """What runs in the actor; its methods run on one event loop.

    Args:
        options: How it lives.
    """

    def __init__(self, options: GangOptions) -> None:
        self._options = options
        self._group: Group | None = None
        self._seated = Group("", 0)  # whose places are sat at
        self._crew = Crew(self._new_process, options.spares)
        # Rank -> journals of who sits and sat there, as the worker of its place holds them.
        self._kept: dict[int, list[str]] = {}
        self._verdict: Verdict | None = None
        self._count = FailureCount(options.limits)
        self._deaths = Deaths()
        self._stuck: dict[int, int] = {}
        self._changed = asyncio.Condition()
        self._wants_save = False
        self._is_moved = asyncio.Event()  # the places are others than those that are trained on
        self._interruption: Interruption | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def enter(
        self, name: str, world_size: int, place: Place, spec: LoopSpec, actors: RunActors
    ) -> None:
        """A worker of Ray Train's attempt `name` holds a place.

        What to train, and the run's actors, come with it: with handles among the arguments of its
        constructor, this actor could not be restarted.
        """
        self._spec, self._actors = spec, actors
        if not self._tasks:
            self._start(self._direct())
        async with self._changed:
            before = self._group
            if before is None or before.name != name:
                self._group = Group(name, world_size)
            assert self._group is not None
            self._group.places[place.rank] = place
            if self._group.is_complete:
                self._kept.clear()
                self._is_moved.set()
            self._changed.notify_all()

    async def expect(self, spec: LoopSpec, actors: RunActors, node_id: str, count: int) -> None:
        """Start processes on a node where ranks will sit, while Ray Train still finds places."""
        self._spec, self._actors = spec, actors
        self._crew.expect(node_id, count)

    async def seated(self, name: str, rank: int, pid: int) -> tuple[int, str] | None:
        """Process and journal of a rank, as soon as the process is not `pid`; None for not yet."""

        def other() -> Member | None:
            member = self._crew.members.get(rank) if name == self._seated.name else None
            return member if member and member.journal and member.pid != pid else None

        await self._wait(lambda: other() is not None)
        member = other()
        return (member.pid, member.journal) if member else None

    async def holds(self, name: str, rank: int, path: str) -> None:
        """The worker of a rank holds the journal of its process open."""
        if self._group is not None and self._group.name == name:
            self._kept.setdefault(rank, []).insert(0, path)
            del self._kept[rank][KEPT_JOURNALS:]

    async def stuck(self, name: str, rank: int, newest: int) -> bool:
        """The process of a rank makes no progress; whether it is the one that the others wait for.

        Args:
            name: Of Ray Train's attempt.
            rank: Of the process.
            newest: The newest state in its journal.
        """
        group = self._group
        if group is None or group.name != name:
            return False
        self._stuck[rank] = newest
        await asyncio.sleep(_ALL_STUCK_S)
        is_last, member = rank in laggards(self._stuck), self._crew.members.get(rank)
        if is_last and member is not None:
            self._deaths.kill(member.pid, "its process made no progress and was killed")
        return is_last

    async def stopped(self, pid: int) -> None:
        """A process is stopped, and is about to be killed."""
        self._deaths.kill(pid, "its process was stopped and was killed")

    async def killed_for_memory(self, rank: int, pid: int) -> None:
        """The kernel's out-of-memory killer was at work when a process died."""
        cause = f"the kernel's out-of-memory killer ended process {pid}"
        message = out_of_memory(cause, self._spec).what
        self._tell("out_of_memory", {"ranks": [rank], "message": message})
        await self._deaths.starve(pid, message)

    async def save(self, reason: str) -> None:
        """Have a snapshot taken at once, and go on."""
        self._tell("preemption", {"message": reason})
        self._wants_save = True
        self._is_moved.set()

    async def places(self) -> list[Place]:
        """The places that Ray Train's workers hold now."""
        return list(self._group.places.values()) if self._group else []

    async def verdict(self) -> Verdict | None:
        """How the run ended; None if it has not yet."""
        await self._wait(lambda: self._verdict is not None)
        return self._verdict

    async def reached(self, phase: str) -> None:
        """Rank 0 has come to a phase of an attempt: `met`, `restored`, `stepped`."""
        self._reach(phase)
        if phase == "stepped":
            if self._interruption is not None:
                self._tell(self._interruption.event, self._interruption.seconds())
                self._interruption = None
            self._start(self._crew.fill_spares())

    async def _wait(self, condition: Any) -> None:
        async with self._changed:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(condition), _POLL_S)

    async def _direct(self) -> None:
        """Attempt after attempt, until the run ends."""
        try:
            while self._verdict is None:
                group = await self._complete_group()
                outcomes = await self._attempt(group)
                verdict = await self._judged(outcomes)
                if verdict is not None:
                    await self._end(verdict)
        except Exception as error:
            logger.exception("the gang failed")
            await self._end(Verdict(f"the run's gang failed: {error!r}"[:_MESSAGE_CHARS]))

    async def _complete_group(self) -> Group:
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._group is not None and self._group.is_complete
            )
            assert self._group is not None
            self._is_moved.clear()
            return self._group

    async def _attempt(self, group: Group) -> dict[int, Outcome | None]:
        """Seat the members and let them train; rank -> how it ended, None for a death."""
        moved = asyncio.create_task(self._moved_elsewhere(group))
        try:
            # On a node that is going, a process may never come.
            plans = await _unless(moved, self._seat(group, moved))
            return await self._trained(group, plans, moved) if plans is not None else {}
        finally:
            moved.cancel()

    async def _trained(
        self, group: Group, plans: dict[int, Plan], moved: asyncio.Task[None]
    ) -> dict[int, Outcome | None]:
        self._stuck.clear()
        members = self._crew.members
        try:
            address = await members[0].handle.listen.remote() if group.world_size > 1 else None
        except RayError:
            return {rank: None if rank == 0 else _interrupted(m) for rank, m in members.items()}
        self._reach("seated")
        running = {
            asyncio.create_task(_outcome(members[rank].handle.run.remote(plan, address))): rank
            for rank, plan in plans.items()
        }
        outcomes: dict[int, Outcome | None] = {}
        waiting = {*running}
        pause_ends: float | None = None
        while waiting and not _is_torn(outcomes.values()):
            watched = {*waiting, moved} if pause_ends is None else waiting
            timeout = None if pause_ends is None else _PAUSE_AGAIN_S
            done, _ = await asyncio.wait(
                watched, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            outcomes |= {running[task]: task.result() for task in done & waiting}
            waiting -= done
            if not moved.done():
                continue
            if pause_ends is None:
                self._wants_save = False
                pause_ends = time.monotonic() + self._spec.train.step_timeout_s
                self._interruption = Interruption("resized")
                self._tell_resize(group)
            elif time.monotonic() > pause_ends:
                break
            self._pause(running[task] for task in waiting)
        if waiting:
            self._interruption = Interruption("recovery")
            outcomes |= await self._gathered({task: running[task] for task in waiting})
        elif _is_torn(outcomes.values()):
            self._interruption = Interruption("recovery")
        self._reach("gathered")
        return outcomes

    async def _gathered(self, running: dict[asyncio.Task[Outcome | None], int]) -> Any:
        """The outcomes of those who wait for a peer that is gone; who does not return is killed."""
        for rank in running.values():
            with contextlib.suppress(RayError):
                self._crew.members[rank].handle.sever.remote()
        _, late = await asyncio.wait(running, timeout=_RETURN_S)
        for task in late:
            rank = running[task]
            logger.error("rank %d did not leave the attempt in %g s: killed", rank, _RETURN_S)
            member = self._crew.members[rank]
            reason = f"its process did not leave the attempt in {_RETURN_S:g} s and was killed"
            self._deaths.kill(member.pid, reason)
            ray.kill(member.handle)
        if late:
            await asyncio.wait(late)
        return {rank: task.result() for task, rank in running.items()}

    def _pause(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            with contextlib.suppress(RayError):
                self._crew.members[rank].handle.pause.remote()

    async def _moved_elsewhere(self, group: Group) -> None:
        """Return when Ray Train holds other places; the same ones are taken over in passing.

        Who is to sit there is made ready before, while the others train.
        """
        while True:
            await self._is_moved.wait()
            self._is_moved.clear()
            now = self._group
            assert now is not None
            if now.world_size != group.world_size or now.places != group.places:
                await self._crew.welcome(now.places.values())
                return
            self._seated = now
            if self._wants_save:
                return

    def _tell_resize(self, group: Group) -> None:
        now = self._group
        if now is None or now is group:
            return
        sizes = {"from": group.world_size, "to": now.world_size}
        self._tell("resize", {**sizes, "message": "the places that Ray Train holds are others"})

    async def _judged(self, outcomes: dict[int, Outcome | None]) -> Verdict | None:
        """Note what happened; how the run ended, None if it goes on."""
        if not outcomes:
            return None
        ends = [outcome.end for outcome in outcomes.values() if outcome]
        if len(ends) == len(outcomes) and all(end is End.FINISHED for end in ends):
            return Verdict()
        failed = [o.message for o in outcomes.values() if o and o.end is End.FAILED]
        if failed:
            return Verdict(failed[0] or "it met a failure that no retry can mend")
        is_lost = any(outcome and outcome.end is End.LOST for outcome in outcomes.values())
        if is_lost:
            self._kept.clear()
            what = {"message": "what a dead process alone knew is gone: on from a snapshot"}
            self._tell("state_lost", what)
        faults, kinds, dead = {}, set(), {}
        for rank, outcome in outcomes.items():
            if outcome is None:
                kind, faults[rank] = await self._deaths.name(self._crew.members[rank], self._spec)
                kinds.add(kind)
                dead[rank] = self._crew.members.pop(rank).pid
            else:
                self._crew.members[rank].standing = None if is_lost else outcome.standing
                self._crew.members[rank].is_noted = not is_lost and outcome.is_noted
                if outcome.message and outcome.end is not End.LOST:
                    faults[rank] = outcome.message
        if not faults:
            # Places that moved, or a state that could not be gone on from: nobody died of it.
            return None
        # What the others met beside a death, they met because of it.
        exceeded = self._count.add(kinds or {Kind.FAILURE})
        if exceeded:
            faults |= await self._deaths.starved_of(dead)
        message = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(faults.items()))
        with contextlib.suppress(RayError):
            self._actors.recorder.call.remote("fault", message[:_MESSAGE_CHARS], sorted(faults))
        if exceeded:
            return Verdict(f"{exceeded}; the last: {message}"[:_MESSAGE_CHARS])
        return None

    async def _seat(self, group: Group, moved: asyncio.Task[None]) -> dict[int, Plan] | None:
        """A member for each place, with its journal; rank -> its plan. None: a place is gone."""
        crew = self._crew
        if group.world_size != self._seated.world_size:
            # The journals are of other seats.
            self._kept.clear()
            for member in crew.members.values():
                member.forget()
        while True:
            crew.seat(group.places)
            self._seated = group
            dead = await crew.prepare(group.world_size)
            if not dead:
                break
            # Of a spare that died while it waited, nobody has noticed.
            is_known = any(not crew.members[rank].is_warm for rank in dead)
            for rank in dead:
                del crew.members[rank]
            is_moving = not {group.places[rank].node_id for rank in dead} <= alive_ids()
            if is_moving:
                # With the worker at that place, which is counted.
                await asyncio.shield(moved)
                return None
            if is_known and (exceeded := self._count.add([Kind.FAILURE])):
                message = f"{exceeded}; the last: ranks {dead} died while they started"
                await self._end(Verdict(message))
                return None
        members = crew.members
        standings = {rank: member.standing for rank, member in members.items()}
        inherited = {
            rank: () if member.standing else tuple(self._kept.get(rank, ()))
            for rank, member in members.items()
        }
        # A rank's own sums are nowhere but in its journal.
        is_known = all(m.is_noted or inherited[rank] for rank, m in members.items())
        bond = bond_of(standings) if is_known else None
        numbers = local_ranks(group.places.values())
        async with self._changed:
            self._changed.notify_all()
        return {
            rank: Plan(
                Seat(rank, group.world_size), numbers[rank], bond, inherited[rank], place.gpu
            )
            for rank, place in group.places.items()
        }

    def _new_process(self, node_id: str) -> Any:
        folder, this = self._options.stacks, ray.get_runtime_context().current_actor
        return create_process(self._spec, self._actors, this, folder, node_id)

    async def _end(self, verdict: Verdict) -> None:
        async with self._changed:
            self._verdict = verdict
            self._changed.notify_all()

    def _reach(self, phase: str) -> None:
        if self._interruption is not None:
            self._interruption.reach(phase)

    def _tell(self, event: str, details: dict[str, Any]) -> None:
        with contextlib.suppress(RayError):
            self._actors.recorder.call.remote("event", event, details)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_event_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def create_gang(run_id: str, options: GangOptions) -> Any:
    """Start the gang of a run; it ends with its creator."""
    settings: dict[str, Any] = {
        "name": f"gang:{run_id}", "num_cpus": 0, "max_restarts": -1,
        "max_concurrency": 10_000, "scheduling_strategy": beside_this_process(),
    }  # fmt: skip
    return ray.remote(Gang).options(**settings).remote(options)


async def _outcome(reference: Any) -> Outcome | None:
    """How a member's part ended; None if it died."""
    try:
        outcome: Outcome = await reference
    except (RayActorError, OutOfMemoryError):
        return None
    except RayError as error:
        # A bug, or what only this process has: another one may do better.
        lines = str(error).strip().splitlines()
        return Outcome(End.INTERRUPTED, message=lines[-1][:500] if lines else type(error).__name__)
    return outcome


def _interrupted(member: Member) -> Outcome:
    return Outcome(End.INTERRUPTED, member.standing, member.is_noted)


def _is_torn(outcomes: Any) -> bool:
    well = (End.FINISHED, End.PAUSED)
    return any(outcome is None or outcome.end not in well for outcome in outcomes)


async def _unless(other: asyncio.Task[None], work: Coroutine[Any, Any, Any]) -> Any:
    """The result of some work; None if another task ends before it."""
    task = asyncio.create_task(work)
    await asyncio.wait({task, other}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        return task.result()
    task.cancel()
    return None
