"""The trials of a sweep, read back from its events.

value = held-out loss in nats per token after some optimizer steps, lower is better. Values after
different numbers of steps are never compared: a trial that got further ranks before one that did
not, as in the sweep itself.
"""

import math
from dataclasses import dataclass, field
from typing import Any

RUNNING, DIVERGED = "running", "diverged"


@dataclass
class TrialStory:
    """One configuration and what became of it."""

    number: int
    run_id: str
    params: dict[str, Any]
    begun_s: float
    ended_s: float | None = None
    status: str = RUNNING
    values: dict[int, float] = field(default_factory=dict)
    """Steps -> value."""

    @property
    def steps(self) -> int:
        """Most steps it reported at."""
        return max(self.values, default=0)

    @property
    def value(self) -> float | None:
        """Its last value."""
        return self.values.get(self.steps)

    @property
    def seconds(self) -> float | None:
        """How long it took; None while it runs."""
        return None if self.ended_s is None else self.ended_s - self.begun_s


def read_trials(events: list[dict[str, Any]]) -> list[TrialStory]:
    """Trials by number; events of trials that were never announced are left out."""
    trials: dict[int, TrialStory] = {}
    for event in events:
        kind, number = event.get("event"), event.get("number")
        if not isinstance(number, int):
            continue
        if kind == "trial":
            trials[number] = TrialStory(
                number, str(event["run"]), dict(event["params"]), float(event["time_s"])
            )
        elif number in trials and kind == "value" and math.isfinite(event["value"]):
            trials[number].values[int(event["steps"])] = float(event["value"])
        elif number in trials and kind == "trial_end":
            trials[number].status = str(event["status"])
            trials[number].ended_s = float(event["time_s"])
    return [trials[number] for number in sorted(trials)]


def ranked(trials: list[TrialStory]) -> list[TrialStory]:
    """Best first: those that got furthest by value, then the others, diverged and silent ones last.

    The first one is the sweep's best, unless it diverged or has no value.
    """

    def key(trial: TrialStory) -> tuple[bool, int, float, int]:
        value = trial.value
        is_last = value is None or trial.status == DIVERGED
        return (is_last, -trial.steps, math.inf if value is None else value, trial.number)

    return sorted(trials, key=key)


def best_trial(trials: list[TrialStory]) -> TrialStory | None:
    """The lowest value among the trials that got furthest; earlier trials win ties."""
    first = next(iter(ranked(trials)), None)
    if first is None or first.value is None or first.status == DIVERGED:
        return None
    return first
