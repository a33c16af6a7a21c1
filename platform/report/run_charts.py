"""The charts of a training run: by step on the left, by time on the right.

Charts by step show what was learnt; those by time what that cost, with faults, restarts and
checkpoints where they happened.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, pairwise
from statistics import median

from eagleray.platform.report.chart import Band, Bar, Chart, LegendItem, Line, Mark, Point
from eagleray.platform.report.history import PARTS, History, Row
from eagleray.platform.report.scales import (
    PercentScale,
    Scale,
    StepScale,
    TimeScale,
    fit_linear,
    thinned,
)
from eagleray.platform.report.wording import compact, duration, loss_text, number, percent

_MAX_BARS = 120
_MAX_CHECKPOINT_MARKS = 200
_NUM_TINTS = 6
_MAX_POINTS = 320
"""Points of one line: more are not seen on its width, and the page must stay small."""


def run_charts(history: History, planned_steps: int) -> list[Chart]:
    """Loss, throughput, gradient norm, MFU, learning rate, time split, decided weights of domains.

    None without rows.
    """
    if not history.rows:
        return []
    steps: Scale = StepScale(0, max(planned_steps, *(row.step for row in history.rows), 1))
    begun = history.attempts[0].begun_s if history.attempts else history.rows[0].time_s
    first_s, last_s = history.clock.at(begun), history.clock.at(history.rows[-1].time_s)
    times: Scale = TimeScale(first_s, max(last_s, first_s + 1e-3))
    throughput = fit_linear((row.tokens_per_s for row in history.rows), from_zero=True)
    mfu = fit_linear((row.mfu for row in history.rows), from_zero=True)
    return [
        _loss(history, steps),
        _by_time(history, times, throughput, "throughput", "Throughput", "tokens/s over time",
                 lambda row: row.tokens_per_s, compact),
        _by_step(history, steps, "gradient", "Gradient norm", "before clipping, over steps",
                 lambda row: row.grad_norm),
        _by_time(history, times, PercentScale(mfu.low, mfu.high, mfu.step), "mfu", "MFU",
                 "share of a matrix product's FLOP/s, over time", lambda row: row.mfu, percent),
        _by_step(history, steps, "rate", "Learning rate", "over steps", lambda row: row.lr),
        _split(history, times),
        *_weights(history, steps),
    ]  # fmt: skip


def time_marks(history: History) -> tuple[Mark, ...]:
    """Faults, restarts, checkpoints and pauses by time."""
    at = history.clock.at
    marks = [
        Mark(at(f.time_s), "fault", f"fault {f.number}: {f.message}", f"fault {f.number}")
        for f in history.faults
    ]
    marks += [
        Mark(at(a.begun_s), "restart", f"attempt {a.number} begins at step {a.start_step}")
        for a in history.attempts[1:]
    ]
    marks += [
        Mark(at(start), "pause", f"paused for {duration(end - start)}", "pause")
        for start, end in history.clock.pauses
    ]
    kept = history.checkpoints[:: len(history.checkpoints) // _MAX_CHECKPOINT_MARKS + 1]
    marks += [
        Mark(at(c.time_s), "checkpoint", f"checkpoint of step {c.step} on storage") for c in kept
    ]
    return tuple(marks)


def down_bands(history: History) -> tuple[Band, ...]:
    """Stretches without workers: from a fault to the next attempt."""
    at = history.clock.at
    return tuple(
        Band(at(one.ended_s), at(other.begun_s)) for one, other in pairwise(history.attempts)
    )


def _loss(history: History, steps: Scale) -> Chart:
    kept = history.kept
    held_out = [row for row in kept if row.eval_loss is not None]
    values = [row.loss for row in history.rows]
    values += [row.eval_loss for row in history.rows if row.eval_loss is not None]
    redone = history.redone
    lines = [
        Line(f"attempt {number}, redone", "ghost", _points(rows, lambda row: row.loss, loss_text))
        for number, rows in groupby(redone, lambda row: row.attempt)
    ]
    legend = []
    if kept:
        lines.append(Line("train", "train", _points(kept, lambda row: row.loss, loss_text)))
        legend.append(LegendItem("train", "train", loss_text(kept[-1].loss)))
    if held_out:
        points = _points(held_out, lambda row: row.eval_loss or 0.0, loss_text)
        lines.append(Line("held-out", "held-out", points, has_dots=len(points) < 200))
        legend.append(LegendItem("held-out", "held-out", loss_text(held_out[-1].eval_loss)))
    if redone:
        legend.append(LegendItem("ghost", "redone"))
    first, last = history.rows[0], (kept or history.rows)[-1]
    about = (
        f"Training loss goes from {loss_text(first.loss)} at step {first.step} to "
        f"{loss_text(last.loss)} at step {last.step}."
    )
    if held_out:
        end = held_out[-1]
        about += f" Held-out loss is {loss_text(end.eval_loss)} at step {end.step}."
    return Chart(
        "loss", "Loss", "nats per token over steps", about, steps, fit_linear(values),
        lines=tuple(lines), marks=_step_marks(history), legend=tuple(legend),
    )  # fmt: skip


def _by_step(
    history: History, steps: Scale, name: str, title: str, unit: str,
    value: Callable[[Row], float],
) -> Chart:  # fmt: skip
    kept = history.kept or history.rows
    values = [value(row) for row in kept]
    return Chart(
        name, title, unit, _range(title, values, number), steps,
        fit_linear(values, from_zero=True), marks=_step_marks(history),
        lines=(Line(title.lower(), name, _points(kept, value, number)),),
        legend=(LegendItem(name, "last", number(values[-1])),),
    )  # fmt: skip


def _by_time(
    history: History, times: Scale, y: Scale, name: str, title: str, unit: str,
    value: Callable[[Row], float], words: Callable[[float], str],
) -> Chart:  # fmt: skip
    at = history.clock.at
    lines = [
        Line(f"attempt {n}", name, _points(rows, value, words, lambda row: at(row.time_s)))
        for n, rows in groupby(history.rows, lambda row: row.attempt)
    ]
    values = [value(row) for row in history.rows]
    return Chart(
        name, title, unit, _range(title, values, words), times, y,
        lines=tuple(lines), marks=time_marks(history), bands=down_bands(history),
        legend=(LegendItem(name, "median", words(median(values))),),
    )  # fmt: skip


def _weights(history: History, steps: Scale) -> list[Chart]:
    """What a mixture that follows the losses decided; nothing for any other."""
    rows = [row for row in history.kept if row.weights]
    if not rows:
        return []
    last = rows[-1].weights
    tints = {name: f"domain-{number % _NUM_TINTS}" for number, name in enumerate(last)}

    def line(name: str) -> Line:
        points = _points(rows, lambda row: row.weights.get(name, 0.0), percent)
        return Line(name, tints[name], points)

    about = f"Weights at step {rows[-1].step}: " + ", ".join(
        f"{name} {percent(weight)}" for name, weight in last.items()
    )
    scale = fit_linear((w for row in rows for w in row.weights.values()), from_zero=True)
    return [
        Chart(
            "weights", "Weights of the domains", "decided, over steps", f"{about}.", steps,
            PercentScale(scale.low, scale.high, scale.step), lines=tuple(map(line, last)),
            marks=_step_marks(history),
            legend=tuple(LegendItem(tints[name], name, percent(last[name])) for name in last),
        )
    ]  # fmt: skip


def _split(history: History, times: Scale) -> Chart:
    totals = {part: sum(row.parts_s[part] for row in history.rows) for part in PARTS}
    whole = sum(totals.values()) or 1.0
    about = "Of the time of rank 0: " + ", ".join(
        f"{part} {percent(seconds / whole)}" for part, seconds in totals.items()
    )
    return Chart(
        "split", "Where the time went", "of rank 0, over time", f"{about}.", times,
        PercentScale(0.0, 1.0), bars=tuple(_bars(history)),
        marks=time_marks(history), bands=down_bands(history),
        legend=tuple(
            LegendItem(part, part, percent(totals[part] / whole)) for part in PARTS
        ),
    )  # fmt: skip


def _bars(history: History) -> Iterator[Bar]:
    """One bar for each report; for several together where there are more than are seen."""
    every = -(-len(history.rows) // _MAX_BARS)
    free_from = 0.0
    for _, of_attempt in groupby(history.rows, lambda row: row.attempt):
        rows = list(of_attempt)
        for start in range(0, len(rows), every):
            part_rows = rows[start : start + every]
            sums = {part: sum(row.parts_s[part] for row in part_rows) for part in PARTS}
            whole = sum(sums.values())
            end = history.clock.at(part_rows[-1].time_s)
            begin = max(free_from, history.clock.at(part_rows[0].time_s - _seconds(part_rows[0])))
            free_from = end
            if whole <= 0 or end <= begin:
                continue
            text = "\n".join(
                [f"up to step {part_rows[-1].step}, {duration(whole)}"]
                + [f"{part} {percent(seconds / whole)}" for part, seconds in sums.items()]
            )
            shares = tuple((part, seconds / whole) for part, seconds in sums.items())
            yield Bar(begin, end, shares, text)


def _seconds(row: Row) -> float:
    return sum(row.parts_s.values())


def _step_marks(history: History) -> tuple[Mark, ...]:
    marks = [
        Mark(f.step, "fault", f"fault {f.number}: {f.message}", f"fault {f.number}")
        for f in history.faults
    ]
    steps = sorted({c.step for c in history.checkpoints})
    kept = steps[:: len(steps) // _MAX_CHECKPOINT_MARKS + 1]
    return (*marks, *(Mark(step, "checkpoint", f"checkpoint of step {step}") for step in kept))


def _points(
    rows: Iterable[Row],
    value: Callable[[Row], float],
    words: Callable[[float], str],
    place: Callable[[Row], float] = lambda row: row.step,
) -> tuple[Point, ...]:
    known = [(row, value(row)) for row in rows]
    shown = thinned([y for _, y in known], _MAX_POINTS)
    return tuple(
        Point(place(row), y, f"step {row.step}: {words(y)}")
        for row, y in (known[index] for index in shown)
    )


def _range(title: str, values: list[float], words: Callable[[float], str]) -> str:
    return (
        f"{title} is between {words(min(values))} and {words(max(values))}, "
        f"at the end {words(values[-1])}."
    )
