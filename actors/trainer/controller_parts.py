"""Ray Train's controller as we need it: what it starts, when it gives up, whom it tells.

Nothing here imports torch, nor what does: the controller's process starts seconds earlier without,
and it must be there before a worker can start.
"""

from collections.abc import Callable, Mapping
from typing import Any, Self

import ray
from ray.train import UserCallback
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
)
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup, state, worker_group
from ray.train.v2._internal.execution.worker_group.placement_group_handle import (
    DefaultPlacementGroupHandle,
)
from ray.train.v2.api.exceptions import ControllerError, PreemptionError, WorkerGroupError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from eagleray.actors.trainer.failures import FailureCount, Kind, Limits, kind_of_death
from eagleray.actors.trainer.recorder import Fatal

_RANKS_TOLD = 4


class NamedWorkerGroup(WorkerGroup):
    """Workers whose places bear the name of their run, so that the driver can free them.

    Ray Train has a process of its own that frees them when the controller is killed.
    """

    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> Any:
        context = worker_group_context
        place = placement_group(
            [context.resources_per_worker] * context.num_workers,
            context.placement_strategy,
            name=f"{places_of(str(self._train_run_context.run_config.name))}{context.run_attempt_id}",
            bundle_label_selector=context.label_selector,
        )
        return DefaultPlacementGroupHandle(place)


def places_of(run_name: str) -> str:
    """How the names of a run's placement groups begin."""
    return f"train:{run_name}:"


def free_places(run_name: str) -> None:
    """Remove the placement groups of a run whose controller is gone."""
    for group_id, group in ray.util.placement_group_table().items():
        if group["name"].startswith(places_of(run_name)) and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(group_id)))


class Controller(TrainController):
    """Ray Train's controller without the actor through which its workers would synchronize.

    It serves `ray.train.report` and `ray.train.collective`; our workers meet in their process
    group. As a process of its own it would cost seconds of a core at each start of the workers.
    """

    worker_group_cls = NamedWorkerGroup

    def __init__(self, *args: Any, **arguments: Any) -> None:
        # In the controller's process alone, which is ours.
        vars(worker_group)["SynchronizationActor"] = _NoSynchronization()
        vars(state)["_shutdown_sync_actor"] = lambda _: None
        super().__init__(*args, **arguments)


class _NoSynchronization:
    """Stands where Ray Train makes and passes on its actor; a call of it fails by its name."""

    def options(self, **_: Any) -> Self:
        return self

    def remote(self, **_: Any) -> Self:
        return self


class Patience(FailurePolicy):
    """When a run is given up.

    Ray Train's own policy lets workers fail to start without end. Here a death while they start
    counts as any other death, and waiting for a place is bounded each time anew.

    Args:
        config: Ray Train's.
        max_waits: How often in a row the workers may find no place.
        limits: Of what is forgiven.
        tell: Hears why the run is given up, if that is since a limit is exceeded.
    """

    def __init__(
        self, config: Any, max_waits: int, limits: Limits, tell: Callable[[str], None]
    ) -> None:
        super().__init__(config)
        self._max_waits, self._tell = max_waits, tell
        self._count, self._waits = FailureCount(limits), 0

    def make_decision(self, training_failed_error: Any) -> FailureDecision:
        """Ray Train's hook."""
        error = training_failed_error
        cause = error.controller_failure if isinstance(error, ControllerError) else error
        if isinstance(cause, WorkerGroupStartupTimeoutError):
            self._waits += 1
            return _retry_if(self._waits <= self._max_waits)
        self._waits = 0
        if isinstance(cause, WorkerGroupError) and _is_over(cause):
            return FailureDecision.RAISE
        if isinstance(cause, PreemptionError | WorkerGroupError | WorkerGroupStartupFailedError):
            exceeded = self._count.add([_kind(cause)])
            if exceeded:
                self._tell(f"{exceeded}; the last: {_told(cause)}")
            return _retry_if(exceeded is None)
        return FailureDecision.RAISE


def _kind(error: Exception) -> Kind:
    if isinstance(error, PreemptionError):
        return Kind.PREEMPTION
    failures = error.worker_failures.values() if isinstance(error, WorkerGroupError) else ()
    kinds = {
        kind_of_death(getattr(each, "health_check_failure", each), is_node_alive=True)
        for each in failures
    }
    # The other workers end because of it.
    return Kind.PREEMPTION if Kind.PREEMPTION in kinds else Kind.FAILURE


def _told(error: Exception) -> str:
    if isinstance(error, WorkerGroupError):
        return "; ".join(
            f"the worker of rank {rank}: {_first_line(each)}"
            for rank, each in sorted(error.worker_failures.items())[:_RANKS_TOLD]
        )
    return _first_line(error)


def _is_over(error: WorkerGroupError) -> bool:
    """Whether a worker says that the run has ended."""
    # By name: its class would bring what workers import.
    causes = [getattr(each, "cause", each) for each in error.worker_failures.values()]
    return any(type(cause).__name__ == "RunOverError" for cause in causes)


def _retry_if(condition: bool) -> FailureDecision:
    return FailureDecision.RETRY if condition else FailureDecision.RAISE


class GivenUp:
    """Lets the driver say which limit has ended the run."""

    def __init__(self, recorder: Any, run_id: str) -> None:
        self._recorder, self._run_id = recorder, run_id

    def __call__(self, reason: str) -> None:
        """Note why the run is given up."""
        what = f"run {self._run_id} failed: {reason}"[:2000]
        fix = f"correct the cause, or raise that limit; then: eagleray resume {self._run_id}"
        self._recorder.call.remote("fail", Fatal("RunFailedError", what, fix, 1))


class FaultCallback(UserCallback):
    """Tells the recorder of workers that died or failed."""

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


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__
