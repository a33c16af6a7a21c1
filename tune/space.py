"""What a sweep varies, as configurations: the space, and the project as one trial sees it."""

from typing import Any

from eagleray.platform.config import ProjectConfig, with_overrides
from eagleray.platform.errors import UsageError


def trial_config(base: ProjectConfig, params: dict[str, Any]) -> ProjectConfig:
    """The project as one trial sees it: fixed overrides, then its parameters, one worker.

    Raises:
        ConfigError: A path of the space does not exist, or a value breaks a rule.
    """
    changes = {**base.tune.overrides, **params, "train.num_workers": 1}
    config = with_overrides(base, changes)
    grace = base.tune.asha.grace_steps if base.tune.asha else config.train.steps
    every = min(config.train.eval.every_steps, grace, config.train.steps)
    # Pruning compares held-out losses, so one must exist at every rung.
    return with_overrides(config, {"train.eval.every_steps": every})


def check_space(config: ProjectConfig) -> None:
    """Refuse a space that cannot be searched, before anything starts.

    Raises:
        UsageError: It is empty.
        ConfigError: A path does not exist or takes no such value.
    """
    if not config.tune.space:
        raise UsageError(
            "tune.space is empty", "name what may vary, for example train.optimizer.lr"
        )
    for path, space in config.tune.space.items():
        ends = space.values if space.kind == "choice" else (space.low, space.high)
        for value in ends:
            trial_config(config, {path: value})
