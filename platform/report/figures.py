"""The key figures of a run: the tiles of its page, and what scripts read."""

from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import Any

from eagleray.platform.report.facts import RunFacts
from eagleray.platform.report.goodput import goodput
from eagleray.platform.report.history import PARTS
from eagleray.platform.report.trials import best_trial


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Key figures of a training run or a trial. None: not known, or not yet.

    Losses in nats per token; throughput and MFU are medians of the reports; times in seconds
    without pauses; shares between 0 and 1.
    """

    run_id: str
    kind: str
    status: str
    message: str
    model: str | None
    record: str | None
    num_parameters: int | None
    step: int
    steps: int
    train_loss: float | None
    eval_loss: float | None
    tokens_per_s: float | None
    mfu: float | None
    wall_s: float
    startup_s: float | None
    attempts: int
    faults: int
    steps_redone: int
    lost_s: float
    goodput: float | None
    checkpoints: int
    samples: int | None
    missing: int | None
    doubled: int | None
    skipped_steps: int
    """Steps behind the newest row whose update was skipped, as something was not finite."""
    time_shares: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class SweepSummary:
    """Key figures of a sweep; `ends` counts trials by status."""

    run_id: str
    kind: str
    status: str
    message: str
    record: str | None
    trials: int
    planned: int | None
    ends: dict[str, int]
    best_run: str | None
    best_number: int | None
    best_value: float | None
    best_steps: int | None
    best_params: dict[str, Any]
    wall_s: float


def summarize(facts: RunFacts) -> Summary | SweepSummary:
    """The key figures of a run."""
    return _sweep(facts) if facts.state.kind == "sweep" else _training(facts)


def _training(facts: RunFacts) -> Summary:
    state, history = facts.state, facts.history
    results, rows = state.results, history.rows
    run, model = facts.find("run"), facts.find("model")
    audit = {**results, **(run.body.get("audit", {}) if run else {})}
    held_out = [row.eval_loss for row in rows if row.eval_loss is not None]
    totals = {part: sum(row.parts_s.get(part, 0.0) for row in rows) for part in PARTS}
    whole = sum(totals.values())
    made = goodput(history)
    return Summary(
        run_id=state.run_id,
        kind=state.kind,
        status=state.status.value,
        message=state.message,
        model=results.get("model"),
        record=results.get("record"),
        num_parameters=model.body.get("num_parameters") if model else None,
        step=state.step,
        steps=state.steps,
        train_loss=rows[-1].loss if rows else None,
        eval_loss=results.get("eval_loss", held_out[-1] if held_out else None),
        tokens_per_s=median(row.tokens_per_s for row in rows) if rows else None,
        mfu=median(row.mfu for row in rows) if rows else None,
        wall_s=history.clock.at(history.ended_s),
        startup_s=history.attempts[0].begun_s - state.created_s if history.attempts else None,
        attempts=len(history.attempts),
        faults=len(history.faults),
        steps_redone=sum(fault.steps_redone for fault in history.faults),
        lost_s=sum(fault.lost_s or 0.0 for fault in history.faults),
        goodput=made.share if made else None,
        checkpoints=len(history.checkpoints),
        samples=audit.get("samples"),
        missing=audit.get("missing"),
        doubled=audit.get("doubled"),
        skipped_steps=results.get("skipped_steps", rows[-1].skipped_steps if rows else 0),
        time_shares={part: seconds / whole for part, seconds in totals.items()} if whole else {},
    )


def _sweep(facts: RunFacts) -> SweepSummary:
    state, trials = facts.state, facts.trials
    best = best_trial(trials)
    return SweepSummary(
        run_id=state.run_id,
        kind=state.kind,
        status=state.status.value,
        message=state.message,
        record=state.results.get("record"),
        trials=len(trials),
        planned=facts.config.get("tune", {}).get("num_trials"),
        ends=dict(sorted(Counter(trial.status for trial in trials).items())),
        best_run=best.run_id if best else None,
        best_number=best.number if best else None,
        best_value=best.value if best else None,
        best_steps=best.steps if best else None,
        best_params=best.params if best else {},
        wall_s=facts.history.clock.at(facts.history.ended_s),
    )
