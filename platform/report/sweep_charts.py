"""The charts of a sweep: every trial's curve, the best so far, each parameter against the value."""

import math
from collections.abc import Mapping
from typing import Any

from eagleray.platform.report.chart import Chart, Dot, LegendItem, Line, Point
from eagleray.platform.report.scales import (
    ChoiceScale,
    LinearScale,
    Scale,
    StepScale,
    fit_linear,
    fit_padded,
)
from eagleray.platform.report.trials import DIVERGED, TrialStory, best_trial, ranked
from eagleray.platform.report.wording import loss_text, parameter

_MAX_CURVES = 80
_MAX_DOTS = 600
_MAX_PARAMETERS = 24
_OUTLIER = 3.0
_CUT_ROOM = 0.12


def sweep_charts(trials: list[TrialStory], space: Mapping[str, Any]) -> list[Chart]:
    """Curves, progress, then one scatter for each parameter; none without a value."""
    shown = [trial for trial in ranked(trials) if trial.value is not None]
    best = best_trial(trials)
    if not shown or best is None:
        return []
    charts = [_curves(shown, best), _progress(trials, best)]
    names = sorted({name for trial in trials for name in trial.params})
    for index, name in enumerate(names[:_MAX_PARAMETERS]):
        charts.append(_scatter(f"parameter-{index}", name, space.get(name) or {}, shown, best))
    return charts


def _curves(shown: list[TrialStory], best: TrialStory) -> Chart:
    drawn = shown[:_MAX_CURVES]
    values = [value for trial in drawn for value in trial.values.values()]
    lines = [
        Line(
            f"trial {trial.number}", _style(trial, best),
            tuple(
                Point(steps, value, f"{_named(trial)}, step {steps}: {loss_text(value)}")
                for steps, value in sorted(trial.values.items())
            ),
        )
        for trial in reversed(drawn)
    ]  # fmt: skip
    note = f"The best {_MAX_CURVES} of {len(shown)} trials." if len(shown) > _MAX_CURVES else ""
    steps = max(trial.steps for trial in drawn)
    return Chart(
        "curves", "Value over steps", "held-out loss",
        f"{len(drawn)} trials; the best one, {_named(best)}, reaches {loss_text(best.value)} "
        f"after {best.steps} steps.",
        StepScale(0, steps), _without_outliers(values),
        lines=tuple(lines), legend=_legend(drawn, best), note=note, hover="nearest",
    )  # fmt: skip


def _progress(trials: list[TrialStory], best: TrialStory) -> Chart:
    known = [trial for trial in trials if trial.value is not None][-_MAX_DOTS:]
    y = _of_furthest(known, best)
    lowest = math.inf
    line: list[Point] = []
    for trial in known:
        if trial.steps == best.steps and trial.status != DIVERGED:
            lowest = min(lowest, _last(trial))
        if math.isfinite(lowest):
            if line:
                line.append(Point(trial.number, line[-1].y))
            line.append(Point(trial.number, lowest, f"best so far: {loss_text(lowest)}"))
    return Chart(
        "progress", "Search progress", "held-out loss by trial",
        f"The best value after {len(known)} trials is {loss_text(best.value)}.",
        StepScale(0, max(1, max(trial.number for trial in known))),
        y,
        lines=(Line("best so far", "best-line", tuple(line)),),
        dots=tuple(_dot(trial, trial.number, y, best) for trial in known),
        legend=(
            LegendItem("best-line", "best so far", loss_text(best.value)),
            *_cut_legend(known, best),
        ),
        hover="nearest",
    )  # fmt: skip


def _scatter(
    name: str, path: str, space: Mapping[str, Any], shown: list[TrialStory], best: TrialStory
) -> Chart:
    having = [trial for trial in shown if path in trial.params][:_MAX_DOTS]
    y = _of_furthest(having, best)
    scale, places = _parameter_scale(space, [trial.params[path] for trial in having])
    kind = " (log)" if space.get("log") else ""
    return Chart(
        name, path.rpartition(".")[2], f"{path}{kind}",
        f"Value of {len(having)} trials over {path}; the best trial has "
        f"{parameter(best.params.get(path))}.",
        scale, y,
        dots=tuple(
            _dot(trial, place, y, best)
            for trial, place in sorted(
                zip(having, places, strict=True), key=lambda pair: pair[0] is best
            )
        ),
        legend=(
            LegendItem("best", "best", parameter(best.params.get(path))),
            *_cut_legend(having, best),
        ),
        hover="nearest",
    )  # fmt: skip


def _parameter_scale(space: Mapping[str, Any], values: list[Any]) -> tuple[Scale, list[float]]:
    is_number = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    if space.get("kind") == "choice" or not is_number:
        labels = [parameter(value) for value in space.get("values", [])]
        labels += sorted({parameter(value) for value in values} - set(labels))
        return ChoiceScale(tuple(labels)), [labels.index(parameter(value)) for value in values]
    numbers = [float(value) for value in values]
    ends = [float(space[end]) for end in ("low", "high") if end in space]
    return fit_padded([*numbers, *ends], is_log=bool(space.get("log"))), numbers


def _without_outliers(values: list[float]) -> LinearScale:
    """A scale that a few diverged values do not flatten; what lies above is drawn at its edge."""
    ordered = sorted(values)
    upper = ordered[int(0.9 * (len(ordered) - 1))]
    reach = upper + _OUTLIER * (upper - ordered[0])
    return fit_linear([value for value in ordered if value <= reach or len(ordered) < 4])


def _of_furthest(trials: list[TrialStory], best: TrialStory) -> LinearScale:
    """A scale for the trials that got as far as the best one.

    The others stand at its upper edge: their values came after fewer steps and would mislead.
    """
    scale = _without_outliers([_last(t) for t in trials if _style(t, best) != "cut"])
    return LinearScale(scale.low, scale.high + _CUT_ROOM * (scale.high - scale.low), scale.step)


def _dot(trial: TrialStory, place: float, y: LinearScale, best: TrialStory) -> Dot:
    text = f"{_named(trial)}\n{trial.status} at step {trial.steps}: {loss_text(trial.value)}"
    text += "".join(
        f"\n{name.rpartition('.')[2]} {parameter(value)}"
        for name, value in sorted(trial.params.items())
    )
    style = _style(trial, best)
    height = y.high if style == "cut" else _last(trial)
    return Dot(place, height, f"trial {style}", text, "best" if trial is best else "")


def _last(trial: TrialStory) -> float:
    return math.inf if trial.value is None else trial.value


def _style(trial: TrialStory, best: TrialStory) -> str:
    if trial is best:
        return "best"
    return "full" if trial.steps == best.steps and trial.status != DIVERGED else "cut"


def _legend(drawn: list[TrialStory], best: TrialStory) -> tuple[LegendItem, ...]:
    styles = [_style(trial, best) for trial in drawn]
    items = [LegendItem("best", f"trial {best.number}, the best", loss_text(best.value))]
    for style, name in (("full", "as far"), ("cut", "stopped earlier")):
        if style in styles:
            items.append(LegendItem(style, name, str(styles.count(style))))
    return tuple(items)


def _cut_legend(trials: list[TrialStory], best: TrialStory) -> tuple[LegendItem, ...]:
    count = sum(_style(trial, best) == "cut" for trial in trials)
    return (LegendItem("cut", "stopped earlier", str(count)),) if count else ()


def _named(trial: TrialStory) -> str:
    return f"trial {trial.number} ({trial.run_id})"
