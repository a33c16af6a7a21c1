"""What we give Ray Train's controller: what it asks for, when it gives up, whom it tells.

Nothing here imports torch, nor what does: the controller's process starts seconds earlier without,
and it must be there before a worker can start.
"""

from collections.abc import Mapping
from typing import Any

from ray.train import UserCallback
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
)
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2.api.exceptions import ControllerError, PreemptionError, WorkerGroupError


class FixedCluster(FixedScalingPolicy):
    """The wished number of workers, without a request to an autoscaler that is not there."""

    def after_controller_start(self, train_run_context: Any) -> None:
        """Ray Train's hook."""

    def _maybe_send_resource_request(self) -> None:
        pass


class Patience(FailurePolicy):
    """When a run is given up.

    Ray Train's own policy lets workers fail to start without end. Here a death while they start
    counts as any other death, and waiting for a place is bounded each time anew.

    Args:
        config: Ray Train's; `max_failures` deaths are forgiven.
        max_waits: How often in a row the workers may find no place.
    """

    def __init__(self, config: Any, max_waits: int) -> None:
        super().__init__(config)
        self._max_waits = max_waits
        self._deaths = self._waits = 0

    def make_decision(self, training_failed_error: Any) -> FailureDecision:
        """Ray Train's hook."""
        error = training_failed_error
        cause = error.controller_failure if isinstance(error, ControllerError) else error
        if isinstance(cause, WorkerGroupStartupTimeoutError):
            self._waits += 1
            return _retry_if(self._waits <= self._max_waits)
        self._waits = 0
        if isinstance(cause, PreemptionError):
            return FailureDecision.RETRY
        if isinstance(cause, WorkerGroupError | WorkerGroupStartupFailedError):
            self._deaths += 1
            return _retry_if(self._deaths <= self.failure_config.max_failures)
        return FailureDecision.RAISE


def _retry_if(condition: bool) -> FailureDecision:
    return FailureDecision.RETRY if condition else FailureDecision.RAISE


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
