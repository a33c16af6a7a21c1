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
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

from eagleray.actors.trainer.failures import (
    FailureCount,
    Kind,
    Limits,
    is_killed_for_memory,
    kind_of_death,
)
from eagleray.actors.trainer.memory_needs import out_of_memory
from eagleray.actors.trainer.process_actor import create_process
from eagleray.actors.trainer.run_actors import RunActors
from eagleray.actors.trainer.seams import LoopSpec, Seat, Standing
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
_DEATH_S = 2.0
_EXPLAIN_S = 1.0
"""How long the last word on a run waits for who can say why its process died."""
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
        self._members: dict[int, Member] = {}  # by rank
        self._spares: list[Member] = []
        # Rank -> journals of who sits and sat there, as the worker of its place holds them.
        self._kept: dict[int, list[str]] = {}
        self._verdict: Verdict | None = None
        self._count = FailureCount(options.limits)
        self._killed: dict[int, str] = {}  # by us: process -> why
        self._starved: dict[int, str] = {}  # by the kernel, for its memory: process -> in words
        self._stuck: dict[int, int] = {}
        self._changed = asyncio.Condition()
        self._is_moved = asyncio.Event()  # the places are others than those that are trained on
        self._recovery: dict[str, Any] | None = None
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
        self._spares += [self._created(node_id) for _ in range(count)]

    async def seated(self, name: str, rank: int, pid: int) -> tuple[int, str] | None:
        """Process and journal of a rank, as soon as the process is not `pid`; None for not yet."""

        def other() -> Member | None:
            member = self._members.get(rank)
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
        is_last, member = rank in laggards(self._stuck), self._members.get(rank)
        if is_last and member is not None:
            self._killed[member.pid] = "its process made no progress and was killed"
        return is_last

    async def stopped(self, pid: int) -> None:
        """A process is stopped, and is about to be killed."""
        self._killed[pid] = "its process was stopped and was killed"

    async def killed_for_memory(self, rank: int, pid: int) -> None:
        """The kernel's out-of-memory killer was at work when a process died."""
        cause = f"the kernel's out-of-memory killer ended process {pid}"
        message = out_of_memory(cause, self._spec).what
        with contextlib.suppress(RayError):
            told = {"ranks": [rank], "message": message}
            self._actors.recorder.call.remote("event", "out_of_memory", told)
        async with self._changed:
            self._starved[pid] = message
            self._changed.notify_all()

    async def places(self) -> list[Place]:
        """The places that Ray Train's workers hold now."""
        return list(self._group.places.values()) if self._group else []

    async def verdict(self) -> Verdict | None:
        """How the run ended; None if it has not yet."""
        await self._wait(lambda: self._verdict is not None)
        return self._verdict

    async def reached(self, phase: str) -> None:
        """Rank 0 has come to a phase of an attempt: `met`, `restored`, `stepped`."""
        if self._recovery is not None:
            self._recovery.setdefault(phase, time.time())
        if phase == "stepped":
            self._record_recovery()
            self._start(self._fill_spares())

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
        self._stuck.clear()
        plans = await self._seat(group)
        if plans is None:
            return {}
        lead = self._members[0].handle
        try:
            address = await lead.listen.remote() if group.world_size > 1 else None
        except RayError:
            return {
                rank: None if rank == 0 else _interrupted(m) for rank, m in self._members.items()
            }
        self._reach("seated")
        running = {
            asyncio.create_task(
                _outcome(self._members[rank].handle.run.remote(plan, address))
            ): rank
            for rank, plan in plans.items()
        }
        moved = asyncio.create_task(self._is_moved_elsewhere(group))
        outcomes: dict[int, Outcome | None] = {}
        waiting = {*running}
        try:
            while waiting and not _is_torn(outcomes.values()):
                done, _ = await asyncio.wait({*waiting, moved}, return_when=asyncio.FIRST_COMPLETED)
                outcomes |= {running[task]: task.result() for task in done & waiting}
                waiting -= done
                if moved in done:
                    await self._pause(running[task] for task in waiting)
                    break
            if waiting:
                torn_at = time.time()
                outcomes |= await self._gathered({task: running[task] for task in waiting})
                self._recovery = {"detected": torn_at, "gathered": time.time()}
        finally:
            moved.cancel()
        return outcomes

    async def _gathered(self, running: dict[asyncio.Task[Outcome | None], int]) -> Any:
        """The outcomes of those who wait for a peer that is gone; who does not return is killed."""
        for rank in running.values():
            with contextlib.suppress(RayError):
                self._members[rank].handle.sever.remote()
        _, late = await asyncio.wait(running, timeout=_RETURN_S)
        for task in late:
            rank = running[task]
            logger.error("rank %d did not leave the attempt in %g s: killed", rank, _RETURN_S)
            reason = f"its process did not leave the attempt in {_RETURN_S:g} s and was killed"
            self._killed[self._members[rank].pid] = reason
            ray.kill(self._members[rank].handle)
        if late:
            await asyncio.wait(late)
        return {rank: task.result() for task, rank in running.items()}

    async def _pause(self, ranks: Any) -> None:
        for rank in ranks:
            with contextlib.suppress(RayError):
                self._members[rank].handle.pause.remote()

    async def _is_moved_elsewhere(self, group: Group) -> None:
        """Return when Ray Train holds other places; the same ones are taken over in passing."""
        while True:
            await self._is_moved.wait()
            self._is_moved.clear()
            now = self._group
            assert now is not None
            if now.world_size != group.world_size or now.places != group.places:
                return

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
            with contextlib.suppress(RayError):
                self._actors.recorder.call.remote("event", "state_lost", what)
        faults, kinds, dead = {}, set(), {}
        for rank, outcome in outcomes.items():
            if outcome is None:
                kind, faults[rank] = await self._death(self._members[rank])
                kinds.add(kind)
                dead[rank] = self._members.pop(rank).pid
            else:
                self._members[rank].standing = None if is_lost else outcome.standing
                self._members[rank].is_noted = not is_lost and outcome.is_noted
                if outcome.message and outcome.end is not End.LOST:
                    faults[rank] = outcome.message
        if not faults:
            # Places that moved, or a state that could not be gone on from: nobody died of it.
            return None
        # What the others met beside a death, they met because of it.
        exceeded = self._count.add(kinds or {Kind.FAILURE})
        if exceeded:
            faults |= await self._starved_of(dead)
        message = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(faults.items()))
        with contextlib.suppress(RayError):
            self._actors.recorder.call.remote("fault", message[:_MESSAGE_CHARS], sorted(faults))
        if exceeded:
            return Verdict(f"{exceeded}; the last: {message}"[:_MESSAGE_CHARS])
        return None

    async def _death(self, member: Member) -> tuple[Kind, str]:
        """Of which kind a death was, and how to say it."""
        if reason := self._killed.pop(member.pid, ""):
            return Kind.HANG, reason
        error: RayError | None = None
        try:
            await asyncio.wait_for(member.handle.pid.remote(), _DEATH_S)
        except RayError as said:
            error = said
        except TimeoutError:
            logger.warning("nobody says of what process %d died", member.pid)
        kind = kind_of_death(error, is_node_alive=member.node_id in _alive_nodes())
        if is_killed_for_memory(error):
            cause = "Ray's memory monitor ended it, as its node was running low on memory"
            return kind, out_of_memory(cause, self._spec).what
        return kind, "its node is gone" if kind is Kind.PREEMPTION else "its process died"

    async def _starved_of(self, dead: dict[int, int]) -> dict[int, str]:
        """Rank -> what the kernel ended its process for, if a worker says so in time."""
        pids = set(dead.values())
        async with self._changed:
            with contextlib.suppress(asyncio.TimeoutError):
                is_told = self._changed.wait_for(lambda: bool(pids & self._starved.keys()))
                await asyncio.wait_for(is_told, _EXPLAIN_S if pids else 0.0)
        return {rank: self._starved[pid] for rank, pid in dead.items() if pid in self._starved}

    async def _seat(self, group: Group) -> dict[int, Plan] | None:
        """A member for each place, with its journal; rank -> its plan. None: a place is gone."""
        while True:
            self._dismiss(group)
            for rank, place in sorted(group.places.items()):
                if rank not in self._members:
                    self._members[rank] = self._taken(place.node_id)
            dead = await self._prepared(group.world_size)
            if not dead:
                break
            # Of a spare that died while it waited, nobody has noticed.
            is_known = any(not self._members[rank].is_warm for rank in dead)
            for rank in dead:
                del self._members[rank]
            is_moving = not {group.places[rank].node_id for rank in dead} <= _alive_nodes()
            kind = Kind.PREEMPTION if is_moving else Kind.FAILURE
            if is_known and (exceeded := self._count.add([kind])):
                message = f"{exceeded}; the last: ranks {dead} died while they started"
                await self._end(Verdict(message))
                return None
            if is_moving:
                await self._is_moved.wait()
                return None
        standings = {rank: member.standing for rank, member in self._members.items()}
        inherited = {
            rank: () if member.standing else tuple(self._kept.get(rank, ()))
            for rank, member in self._members.items()
        }
        # A rank's own sums are nowhere but in its journal.
        is_known = all(m.is_noted or inherited[rank] for rank, m in self._members.items())
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

    def _dismiss(self, group: Group) -> None:
        """End members whose place is gone; their nodes have others."""
        for rank, member in list(self._members.items()):
            place = group.places.get(rank)
            if place is None or place.node_id != member.node_id:
                ray.kill(member.handle)
                del self._members[rank]

    def _taken(self, node_id: str) -> Member:
        """A spare of a node, or a new process there."""
        for spare in self._spares:
            if spare.node_id == node_id:
                self._spares.remove(spare)
                return spare
        return self._created(node_id)

    def _created(self, node_id: str) -> Member:
        folder, this = self._options.stacks, ray.get_runtime_context().current_actor
        return Member(create_process(self._spec, self._actors, this, folder, node_id), node_id)

    async def _prepared(self, world_size: int) -> list[int]:
        """Wait until all members are there, with their journals; the ranks of those that died."""

        async def prepare(member: Member) -> None:
            member.pid = await member.handle.pid.remote()
            member.journal = await member.handle.open_journal.remote(world_size)

        ranks = sorted(self._members)
        results = await asyncio.gather(
            *(prepare(self._members[rank]) for rank in ranks), return_exceptions=True
        )
        dead = []
        for rank, result in zip(ranks, results, strict=True):
            if isinstance(result, RayError):
                logger.warning("process of rank %d is not there: %s", rank, result)
                dead.append(rank)
            elif isinstance(result, BaseException):
                raise result
        return dead

    async def _fill_spares(self) -> None:
        """Have as many warm processes on each node as wished."""
        group = self._group
        for node_id in sorted({place.node_id for place in group.places.values()} if group else ()):
            missing = self._options.spares - sum(s.node_id == node_id for s in self._spares)
            for _ in range(missing):
                spare = self._created(node_id)
                self._spares.append(spare)
                try:
                    await spare.handle.warm_up.remote()
                    spare.is_warm = True
                except RayError as error:
                    # Deaths are met by a new process then, which takes seconds.
                    logger.warning("a spare died while it warmed up: %s", error)
                    if spare in self._spares:
                        self._spares.remove(spare)

    async def _end(self, verdict: Verdict) -> None:
        async with self._changed:
            self._verdict = verdict
            self._changed.notify_all()

    def _reach(self, phase: str) -> None:
        if self._recovery is not None:
            self._recovery.setdefault(phase, time.time())

    def _record_recovery(self) -> None:
        recovery, self._recovery = self._recovery, None
        if recovery is None:
            return
        phases, before = {}, recovery["detected"]
        for phase in ("gathered", "seated", "met", "restored", "stepped"):
            if phase in recovery:
                phases[f"{phase}_s"] = round(recovery[phase] - before, 3)
                before = recovery[phase]
        with contextlib.suppress(RayError):
            self._actors.recorder.call.remote("event", "recovery", phases)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_event_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def create_gang(run_id: str, options: GangOptions) -> Any:
    """Start the gang of a run; it ends with its creator."""
    settings: dict[str, Any] = {
        "name": f"gang:{run_id}", "num_cpus": 0, "max_restarts": -1,
        "max_concurrency": 10_000,
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


def _alive_nodes() -> set[str]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"] for node in nodes if node["Alive"]}


def _is_torn(outcomes: Any) -> bool:
    return any(outcome is None or outcome.end is not End.FINISHED for outcome in outcomes)
