"""Ray Train's trainer, as far as we need it otherwise than it comes.

It can be ended from another thread, and it starts only the helpers that a run of ours has a use
for: each is a process of its own, seconds of a core, at the start and again at each recovery.
"""

import contextlib
import threading
from typing import Any

import ray
from ray._raylet import RAY_NODE_ID_KEY  # type: ignore[attr-defined]
from ray.train import Result
from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.execution.failure_handling import FailurePolicy
from ray.train.v2._internal.execution.scaling_policy import ScalingPolicy
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from eagleray.actors.trainer.controller_parts import Controller, free_places
from eagleray.platform.errors import RunFailedError

_ABORT_S = 3.0
# It watches for nodes that a cloud is about to take away.
_WATCHER_VARIABLE = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"


class EndableTrainer(DataParallelTrainer):
    """A DataParallelTrainer that can be ended from another thread.

    Ray Train keeps its controller's handle to itself, so nothing could end a `fit` that waits for
    it: at Ctrl-C the thread would outlive `ray.shutdown`, and on a cluster that goes on the
    controller would start new workers for those that died.

    Args:
        failure_policy: When a run is given up.
        scaling_policy: How many workers it has.
        **arguments: DataParallelTrainer's.
    """

    def __init__(
        self,
        *args: Any,
        failure_policy: FailurePolicy,
        scaling_policy: ScalingPolicy,
        **arguments: Any,
    ) -> None:
        super().__init__(*args, **arguments)
        self._failure_policy, self._scaling_policy = failure_policy, scaling_policy
        self._lock = threading.Lock()
        self._controller: Any = None
        self._is_ended = False

    def end(self) -> None:
        """End the controller and with it its workers; `fit` raises if it has not ended yet."""
        with self._lock:
            self._is_ended = True
            controller = self._controller
        if controller is None:
            return
        # It also ends a helper that outlives it; one that still starts or hangs is killed.
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(controller.abort.remote(), timeout=_ABORT_S)
        ray.kill(controller)
        # Of one that was killed: it would else hold them as long as this process lives.
        with contextlib.suppress(ray.exceptions.RayError):
            free_places(str(self.run_config.name))

    def _initialize_and_run_controller(self, **arguments: Any) -> Result:
        """As Ray Train's, without its handler of Ctrl-C."""
        variables = get_env_vars_to_propagate()
        arguments["failure_policy"] = self._failure_policy
        arguments["scaling_policy"] = self._scaling_policy
        # We read no Ray datasets, and free the places ourselves.
        arguments["callbacks"] = [
            each
            for each in arguments["callbacks"]
            if not isinstance(each, DatasetsCallback | PlacementGroupCleanerCallback)
        ]
        # The scaling policy looks for them itself, and does not wait until the node is gone.
        variables[_WATCHER_VARIABLE] = "0"
        here = ray.get_runtime_context().get_node_id()
        controllers = ray.remote(Controller).options(
            name=f"controller:{self.run_config.name}",
            num_cpus=0,
            label_selector={RAY_NODE_ID_KEY: here},
            runtime_env={"env_vars": variables},
        )
        with self._lock:
            if self._is_ended:
                raise RunFailedError("the run was ended while it started")
            self._controller = controllers.remote(**arguments)
        # As long as the run lasts; `end` ends the wait.
        ray.get(self._controller.run.remote())
        result: Result = ray.get(self._controller.get_result.remote())
        return result
