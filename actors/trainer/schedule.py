"""The learning rate as a pure function of the step: nothing to save, nothing to get out of step."""

import math

from eagleray.platform.config import ScheduleConfig

_MAX_WARMUP = 100


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """Linear warm-up to `peak`, then a cosine to `peak * min_lr_ratio` at the last step.

    Args:
        step: Optimizer step that is about to be taken, from 0.
        steps: All steps of the run.
        peak: Highest learning rate.
        schedule: Shape.

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts.
    """
    warmup = schedule.warmup_steps
    if warmup is None:
        warmup = min(_MAX_WARMUP, steps // 10)
    if step < warmup:
        return peak * (step + 1) / warmup
    floor = peak * schedule.min_lr_ratio
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
