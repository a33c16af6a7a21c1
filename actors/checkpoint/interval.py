"""How many steps lie between two snapshots: a number from the configuration, or what pays best.

The first-order optimum of Young (1974, "A first order approximation to the optimum checkpoint
interval", CACM 17(9)) is sqrt(2 * cost * MTBF) seconds: half an interval of work is lost per
failure, one cost is paid per interval. Daly (2006, FGCS 22(3)) gives higher orders, which differ
only where the cost comes near the MTBF.
"""

import math
import time
from collections.abc import Callable

from eagleray.platform.config import CheckpointConfig

_FIRST_STEPS = 10
"""Of auto, until the cost of a snapshot is known."""


def interval_steps(cost_s: float, step_s: float, mtbf_s: float, overhead_budget: float) -> int:
    """Steps between snapshots, at least 1.

    Args:
        cost_s: What a snapshot costs training.
        step_s: Duration of a step.
        mtbf_s: Mean time between failures.
        overhead_budget: Share of training time that snapshots may take; it may lengthen the
            interval beyond the optimum.
    """
    best_s = max(math.sqrt(2 * cost_s * mtbf_s), cost_s / overhead_budget)
    # One ten-thousandth less: an interval that fits exactly must not become one step longer.
    return max(1, math.ceil(best_s / max(step_s, 1e-9) * (1 - 1e-4)))


class SnapshotPace:
    """When the next snapshot is due. Each rank has one; with auto all follow rank 0.

    Args:
        config: Of the run.
        start: Steps done so far.
        clock: Seconds.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        start: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._config, self._clock = config, clock
        self._last, self._last_at = start, clock()
        self._steps = _FIRST_STEPS if config.every_steps == "auto" else config.every_steps

    @property
    def is_auto(self) -> bool:
        """Whether ranks must be told by rank 0 after each snapshot."""
        return self._config.every_steps == "auto"

    def is_due(self, done: int) -> bool:
        """Whether a snapshot is to be taken after so many steps."""
        return (done - self._last if self.is_auto else done) % self._steps == 0

    def propose(self, done: int, cost_s: float) -> int:
        """Rank 0: steps until the next snapshot, from the cost of the one before; 0: not known."""
        now = self._clock()
        step_s = (now - self._last_at) / max(1, done - self._last)
        self._last_at = now
        if not cost_s:
            return self._steps
        return interval_steps(cost_s, step_s, self._config.mtbf_s, self._config.overhead_budget)

    def follow(self, done: int, steps: int) -> None:
        """Every rank: a snapshot was taken now, the next one is due in so many steps."""
        self._last, self._steps = done, steps

    def state(self) -> list[int]:
        """What all ranks know alike: the newest snapshot's step, and the steps to the next."""
        return [self._last, self._steps]

    def set_state(self, state: list[int]) -> None:
        """Go on from another rank's state."""
        self._last, self._steps = state
