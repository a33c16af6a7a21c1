"""The driver of a training run: starts its actors and workers on Ray Train, follows, and collects.

Ray must be connected. Who restarts what: Ray Train the workers (up to `train.max_failures` times),
Ray the loader, store and recorder actors; if the driver dies, all of these end with it and
`eagleray resume` goes on from storage.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError

from eagleray.actors.cache.evictor_actor import create_evictor
from eagleray.actors.checkpoint.actor import create_store
from eagleray.actors.data.loader_actor import LoaderSpec, create_loader
from eagleray.actors.trainer.loop import LoopSpec
from eagleray.actors.trainer.recorder import Fatal, RunView, WorkerInfo
from eagleray.actors.trainer.recorder_actor import RecorderClient, create_recorder
from eagleray.actors.trainer.step_row import StepRow
from eagleray.actors.trainer.worker import FaultCallback, RunActors, train_worker
from eagleray.platform.config import ProjectConfig
from eagleray.platform.errors import EagleRayError, RunFailedError
from eagleray.platform.storage import Storage

_POLL_S = 0.25
# Ray Train looks at its workers at this interval: it bounds how fast a death is noticed.
_TRAIN_ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
    "RAY_TRAIN_METRICS_ENABLED": "1",
}


@dataclass(frozen=True)
class Progress:
    """What a follower of a run sees."""

    rows: tuple[StepRow, ...]
    attempt: int
    workers: tuple[WorkerInfo, ...]
    first_row_at: dict[int, float]


class FatalRunError(RunFailedError):
    """A run ended by a failure that no retry can mend; carries the exit code of its cause."""

    def __init__(self, what: str, fix: str, exit_code: int) -> None:
        super().__init__(what, fix)
        self.args = (what, fix, exit_code)
        self.exit_code = exit_code


class Training:
    """One run being trained; made by `start`, ended by `wait`.

    Args:
        config: The resolved project.
        storage: The project's storage.
        run_id: A run that `RunStore.create` made, new or to be resumed.
        spec: What to train.
        dataset: Digest of the data set.
        redis_url: The feature cache's Redis; None for the loaders' own memory.
    """

    def __init__(
        self,
        config: ProjectConfig,
        storage: Storage,
        run_id: str,
        spec: LoopSpec,
        dataset: str,
        redis_url: str | None = None,
    ) -> None:
        self._config, self._storage, self._run_id, self._spec = config, storage, run_id, spec
        self._actors = _create_actors(config, storage, run_id, dataset, redis_url)
        self._recorder = RecorderClient(self._actors.recorder)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._fit, name="ray-train", daemon=True)

    def start(self) -> None:
        """Let Ray Train start the workers."""
        self._thread.start()

    def wait(self, on_progress: Callable[[Progress], None]) -> None:
        """Follow the run to its end.

        Raises:
            FatalRunError: It met a failure that no retry can mend.
            RunFailedError: Its workers died more often than `train.max_failures`.
        """
        seen, has_ended = 0, False
        while not has_ended:
            self._thread.join(_POLL_S)
            # Before the look, so that the last look sees everything.
            has_ended = not self._thread.is_alive()
            view: RunView = self._recorder.ask("view", seen)
            seen += len(view.rows)
            on_progress(Progress(view.rows, view.attempt, view.workers, view.first_row_at))
        self._raise(view.fatal)

    def stop(self, reason: str) -> None:
        """Let the workers write a checkpoint and end."""
        self._recorder.ask("request_stop", reason)

    def close(self) -> None:
        """End the run's actors."""
        actors = self._actors
        for actor in (
            actors.recorder,
            actors.store,
            *actors.loaders.values(),
            *([actors.evictor] if actors.evictor else []),
        ):
            ray.kill(actor)

    def _fit(self) -> None:
        train = self._config.train
        resources = {"CPU": train.cpus_per_worker}
        if train.device == "cuda":
            resources["GPU"] = 1
        os.environ.update(_TRAIN_ENVIRONMENT)
        trainer = TorchTrainer(
            train_worker,
            train_loop_config={"spec": self._spec, "actors": self._actors},
            torch_config=TorchConfig(backend="nccl" if train.device == "cuda" else "gloo"),
            scaling_config=ScalingConfig(
                num_workers=train.num_workers,
                use_gpu=train.device == "cuda",
                resources_per_worker=resources,
            ),
            run_config=RunConfig(
                # Our own store keeps checkpoints; Ray Train's folder holds only its bookkeeping.
                name=f"{self._run_id}-{int(time.time())}",
                storage_path=str(self._storage.path("runs", self._run_id, "ray")),
                failure_config=FailureConfig(max_failures=train.max_failures),
                # Train's callbacks are not the Tune callbacks that the annotation names.
                callbacks=[FaultCallback(self._actors.recorder)],  # type: ignore[list-item]
            ),
        )
        try:
            trainer.fit()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            self._error = error

    def _raise(self, fatal: Fatal | None) -> None:
        if fatal is not None:
            raise FatalRunError(fatal.what, fatal.fix, fatal.exit_code)
        if self._error is None:
            return
        if isinstance(self._error, EagleRayError):
            raise self._error
        raise RunFailedError(
            f"run {self._run_id} failed: {_reason(self._error)}",
            f"see its events; `eagleray resume {self._run_id}` goes on from its checkpoint",
        ) from self._error


def _create_actors(
    config: ProjectConfig, storage: Storage, run_id: str, dataset: str, redis_url: str | None
) -> RunActors:
    cache = config.data.cache if config.data.cache.enabled else None
    evictor = f"evictor:{run_id}" if cache and redis_url else None
    spec = LoaderSpec(
        storage.root,
        dataset,
        config.data.order_seed,
        config.train.batch_size,
        prefetch_batches=config.data.prefetch_batches,
        cache=cache,
        redis_url=redis_url,
        evictor=evictor,
    )
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    return RunActors(
        create_recorder(storage, run_id),
        create_store(storage, run_id, config.train.checkpoint),
        {node: create_loader(spec, node_id=node) for node in nodes},
        create_evictor(cache, redis_url, name=evictor) if cache and redis_url else None,
        run_id,
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, WorkerGroupError):
        failures = sorted(error.worker_failures.items())
        return "; ".join(f"rank {rank}: {_last_line(failure)}" for rank, failure in failures[:4])
    if isinstance(error, ControllerError | TrainingFailedError):
        return _last_line(error)
    return f"{type(error).__name__}: {_last_line(error)}"


def _last_line(error: Any) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1][:300] if lines else type(error).__name__
