"""A training worker on Ray Train: it finds its seat and its actors, then runs the loop.

Ray Train creates the workers, and all of them anew when one dies; nothing of a worker survives but
what it handed to the checkpoint store and the recorder.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import ray.train
from ray.train import UserCallback

from eagleray.actors.checkpoint.actor import StoreClient
from eagleray.actors.data.loader import Batch
from eagleray.actors.data.loader_actor import LoaderClient
from eagleray.actors.rpc import call
from eagleray.actors.trainer.loop import LoopSpec, Seat, StepRow, run_loop
from eagleray.actors.trainer.recorder import Fatal, RunRecorder, WorkerInfo
from eagleray.actors.trainer.stepper import NonFiniteLossError
from eagleray.platform.errors import EagleRayError
from eagleray.platform.runs import RunStore
from eagleray.platform.storage import Storage

_CALL_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RunActors:
    """Handles of the actors of one run; they outlive its workers."""

    recorder: Any
    store: Any
    loaders: Mapping[str, Any]
    """Node id -> the loader there."""
    evictor: Any = None


class _RecorderActor:
    """RunRecorder in a process of its own."""

    def __init__(self, storage: Storage, run_id: str) -> None:
        self._recorder = RunRecorder(RunStore(storage), run_id)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._recorder, method)(*args)


def create_recorder(storage: Storage, run_id: str) -> Any:
    """Start the recorder of a run; it ends with its creator."""
    options: dict[str, Any] = {"name": f"recorder:{run_id}", "num_cpus": 0, "max_restarts": -1}
    return ray.remote(_RecorderActor).options(**options).remote(storage, run_id)


class RecorderClient:
    """A typed way to the recorder; a Reporter for the loop."""

    def __init__(self, handle: Any, timeout_s: float = _CALL_TIMEOUT_S) -> None:
        self._handle, self._timeout_s = handle, timeout_s

    def join(self, attempt: int, rank: int) -> None:
        """Note that this process is a worker of the attempt."""
        node_id = ray.get_runtime_context().get_node_id()
        info = WorkerInfo(rank, os.getpid(), socket.gethostname(), node_id)
        self.ask("join", attempt, info)

    def begin(self, rank: int, world_size: int) -> int:
        """Number the attempt; rank 0 alone calls it."""
        attempt: int = self.ask("begin", world_size)
        return attempt

    def report(self, row: StepRow) -> str | None:
        """Keep a row; a reason if training is to stop."""
        reason: str | None = self.ask("report", row)
        return reason

    def ask(self, method: str, *args: Any) -> Any:
        """Call any method of the recorder."""
        what = f"the recorder's answer to {method}"
        return call(self._handle.call, method, *args, timeout_s=self._timeout_s, what=what)


class LoaderSource:
    """The loader's actor as a BatchSource for the loop."""

    def __init__(self, client: LoaderClient) -> None:
        self._client = client

    def batch(self, step: int, rank: int, world_size: int) -> Batch:
        """This rank's part of a step's global batch."""
        return self._client.batch(step, rank, world_size)

    def eval_batch(self, index: int) -> np.ndarray:
        """Held-out tokens."""
        return self._client.eval_batch(index).tokens


class FaultCallback(UserCallback):
    """Tells the recorder of workers that died or failed; runs in Ray Train's controller."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder

    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
        """Ray Train's hook."""
        message = "; ".join(
            f"rank {rank}: {_first_line(error)}"
            for rank, error in sorted(worker_exceptions.items())
        )
        # Not waited for: the controller must go on to restart the workers.
        self._recorder.call.remote("fault", message[:2000], sorted(worker_exceptions))


def train_worker(config: dict[str, Any]) -> None:
    """Ray Train's entry point of one worker.

    A failure that a restart cannot mend is noted before it ends the attempt; in the next attempt
    every worker sees the note and returns at once, so the driver learns of it without more retries.
    """
    spec: LoopSpec = config["spec"]
    actors: RunActors = config["actors"]
    context = ray.train.get_context()
    seat = Seat(context.get_world_rank(), context.get_world_size())
    recorder = RecorderClient(actors.recorder)
    node_id = ray.get_runtime_context().get_node_id()
    if recorder.ask("fatal") is not None:
        return
    loader = actors.loaders.get(node_id) or next(iter(actors.loaders.values()))
    source = LoaderSource(LoaderClient(loader, _CALL_TIMEOUT_S))
    store = StoreClient(actors.store, spec.train.checkpoint.write_timeout_s + _CALL_TIMEOUT_S)
    try:
        run_loop(seat, spec, source, store, recorder)
    except NonFiniteLossError as error:
        fix = "lower train.optimizer.lr or train.clip_grad_norm, or look at the data of that step"
        recorder.ask("fail", Fatal(type(error).__name__, f"training stopped: {error}", fix, 1))
        raise
    except EagleRayError as error:
        # Deadlines and dead actors may be passing; the rest is the user's or the storage's fault.
        if error.exit_code != 1:
            recorder.ask(
                "fail", Fatal(type(error).__name__, error.what, error.fix, error.exit_code)
            )
        raise


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__
