"""What a sweep knows: each trial, what it reported, how it ended; kept as events of its run.

Each fact is on storage before anything acts on it, so a sweep whose driver died is rebuilt from its
events alone: no pickled searcher, no scheduler state that is lost.
    resource = optimizer steps; value = held-out loss in nats per token, lower is better.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from eagleray.platform.errors import NotFoundError
from eagleray.platform.runs import RunState, RunStatus, RunStore
from eagleray.platform.storage import Storage

LAST = "last"


class TrialStatus(StrEnum):
    """How a trial stands."""

    RUNNING = "running"
    FINISHED = "finished"
    PRUNED = "pruned"
    DIVERGED = "diverged"
    FAILED = "failed"


@dataclass
class Trial:
    """One configuration and what became of it."""

    number: int
    run_id: str
    params: dict[str, Any]
    status: TrialStatus = TrialStatus.RUNNING
    values: dict[int, float] = field(default_factory=dict)
    """Steps -> value; a repeated step after a restart replaces the earlier value."""

    @property
    def steps(self) -> int:
        """Most steps it reported at."""
        return max(self.values, default=0)

    @property
    def value(self) -> float | None:
        """Its last value."""
        return self.values[self.steps] if self.values else None


class SweepHistory:
    """The trials of one sweep.

    Args:
        runs: Where the sweep's run is kept.
        sweep_id: Its run id; events that are there already are read.
    """

    def __init__(self, runs: RunStore, sweep_id: str) -> None:
        self._runs, self.sweep_id = runs, sweep_id
        self.trials: list[Trial] = []
        for event in runs.events(sweep_id):
            self._apply(event)

    def suggest(self, run_id: str, params: dict[str, Any]) -> Trial:
        """Note a trial before it starts."""
        number = len(self.trials)
        self._note("trial", number=number, run=run_id, params=params)
        return self.trials[number]

    def report(self, number: int, steps: int, value: float) -> None:
        """Note a trial's value after some steps; one that is not finite marks it as diverged."""
        if not math.isfinite(value):
            self.end(number, TrialStatus.DIVERGED)
            return
        self._note("value", number=number, steps=steps, value=value)

    def end(self, number: int, status: TrialStatus) -> None:
        """Note how a trial ended; the first word counts."""
        if self.trials[number].status is TrialStatus.RUNNING:
            self._note("trial_end", number=number, status=status.value)

    def unfinished(self) -> list[Trial]:
        """Trials that a dead driver left behind."""
        return [trial for trial in self.trials if trial.status is TrialStatus.RUNNING]

    def running(self) -> list[RunState]:
        """The runs of the trials that are under way, as their workers told last."""
        return [self._runs.state(trial.run_id) for trial in self.unfinished()]

    def best(self) -> Trial | None:
        """The lowest value among the trials that got furthest; earlier trials win ties.

        Values after different numbers of steps are never compared.
        """
        ended = [
            t for t in self.trials if t.value is not None and t.status is not TrialStatus.DIVERGED
        ]
        if not ended:
            return None
        furthest = max(trial.steps for trial in ended)
        return min(
            (trial for trial in ended if trial.steps == furthest),
            key=lambda trial: (trial.values[furthest], trial.number),
        )

    def _note(self, event: str, **details: Any) -> None:
        self._runs.add_event(self.sweep_id, event, **details)
        self._apply({"event": event, **details})

    def _apply(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "trial":
            self.trials.append(Trial(event["number"], event["run"], event["params"]))
        elif kind == "value":
            self.trials[event["number"]].values[event["steps"]] = event["value"]
        elif kind == "trial_end":
            self.trials[event["number"]].status = TrialStatus(event["status"])


def best_overrides(storage: Storage, sweep: str) -> dict[str, Any]:
    """The best parameters of a sweep: `last`, or its id.

    Raises:
        NotFoundError: There is no finished sweep of that name.
    """
    return dict(finished_sweep(storage, sweep).results["best"])


def finished_sweep(storage: Storage, sweep: str) -> RunState:
    """The state of a finished sweep: `last`, or its id.

    Raises:
        NotFoundError: There is none.
    """
    runs = RunStore(storage)
    states = runs.all() if sweep == LAST else [runs.state(sweep)]
    for state in states:
        if state.kind == "sweep" and state.status is RunStatus.FINISHED:
            return state
    raise NotFoundError(f"there is no finished sweep {sweep!r}", "run `eagleray tune` first")
