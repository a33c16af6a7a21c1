"""How many workers a run has, and when that changes: Ray Train's scaling hook.

Ray Train's own elastic policy asks the autoscaler's coordinator, which looks at the cluster every
20 seconds; here the cluster itself is looked at, so a lost node is gone on without in seconds. A
node that is about to be taken away is left before it goes. Ray Train starts the workers anew at
each change; they hold places only, and the run's gang trains on until all are there.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
import ray._private.state as ray_state
from ray.train.v2._internal.execution.scaling_policy import (
    FixedScalingPolicy,
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
)
from ray.train.v2.api.config import ScalingConfig

from eagleray.actors.nodes import alive_ids, answering_ids, draining_ids
from eagleray.actors.trainer.controller_parts import places_of

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
# Ray counts in ten-thousandths.
_UNIT = 1e-4


class Sizer:
    """Decides on a number of workers; knows no Ray.

    Args:
        sizes: Legal numbers, ascending.
        resize_after_s: How long there must have been room for more.
        clock: Seconds.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        resize_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sizes, self._resize_after_s, self._clock = sizes, resize_after_s, clock
        self._wider_since: float | None = None

    def first(self, room: int) -> int:
        """With how many to start: as many as there is room for, or the fewest, which wait."""
        return self._most(room) or self._sizes[0]

    def next(self, size: int, room: int, *, is_leaving: bool) -> int | None:
        """The number to change to, None to go on as it is.

        Args:
            size: Workers now.
            room: Places now, their own among them; none on nodes that are going.
            is_leaving: Whether one of them sits on a node that is going.
        """
        most = self._most(room)
        if is_leaving:
            return most or None
        if most <= size:
            self._wider_since = None
            return None
        now = self._clock()
        if self._wider_since is None:
            self._wider_since = now
        if now - self._wider_since < self._resize_after_s:
            return None
        self._wider_since = None
        return most

    def _most(self, room: int) -> int:
        return max((size for size in self._sizes if size <= room), default=0)


def room_for(
    free: Mapping[str, Mapping[str, float]], own: Mapping[str, int], each: Mapping[str, float]
) -> int:
    """How many workers find a place.

    Args:
        free: Node -> what is free there.
        own: Node -> workers that hold a place there already.
        each: What a worker needs.
    """
    total = 0
    for node, amounts in free.items():
        rooms = [
            math.floor((amounts.get(name, 0.0) + _UNIT) / need)
            for name, need in each.items()
            if need > 0
        ]
        total += min(rooms, default=0) + own.get(node, 0)
    return total


class ElasticPolicy(FixedScalingPolicy):
    """Ray Train's hook: as many workers as there is room for, away from nodes that are going.

    Args:
        scaling_config: Ray Train's; its number of workers is the most that are wished.
        sizer: Decides.
        run_name: Ray Train's name of the run.
        gang: Of the run; asked for a snapshot where a node goes and there is no room elsewhere.
        has_autoscaler: Whether there may be somebody to ask for more nodes.
    """

    def __init__(
        self,
        scaling_config: ScalingConfig,
        sizer: Sizer,
        run_name: str,
        gang: Any,
        *,
        has_autoscaler: bool,
    ) -> None:
        super().__init__(scaling_config)
        self._sizer, self._run_name, self._gang = sizer, run_name, gang
        self._has_autoscaler = has_autoscaler
        self._looked_at = -math.inf
        self._told: set[str] = set()

    def after_controller_start(self, train_run_context: Any) -> None:
        """Ray Train's hook."""
        if self._has_autoscaler:
            super().after_controller_start(train_run_context)

    def _maybe_send_resource_request(self) -> None:
        if self._has_autoscaler:
            super()._maybe_send_resource_request()  # type: ignore[no-untyped-call]

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        """Ray Train's hook."""
        self._maybe_send_resource_request()
        # It may be a node's death that ended the workers.
        room, _ = self._room(answering_ids())
        return self._resized(self._sizer.first(room))

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> ScalingDecision:
        """Ray Train's hook."""
        self._maybe_send_resource_request()
        if time.monotonic() - self._looked_at < _LOOK_S:
            return NoopDecision()
        room, leaving = self._room(alive_ids())
        size = worker_group_state.num_workers
        new = self._sizer.next(size, room, is_leaving=bool(leaving))
        if new is not None:
            logger.info("workers: %d -> %d; nodes that go: %s", size, new, sorted(leaving))
            return self._resized(new)
        if leaving - self._told:
            self._told |= leaving
            self._gang.save.remote(f"nodes are being taken away: {', '.join(sorted(leaving))}")
        return NoopDecision()

    def _room(self, alive: set[str]) -> tuple[int, set[str]]:
        """Places for workers on these nodes, and those of them that are ours and are going."""
        self._looked_at = time.monotonic()
        draining = draining_ids()
        free: dict[str, dict[str, float]] = ray_state.available_resources_per_node()  # type: ignore[no-untyped-call]
        own = Counter(
            node
            for group in ray.util.placement_group_table().values()
            if group["name"].startswith(places_of(self._run_name)) and group["state"] != "REMOVED"
            for node in group["bundles_to_node_id"].values()
        )
        stays = {node: amounts for node, amounts in free.items() if node in alive - draining}
        each = self.scaling_config._resources_per_worker_not_none
        return room_for(stays, own, each), draining & set(own)

    def _resized(self, size: int) -> ResizeDecision:
        return ResizeDecision(size, self.scaling_config._resources_per_worker_not_none)
