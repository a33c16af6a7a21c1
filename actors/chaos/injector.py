"""Carries a plan of faults out beside a run: finds the process, and ends it where it runs."""

import contextlib
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from eagleray.actors.chaos.hang import hang
from eagleray.actors.chaos.plan import ChaosPlan, Fault, Kind, Role
from eagleray.actors.trainer.progress import Progress
from eagleray.actors.trainer.seating import Place
from eagleray.platform.clock import steady_time

logger = logging.getLogger(__name__)

_ANSWER_S = 30.0
"""A node may have to start a process to answer, and a busy one is slow at that."""
_LATER_S = 0.3
_NAMES: dict[Role, str] = {
    "gang": "gang:{run}", "store": "checkpoint-store:{run}", "recorder": "recorder:{run}",
    "evictor": "evictor:{run}", "loader": "loader:{run}:", "controller": "controller:{run}-",
}  # fmt: skip
"""How the names of actors begin."""


@dataclass(frozen=True)
class Fired:
    """A fault that happened."""

    fault: Fault
    step: int
    pid: int
    time_s: float
    """Since the epoch."""


class Injector:
    """Follows a run as the receiver of its progress, and carries out a plan.

    A fault whose victim is not there, because it is being replaced, is tried again at the next
    look. Faults at steps happen in their order, one per look.

    Args:
        plan: What is to go wrong.
        clock: Seconds.
    """

    def __init__(self, plan: ChaosPlan, clock: Callable[[], float] = time.monotonic) -> None:
        self._due = sorted(plan.faults, key=lambda fault: fault.step)
        self._gusts = plan.gusts()
        self._gust: tuple[float, Fault] | None = None
        self._draw = random.Random(plan.seed)
        self._clock = clock
        self._step = 0
        self.fired: list[Fired] = []

    @property
    def waiting(self) -> int:
        """Faults that have not happened yet."""
        rest = list(self._gusts)
        self._gusts = iter(rest)
        return len(self._due) + len(rest) + (self._gust is not None)

    def __call__(self, run_id: str, progress: Progress) -> None:
        """Look whether a fault is due."""
        if not progress.workers:
            return
        if progress.rows:
            self._step = progress.rows[-1].step
        if self._due and progress.rows and self._step >= self._due[0].step:
            if self._fire(run_id, progress, self._due[0]):
                self._due.pop(0)
            return
        if self._gust is None:
            wait_s, fault = next(self._gusts, (0.0, None))
            if fault is not None:
                self._gust = self._clock() + wait_s, fault
        elif self._clock() >= self._gust[0] and self._fire(run_id, progress, self._gust[1]):
            self._gust = None

    def _fire(self, run_id: str, progress: Progress, fault: Fault) -> bool:
        found = list(self._victims(run_id, progress, fault))
        if not found:
            return False
        node_id, pid = self._draw.choice(found)
        strike = _strike_later if fault.role == "node" else _strike
        struck_s = _on(node_id, strike, fault.kind, pid)
        if not struck_s:
            return False
        logger.info("chaos: %s %s pid=%d step=%d", fault.kind, fault.role, pid, self._step)
        self.fired.append(Fired(fault, self._step, pid, struck_s))
        return True

    def _victims(self, run_id: str, progress: Progress, fault: Fault) -> Iterator[tuple[str, int]]:
        """Node and process of each that the fault may strike."""
        role, rank = fault.role, fault.rank
        get: Any = ray.get
        with contextlib.suppress(ValueError, RayError):
            if role == "process":
                for worker in progress.workers:
                    if rank in (None, worker.rank):
                        yield worker.node_id, worker.pid
            elif role == "node":
                here = ray.get_runtime_context().get_node_id()
                for node_id in sorted({worker.node_id for worker in progress.workers} - {here}):
                    if pid := _on(node_id, _raylet):
                        yield node_id, pid
            elif role == "worker":
                gang: Any = ray.get_actor(f"gang:{run_id}")
                places: list[Place] = get(gang.places.remote(), timeout=_ANSWER_S)
                for place in places:
                    if rank in (None, place.rank):
                        yield place.node_id, place.pid
            else:
                start = _NAMES[role].format(run=run_id)
                for name in ray.util.list_named_actors():
                    if name.startswith(start):
                        handle = ray.get_actor(name)
                        yield get(handle.__ray_call__.remote(_where), timeout=_ANSWER_S)


def _on(node_id: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on a node; 0 if it cannot be reached."""
    if node_id == ray.get_runtime_context().get_node_id():
        return function(*args)
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task: Any = ray.remote(function)
    with contextlib.suppress(RayError):
        call = task.options(num_cpus=0, scheduling_strategy=strategy).remote(*args)
        return ray.get(call, timeout=_ANSWER_S)
    return 0.0


def _strike(kind: Kind, pid: int) -> float:
    return _STRIKES[kind](pid)


def _strike_later(kind: Kind, pid: int) -> float:
    """When it will be: whoever calls lives on that node, and has to answer before."""
    threading.Timer(_LATER_S, _STRIKES[kind], (pid,)).start()
    return steady_time() + _LATER_S


def _kill(pid: int) -> float:
    return _signal(pid, signal.SIGKILL)


def _stop(pid: int) -> float:
    return _signal(pid, signal.SIGSTOP)


def _signal(pid: int, number: signal.Signals) -> float:
    """When it was sent, in seconds since the epoch; 0 if there is no such process."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return 0.0
    return steady_time()


_STRIKES: dict[Kind, Callable[[int], float]] = {"kill": _kill, "stop": _stop, "hang": hang}


def _raylet() -> int:
    """The process that a node's tasks descend from."""
    return os.getppid()


def _where(_: Any) -> tuple[str, int]:
    """Runs in an actor."""
    return ray.get_runtime_context().get_node_id(), os.getpid()
