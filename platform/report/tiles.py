"""The figures at the top of a page, and the line above them when a run did not end well."""

import math
from dataclasses import dataclass

from eagleray.platform.report.facts import RunFacts
from eagleray.platform.report.figures import Summary, SweepSummary
from eagleray.platform.report.wording import (
    compact,
    counted,
    duration,
    loss_text,
    number,
    parameter,
    percent,
)
from eagleray.platform.runs import RunStatus

_MAX_PERPLEXITY_LOSS = 20.0


@dataclass(frozen=True)
class Tile:
    """A key figure."""

    label: str
    value: str
    note: str = ""
    style: str = ""


@dataclass(frozen=True)
class Banner:
    """What a reader must know first."""

    style: str
    text: str
    command: str = ""


def training_tiles(facts: RunFacts, summary: Summary) -> list[Tile]:
    """Key figures of a training run."""
    tiles = []
    if summary.eval_loss is not None:
        loss = summary.eval_loss
        note = f"perplexity {number(math.exp(loss))}" if loss < _MAX_PERPLEXITY_LOSS else ""
        tiles.append(Tile("Held-out loss", loss_text(loss), note or "nats per token", "key"))
    if summary.train_loss is not None:
        tiles.append(Tile("Training loss", loss_text(summary.train_loss), "nats per token"))
    planned = f"of {summary.steps:,}" if summary.steps else ""
    tiles.append(Tile("Steps", f"{summary.step:,}", planned))
    if summary.tokens_per_s is not None:
        tiles.append(Tile("Throughput", compact(summary.tokens_per_s), "tokens/s, median"))
    if summary.mfu is not None:
        tiles.append(Tile("MFU", percent(summary.mfu), "of a matrix product"))
    tiles.append(Tile("Wall time", duration(summary.wall_s), _startup(summary)))
    if summary.goodput is not None:
        tiles.append(Tile("Goodput", percent(summary.goodput), "of wall time in steps that count"))
    if summary.num_parameters:
        tiles.append(Tile("Parameters", compact(summary.num_parameters), _shape(facts)))
    if summary.skipped_steps:
        tiles.append(Tile("Skipped", f"{summary.skipped_steps:,}", "steps not finite", "warn"))
    tiles.append(_faults(summary))
    if facts.history.checkpoints:
        last = facts.history.checkpoints[-1].step
        tiles.append(Tile("Checkpoints", f"{summary.checkpoints:,}", f"last after step {last:,}"))
    if summary.samples is not None:
        wrong = (summary.missing or 0) + (summary.doubled or 0)
        note = f"{summary.missing} missing, {summary.doubled} doubled"
        tiles.append(Tile("Samples", f"{summary.samples:,}", note, "bad" if wrong else "good"))
    return tiles


def sweep_tiles(summary: SweepSummary) -> list[Tile]:
    """Key figures of a sweep."""
    tiles = []
    if summary.best_value is not None:
        note = f"trial {summary.best_number}, after {summary.best_steps} steps"
        tiles.append(Tile("Best held-out loss", loss_text(summary.best_value), note, "key"))
    planned = f"of {summary.planned:,}" if summary.planned else ""
    tiles.append(Tile("Trials", f"{summary.trials:,}", planned))
    tiles += [Tile(end.capitalize(), f"{count:,}") for end, count in summary.ends.items()]
    tiles.append(Tile("Wall time", duration(summary.wall_s)))
    tiles += [
        Tile(f"Best {path.rpartition('.')[2]}", parameter(value), path)
        for path, value in list(sorted(summary.best_params.items()))[:6]
    ]
    return tiles


def banner(facts: RunFacts) -> Banner | None:
    """What to say before anything else; None for a run that finished."""
    state = facts.state
    again = f"eagleray resume {state.run_id}"
    if state.kind == "sweep":
        again = f"eagleray tune --resume {state.run_id}"
    if state.kind == "trial":
        again = ""
    why = f": {state.message}" if state.message else ""
    if state.status is RunStatus.FINISHED:
        return None
    if state.status is RunStatus.FAILED:
        return Banner("bad", f"This run failed at step {state.step}{why}", again)
    if state.status is RunStatus.STOPPED:
        return Banner("warn", f"This run was stopped at step {state.step}{why}", again)
    word = "is running" if state.status is RunStatus.RUNNING else "has not begun"
    return Banner("info", f"This run {word}; the page shows what there was when it was written.")


def _faults(summary: Summary) -> Tile:
    if not summary.faults:
        return Tile("Faults", "0", counted(summary.attempts, "attempt"))
    note = f"{duration(summary.lost_s)} lost, {counted(summary.steps_redone, 'step')} redone"
    return Tile("Faults", f"{summary.faults:,}", note, "warn")


def _startup(summary: Summary) -> str:
    if summary.startup_s is None:
        return ""
    return f"{duration(summary.startup_s)} of it start-up"


def _shape(facts: RunFacts) -> str:
    model = facts.config.get("model", {})
    if "num_layers" in model and "dim" in model:
        return f"{counted(model['num_layers'], 'layer')}, width {model['dim']}"
    return ""
