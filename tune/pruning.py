"""Asynchronous successive halving, the stopping variant, as a pure function of a sweep's history.

A trial that reaches a rung goes on if its value there is among the best 1/eta of those seen at
that rung (Li et al. 2020, arXiv:1810.05934). Rungs lie at grace * eta^k steps.
"""

import math

from eagleray.platform.config import AshaConfig
from eagleray.tune.history import SweepHistory, Trial


def rungs(config: AshaConfig, max_steps: int) -> list[int]:
    """Steps of the rungs below a full training."""
    levels = []
    level = config.grace_steps
    while level < max_steps:
        levels.append(level)
        level *= config.reduction_factor
    return levels


def value_at(trial: Trial, level: int) -> float | None:
    """A trial's value at the first report at or after a rung; None before that."""
    reached = [steps for steps in trial.values if steps >= level]
    return trial.values[min(reached)] if reached else None


def should_stop(history: SweepHistory, number: int, config: AshaConfig, max_steps: int) -> bool:
    """Whether a trial is not worth further steps.

    A trial whose value is not a finite number always stops. Any other is judged once per rung, at
    its first report there. At a rung that fewer than eta trials have reached nothing is cut: there
    is nothing yet to compare with.
    """
    trial = history.trials[number]
    if trial.value is None or not math.isfinite(trial.value):
        return True
    passed = [level for level in rungs(config, max_steps) if trial.steps >= level]
    if not passed or any(passed[-1] <= steps < trial.steps for steps in trial.values):
        return False
    own = value_at(trial, passed[-1])
    assert own is not None, "the rung was passed"
    seen = [value_at(other, passed[-1]) for other in history.trials]
    values = sorted(value for value in seen if value is not None)
    if len(values) < config.reduction_factor:
        return False
    keep = max(1, len(values) // config.reduction_factor)
    return own > values[keep - 1]
