"""The recorder as a Ray actor, and the client that workers and the driver hold. No torch."""

import os
import socket
import uuid
from typing import Any

import ray

from eagleray.actors.nodes import beside_this_process
from eagleray.actors.rpc import call
from eagleray.actors.telemetry import RaySink
from eagleray.actors.trainer.non_finite import Poison
from eagleray.actors.trainer.recorder import RunRecorder, WorkerInfo
from eagleray.actors.trainer.step_row import StepRow
from eagleray.platform.runs import RunStore
from eagleray.platform.storage import Storage
from eagleray.platform.telemetry import bind_log_context

CALL_TIMEOUT_S = 60.0
# Every method bears repetition, so calls under way when the process dies are made again.
_TASK_RETRIES = 5


class _RecorderActor:
    """RunRecorder in a process of its own."""

    def __init__(self, storage: Storage, run_id: str) -> None:
        is_restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._recorder = RunRecorder(
            RunStore(storage), run_id, sink=RaySink(), is_restarted=is_restarted
        )

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._recorder, method)(*args)


def create_recorder(storage: Storage, run_id: str) -> Any:
    """Start the recorder of a run; it ends with its creator."""
    options: dict[str, Any] = {
        "name": f"recorder:{run_id}", "num_cpus": 0, "max_restarts": -1,
        "max_task_retries": _TASK_RETRIES, "scheduling_strategy": beside_this_process(),
    }  # fmt: skip
    return ray.remote(_RecorderActor).options(**options).remote(storage, run_id)


class RecorderClient:
    """A typed way to the recorder; a Reporter for the loop."""

    def __init__(self, handle: Any, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._handle, self._timeout_s = handle, timeout_s

    def join(self, attempt: int, rank: int) -> None:
        """Note that this process is a worker of the attempt."""
        node_id = ray.get_runtime_context().get_node_id()
        info = WorkerInfo(rank, os.getpid(), socket.gethostname(), node_id)
        self.ask("join", attempt, info)
        bind_log_context(rank=rank, attempt=attempt)

    def begin(self, rank: int, world_size: int) -> int:
        """Number the attempt; rank 0 alone calls it."""
        attempt: int = self.ask("begin", world_size, uuid.uuid4().hex)
        return attempt

    def started(self, attempt: int, step: int) -> None:
        """Note after which step the attempt goes on; not waited for."""
        self._handle.call.remote("event", "start", {"attempt": attempt, "step": step})

    def report(self, row: StepRow) -> str | None:
        """Keep a row; a reason if training is to stop."""
        reason: str | None = self.ask("report", row)
        bind_log_context(step=row.step)
        return reason

    def skipped(self, poison: Poison) -> None:
        """Note that the update of a step was skipped."""
        self.ask("skipped", poison)

    def rewound(self, poison: Poison, to_step: int) -> None:
        """Note that training went back to an earlier state."""
        self.ask("rewound", poison, to_step)

    def rewinds(self) -> list[Poison]:
        """What the run has been rewound for so far."""
        rewinds: list[Poison] = self.ask("rewinds")
        return rewinds

    def ask(self, method: str, *args: Any) -> Any:
        """Call any method of the recorder."""
        what = f"the recorder's answer to {method}"
        return call(self._handle.call, method, *args, timeout_s=self._timeout_s, what=what)
