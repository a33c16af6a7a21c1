"""The driver of a training run: starts its actors and workers on Ray Train, follows, and collects.

Ray must be connected. Who restarts what: Ray Train the workers (up to `train.max_failures` times),
Ray the loader, store and recorder actors; if the driver dies, all of these end with it and
`eagleray resume` goes on from storage.
"""

import contextlib
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig
from ray.train.backend import BackendConfig
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2.api.config import ScalingConfig
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from eagleray.actors.cache.evictor_actor import create_evictor
from eagleray.actors.checkpoint.actor import create_store
from eagleray.actors.checkpoint.manifest import CheckpointFolder
from eagleray.actors.data.dataset import Dataset
from eagleray.actors.data.loader_actor import LoaderSpec, create_loader
from eagleray.actors.data.mixing import mixture_for
from eagleray.actors.nodes import alive_nodes
from eagleray.actors.rpc import call
from eagleray.actors.trainer.controller_parts import FaultCallback, GivenUp, Patience
from eagleray.actors.trainer.elastic import ElasticPolicy, Sizer
from eagleray.actors.trainer.failures import Limits
from eagleray.actors.trainer.gang import GangOptions, create_gang
from eagleray.actors.trainer.progress import Progress
from eagleray.actors.trainer.ray_trainer import EndableTrainer
from eagleray.actors.trainer.recorder import Fatal, RunView
from eagleray.actors.trainer.recorder_actor import RecorderClient, create_recorder
from eagleray.actors.trainer.run_actors import RunActors
from eagleray.actors.trainer.seams import LoopSpec
from eagleray.actors.trainer.worker import train_worker
from eagleray.platform.cluster import Demand
from eagleray.platform.cluster.options import TRAIN_VARIABLES
from eagleray.platform.cluster.ports import HOST
from eagleray.platform.config import ProjectConfig
from eagleray.platform.errors import EagleRayError, RunFailedError, ServiceError
from eagleray.platform.interruption import interruption_deferred
from eagleray.platform.storage import Storage

logger = logging.getLogger(__name__)

