"""A worker of Ray Train: holds a rank's place, and watches over the process that trains there.

Ray Train creates the workers, and all of them anew when one dies. They load no torch and hold no
state, so that costs a second or two and not a step: the processes belong to the run's gang. What
only somebody on the same machine can do is done here: to hold the process's journal, which outlives
the process that way, to see that it was stopped, and to end it when it hangs.
"""

import contextlib
import logging
import os
import signal
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import ray.train

from eagleray.actors.rpc import call, result
from eagleray.actors.trainer.journal import StepJournal
from eagleray.actors.trainer.oom_kills import OomKills
from eagleray.actors.trainer.run_actors import RunActors
from eagleray.actors.trainer.seams import LoopSpec
from eagleray.actors.trainer.seating import KEPT_JOURNALS, Place, Verdict
from eagleray.platform.errors import RunFailedError
from eagleray.platform.telemetry import bind_log_context, configure_logging

logger = logging.getLogger(__name__)

_CALL_S = 60.0
_LOOK_S = 0.25
STACKS = "stacks"
"""Folder in a run's, for the stacks of processes that hang."""
_GANG = "the answer of the run's gang"
_STOPPED, _GONE = ("T", "t"), ("", "Z", "X")
_STOPPED_S = 1.0
"""A process that is stopped for longer is taken for dead; a debugger's stops are, too."""


class RunOverError(RunFailedError):
    """The run has ended, and starting its workers anew changes nothing."""


@dataclass
class Watch:
    """What is known of the process at this place.

    Args:
        pid: Of the process; 0: there is none yet.
        step_timeout_s: Longest time between two steps.
    """

    pid: int
    journal: StepJournal | None
    step_timeout_s: float
    oom_kills: OomKills | None = None
    _newest: int = -1
    _changed: float = field(default_factory=time.monotonic)
    _stopped: float | None = None

    def look(self) -> str:
        """`stopped`, `stuck`, or nothing if all is well."""
        now = time.monotonic()
        if _state(self.pid) in _STOPPED:
            self._stopped = self._stopped or now
            if now - self._stopped >= _STOPPED_S:
                return "stopped"
        else:
            self._stopped = None
        newest = self.journal.newest() if self.journal else -1
        if newest != self._newest:
            self._newest, self._changed = newest, now
        elif now - self._changed >= self.step_timeout_s:
            # Once for each time-out.
            self._changed = now
            return "stuck"
        return ""

    def is_killed_for_memory(self) -> bool:
        """Whether the process is gone, and the kernel's OOM killer was at work; told once."""
        if self.oom_kills is None or _state(self.pid) not in _GONE:
            return False
        is_risen, self.oom_kills = self.oom_kills.risen(), None
        return is_risen


def train_worker(spec: LoopSpec, actors: RunActors, gang: Any) -> None:
    """Ray Train's entry point of one worker; returns when the run has ended well.

    Raises:
        RunOverError: It has ended otherwise.
        ServiceError: The gang is gone; it is there again for the next attempt.
    """
    configure_logging()
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    bind_log_context(run=actors.run_id, rank=rank)
    name = _attempt_name()
    node_id, gpus = ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()
    place = Place(rank, node_id, int(gpus[0]) if gpus else None, os.getpid())
    entering = name, world_size, place, spec, actors
    call(gang.enter, *entering, timeout_s=_CALL_S, what=_GANG)
    step_timeout_s = spec.train.step_timeout_s
    watch = Watch(0, None, step_timeout_s)
    held: deque[StepJournal] = deque()
    verdict = gang.verdict.remote()
    seated = gang.seated.remote(name, rank, 0)
    while True:
        ready, _ = ray.wait([verdict, seated], timeout=_LOOK_S)
        if verdict in ready:
            ended: Verdict | None = result(verdict, timeout_s=_CALL_S, what=_GANG)
            if ended is not None and ended.message:
                raise RunOverError(ended.message)
            if ended is not None:
                return
            verdict = gang.verdict.remote()
        if seated in ready:
            sits: tuple[int, str] | None = result(seated, timeout_s=_CALL_S, what=_GANG)
            if sits is not None:
                _tell_if_killed_for_memory(watch, gang, rank)
                watch = _opened(sits[0], sits[1], step_timeout_s)
                if watch.journal is not None:
                    held.appendleft(watch.journal)
                    gang.holds.remote(name, rank, watch.journal.path)
                    # The gang has forgotten this one by then.
                    if len(held) > KEPT_JOURNALS + 1:
                        held.pop().close()
            seated = gang.seated.remote(name, rank, watch.pid)
        _tell_if_killed_for_memory(watch, gang, rank)
        state = watch.look()
        if state == "stopped":
            logger.error("process %d is stopped: killed, so that another can go on", watch.pid)
            # Before it dies, so that its death is known for a hang.
            call(gang.stopped, watch.pid, timeout_s=_CALL_S, what=_GANG)
            _signal(watch.pid, signal.SIGKILL)
        elif state == "stuck":
            _end_if_stuck(watch, gang, name, rank, actors.recorder)


def _end_if_stuck(watch: Watch, gang: Any, name: str, rank: int, recorder: Any) -> None:
    """Have the process write its stacks; kill it if it is the one that the others wait for."""
    logger.error("process %d has done no step in %g s", watch.pid, watch.step_timeout_s)
    _signal(watch.pid, signal.SIGUSR2)
    newest = watch.journal.newest() if watch.journal else 0
    is_awaited = call(gang.stuck, name, rank, newest, timeout_s=_CALL_S, what=_GANG)
    what = "it hangs: killed, so that another can go on" if is_awaited else "it waits for another"
    details = {
        "rank": rank, "pid": watch.pid, "after_step": newest, "silent_s": watch.step_timeout_s,
        "message": what, "stacks": f"{STACKS}/{watch.pid}.txt",
    }  # fmt: skip
    # Not waited for: it is killed whether the recorder is there or not.
    recorder.call.remote("event", "hang", details)
    if is_awaited:
        _signal(watch.pid, signal.SIGKILL)


def _tell_if_killed_for_memory(watch: Watch, gang: Any, rank: int) -> None:
    if watch.is_killed_for_memory():
        logger.error("process %d was ended by the kernel's out-of-memory killer", watch.pid)
        gang.killed_for_memory.remote(rank, watch.pid)


def _opened(pid: int, journal: str, step_timeout_s: float) -> Watch:
    return Watch(pid, StepJournal.open(journal), step_timeout_s, OomKills(pid))


def _attempt_name() -> str:
    group = ray.util.get_current_placement_group()
    return str(group.id.hex()) if group else ""


def _state(pid: int) -> str:
    """A letter, see proc(5); empty if there is no such process."""
    if not pid:
        return ""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The name before it is in parentheses, and may hold any character.
    return status.rpartition(")")[2].split()[0]


def _signal(pid: int, number: signal.Signals) -> None:
    if pid:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