_POLL_S = 0.25
# A job that is stopped has 20 s in all: see platform/cluster/options.py.
_SAVE_S = 8.0
_ANSWER_S = 2.0
_END_S = 5.0
_CLOSE_S = 10.0
_RANKS_SHOWN = 4
_LONGEST_REASON = 1000
_START_TIMEOUT_S = TRAIN_VARIABLES["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"]
_TRAIN_ENVIRONMENT = {
    **TRAIN_VARIABLES,
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
    "RAY_TRAIN_METRICS_ENABLED": "1",
    # The controller blocks in `ray.get` on purpose.
    "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",
}


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
        dataset: What its batches are drawn from.
        redis_url: The feature cache's Redis; None for the loaders' own memory.
    """

    def __init__(
        self,
        config: ProjectConfig,
        storage: Storage,
        run_id: str,
        spec: LoopSpec,
        dataset: Dataset,
        redis_url: str | None = None,
    ) -> None:
        self._config, self._storage, self._run_id, self._spec = config, storage, run_id, spec
        self._actors = _create_actors(config, storage, run_id, dataset, redis_url)
        self._recorder = RecorderClient(self._actors.recorder)
        train, stacks = config.train, storage.path("runs", run_id, "stacks")
        options = GangOptions(Limits.of(train), train.spares, stacks)
        self._gang = create_gang(run_id, options)
        self._error: BaseException | None = None
        self._trainer = self._make_trainer()
        self._thread = threading.Thread(target=self._fit, name="ray-train", daemon=True)
        # Not the thread's `join`: an exception of a signal handler that interrupts it marks the
        # thread as ended in Python 3.11 (`_wait_for_tstate_lock`).
        self._is_done = threading.Event()
        self._has_begun = False

    def start(self) -> None:
        """Let Ray Train start the workers."""
        if _is_fixed():
            node = alive_nodes()[0]["NodeID"]
            wanted = self._config.train.worker_range[0]
            self._gang.expect.remote(self._spec, self._actors, node, wanted)
        self._thread.start()

    def wait(self, on_progress: Callable[[Progress], None]) -> None:
        """Follow the run to its end.

        An interruption lets the workers save what they have computed, if they are quick.

        Raises:
            FatalRunError: It met a failure that no retry can mend.
            RunFailedError: More ended than `train.max_failures` and its like forgive.
        """
        try:
            with interruption_deferred() as raise_waiting:
                self._follow(on_progress, raise_waiting)
        except (KeyboardInterrupt, SystemExit):
            self._save()
            raise

    def _follow(
        self, on_progress: Callable[[Progress], None], raise_waiting: Callable[[], None]
    ) -> None:
        seen, has_ended = 0, False
        while not has_ended:
            raise_waiting()
            # Before the look, so that the last look sees everything.
            has_ended = self._is_done.wait(_POLL_S)
            view: RunView = self._recorder.ask("view", seen)
            seen = view.start + len(view.rows)
            self._has_begun = self._has_begun or bool(view.workers)
            on_progress(Progress(view.rows, view.attempt, view.workers, view.first_row_at))
            # Ray Train would start the workers anew only to hear that it is of no use.
            has_ended = has_ended or view.fatal is not None
        # A recorder that is gone must hide neither the result nor the error.
        with contextlib.suppress(ServiceError):
            self._recorder.ask("flush")
        if view.fatal is not None or self._error is not None:
            self._keep()
        self._raise(view.fatal)

    def _keep(self) -> None:
        """Let the store write what a run that failed has handed in: it is resumed from there."""
        with contextlib.suppress(EagleRayError):
            what, limit_s = (
                "the writing of checkpoints",
                self._config.train.checkpoint.write_timeout_s,
            )
            call(self._actors.store.flush, 0, timeout_s=limit_s, what=what)

    def _save(self) -> None:
        """Let the workers write a checkpoint and end, if they are there."""
        if not self._has_begun:
            return
        with contextlib.suppress(ServiceError):
            RecorderClient(self._actors.recorder, _ANSWER_S).ask("request_stop", "interrupted")
            self._is_done.wait(_SAVE_S)
        if not self._is_done.is_set():
            logger.warning("workers did not save their last steps in %g s", _SAVE_S)

    def close(self) -> None:
        """End Ray Train and the run's actors, whatever they do."""
        self._trainer.end()
        if self._thread.ident is not None:
            self._is_done.wait(_END_S)
        actors = self._actors
        if self._has_begun:
            # Snapshots that were taken are worth a moment.
            with contextlib.suppress(EagleRayError):
                what = "the writing of checkpoints"
                call(actors.store.flush, 0, timeout_s=_END_S, what=what)
        loaders = [loader for loaders in actors.loaders.values() for loader in loaders]
        if self._config.data.cache.has_segments and loaders:
            closing = [loader.close.remote() for loader in loaders]
            # One that is killed instead leaves its segments to be removed by the next.
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
        for actor in (
            self._gang,
            actors.recorder,
            actors.store,
            *loaders,
            *([actors.evictor] if actors.evictor else []),
        ):
            ray.kill(actor)

    def _fit(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            self._error = error
        finally:
            self._is_done.set()

    def _make_trainer(self) -> EndableTrainer:
        train = self._config.train
        resources = {"CPU": train.cpus_per_worker, "GPU": float(train.gpus_per_worker)}
        os.environ.update(_TRAIN_ENVIRONMENT)
        failures = FailureConfig(max_failures=train.max_failures)
        name = f"{self._run_id}-{int(time.time())}"
        scaling = ScalingConfig(
            num_workers=train.world_sizes[-1],
            use_gpu=bool(train.gpus_per_worker),
            resources_per_worker={what: n for what, n in resources.items() if n},
        )
        sizer = Sizer(train.world_sizes, train.resize_after_s)
        waits = self._config.cluster.place_timeout_s / float(_START_TIMEOUT_S)
        return EndableTrainer(
            # Not by `train_loop_config`: the controller would load it, and with it torch.
            functools.partial(train_worker, self._spec, self._actors, self._gang),
            scaling_policy=ElasticPolicy(
                scaling, sizer, name, self._gang, has_autoscaler=not _is_fixed()
            ),
            failure_policy=Patience(
                failures,
                max(1, math.ceil(waits)),
                Limits.of(train),
                GivenUp(self._actors.recorder, self._run_id),
            ),
            # The processes that train meet by themselves.
            backend_config=BackendConfig(),
            scaling_config=scaling,
            run_config=RunConfig(
                # Our own store keeps checkpoints; Ray Train's folder holds only its bookkeeping.
                name=name,
                storage_path=str(self._storage.path("runs", self._run_id, "ray")),
                failure_config=failures,
                # Train's callbacks are not the Tune callbacks that the annotation names.
                callbacks=[FaultCallback(self._actors.recorder)],  # type: ignore[list-item]
            ),
        )

    def _raise(self, fatal: Fatal | None) -> None:
        if fatal is not None:
            raise FatalRunError(fatal.what, fatal.fix, fatal.exit_code)
        if self._error is None:
            return
        if isinstance(self._error, EagleRayError):
            raise self._error
        has_checkpoint = CheckpointFolder(self._storage, self._run_id).steps()
        start = "its newest checkpoint" if has_checkpoint else "the beginning: it has no checkpoint"
        raise RunFailedError(
            f"run {self._run_id} failed: {self._reason(self._error)}",
            f"correct the cause; `eagleray resume {self._run_id}` then goes on from {start}",
        ) from self._error

    def _reason(self, error: BaseException) -> str:
        if isinstance(error, WorkerGroupError):
            failures = sorted(error.worker_failures.items())[:_RANKS_SHOWN]
            told = {rank: _last_line(failure) for rank, failure in failures}
            # All say the same where the gang has ended the run.
            if len(set(told.values())) == 1:
                return next(iter(told.values()))
            return "; ".join(f"rank {rank}: {text}" for rank, text in told.items())
        if isinstance(error, ControllerError):
            error = error.controller_failure
        if isinstance(error, WorkerGroupStartupTimeoutError):
            train = self._config.train
            wanted = Demand(error.num_workers, train.cpus_per_worker, train.gpus_per_worker)
            return f"its workers found no place again and again: {wanted} at the same time"
        return f"{type(error).__name__}: {_last_line(error)}"


def _create_actors(
    config: ProjectConfig, storage: Storage, run_id: str, dataset: Dataset, redis_url: str | None
) -> RunActors:
    cache = config.data.cache if config.data.cache.enabled else None
    evictor = f"evictor:{run_id}" if cache and redis_url else None
    spec = LoaderSpec(
        storage.root,
        dataset.digest,
        config.data.order_seed,
        config.train.batch_size,
        mixture=mixture_for(config.data, dataset, config.train.batch_size, config.train.steps),
        prefetch_batches=config.data.prefetch_batches,
        fetchers=config.data.fetchers,
        cache=cache,
        redis_url=redis_url,
        evictor=evictor,
    )
    nodes, count = [node["NodeID"] for node in alive_nodes()], config.data.loaders
    return RunActors(
        create_recorder(storage, run_id),
        create_store(storage, run_id, config.train.checkpoint),
        {
            node: [
                create_loader(spec, name=f"loader:{run_id}:{place}-{number}", node_id=node)
                for number in range(count)
            ]
            for place, node in enumerate(nodes)
        },
        create_evictor(cache, redis_url, name=evictor) if cache and redis_url else None,
        run_id,
        spec,
    )


def _is_fixed() -> bool:
    """Whether the cluster is one machine on its loopback: no node can come or go."""
    return {node["NodeManagerAddress"] for node in alive_nodes()} == {HOST}


def _last_line(error: Any) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1][:_LONGEST_REASON] if lines else type(error).__name__
