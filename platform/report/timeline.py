"""The life of a run on one line: start-up, attempts, stretches without workers, the end."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from eagleray.platform.report.chart import Mark, Size
from eagleray.platform.report.history import History
from eagleray.platform.report.run_charts import time_marks
from eagleray.platform.report.scales import TimeScale
from eagleray.platform.report.svg import element, group
from eagleray.platform.report.wording import counted, duration
from eagleray.platform.runs import RunState

_LANE_TOP, _LANE_HEIGHT = 26.0, 30.0
_CHECKPOINT_Y, _AXIS_Y, _TEXT_Y = 67.0, 78.0, 94.0
_LETTER, _BOLD_LETTER = 6.4, 7.4
_MIN_SEGMENT_S = 0.5
SIZES = (
    Size("wide", 1134, 102, left=8, right=8, x_ticks=12),
    Size("narrow", 360, 102, left=6, right=6, x_ticks=5),
)


@dataclass(frozen=True)
class Segment:
    """A stretch of a run's life, in seconds since its start."""

    start: float
    end: float
    style: str
    label: str
    text: str


@dataclass(frozen=True)
class Timeline:
    """A run's life as stretches and marks."""

    segments: tuple[Segment, ...]
    marks: tuple[Mark, ...]
    scale: TimeScale
    about: str


def make_timeline(state: RunState, history: History) -> Timeline | None:
    """The life of a run; None when nothing has begun."""
    if not history.attempts:
        return None
    at = history.clock.at
    end = at(history.ended_s)
    segments = list(_segments(state, history))
    about = "; ".join(f"{s.text}, {duration(s.end - s.start)}" for s in segments[:40])
    scale = TimeScale(0.0, max(end, 1.0))
    return Timeline(tuple(segments), time_marks(history), scale, f"In order: {about}.")


def draw_timeline(line: Timeline, size: Size) -> Markup:
    """The picture at one size."""
    x0, x1 = size.left, size.width - size.right

    def x(seconds: float) -> float:
        return x0 + min(1.0, max(0.0, line.scale.at(seconds))) * (x1 - x0)

    name = f"timeline-{size.name}"
    return element(
        "svg",
        element("title", "Timeline of the run", id=f"{name}-title"),
        element("desc", line.about, id=f"{name}-about"),
        group(_axis(line, size, x), class_="axis"),
        group(_lane(line, x), class_="lane"),
        group(_marks(line, x, x1), class_="marks"),
        element("g", Markup(""), class_="pointer"),
        viewBox=f"0 0 {size.width:g} {size.height:g}",
        role="img",
        aria_labelledby=f"{name}-title {name}-about",
        class_=f"chart timeline {size.name}",
        data_plot=f"{x0:g} {x1:g} {_LANE_TOP + _LANE_HEIGHT:g} {_LANE_TOP:g}",
    )


def timeline_hover(line: Timeline) -> dict[str, Any]:
    """What hovering shows, in positions between 0 and 1."""
    at = line.scale.at
    return {
        "mode": "segments",
        "series": [],
        "segments": [
            [round(at(s.start), 4), round(at(s.end), 4), f"{s.text}\n{duration(s.end - s.start)}"]
            for s in line.segments
        ],
        "marks": [[round(at(mark.x), 4), mark.text] for mark in line.marks],
    }


def _segments(state: RunState, history: History) -> Iterator[Segment]:
    at, attempts = history.clock.at, history.attempts
    start = at(attempts[0].begun_s)
    if start > _MIN_SEGMENT_S:
        yield Segment(0.0, start, "idle", "start-up", "start-up: cluster, data, workers")
    for attempt in attempts:
        workers = counted(attempt.world_size, "worker")
        steps = f"steps {attempt.start_step} to {attempt.last_step}"
        yield Segment(
            at(attempt.begun_s), at(attempt.ended_s), "attempt",
            f"attempt {attempt.number}, {workers}",
            f"attempt {attempt.number}, {workers}, {steps}, {attempt.end}",
        )  # fmt: skip
    for one, other in pairwise(attempts):
        if at(other.begun_s) - at(one.ended_s) > 0:
            text = f"no workers between attempts {one.number} and {other.number}"
            yield Segment(at(one.ended_s), at(other.begun_s), "down", "no workers", text)
    ended, last = at(history.ended_s), at(attempts[-1].ended_s)
    if state.status.is_terminal and ended - last > _MIN_SEGMENT_S:
        is_good = state.status == "finished"
        text = "end: audit, export, records" if is_good else f"until it was {state.status.value}"
        yield Segment(last, ended, "idle", "end", text)


def _lane(line: Timeline, x: Callable[[float], float]) -> Iterator[Markup]:
    for segment in line.segments:
        left, right = x(segment.start), x(segment.end)
        width = max(1.0, right - left)
        yield element(
            "rect", x=left, y=_LANE_TOP, width=width, height=_LANE_HEIGHT,
            class_=f"segment {segment.style}",
        )  # fmt: skip
        short = segment.label.partition(",")[0]
        for label in (segment.label, short, short.removeprefix("attempt ")):
            if len(label) * _BOLD_LETTER + 12 < width:
                yield element(
                    "text", label, x=left + width / 2, y=_LANE_TOP + 19, text_anchor="middle",
                    class_=f"segment-label {segment.style}",
                )  # fmt: skip
                break


def _marks(line: Timeline, x: Callable[[float], float], right: float) -> Iterator[Markup]:
    free_from = 0.0
    for mark in sorted(line.marks, key=lambda m: m.x):
        place = x(mark.x)
        if mark.style == "checkpoint":
            path = f"M{place:.1f} {_CHECKPOINT_Y - 4:.1f}l4 4l-4 4l-4 -4Z"
            yield element("path", d=path, class_="mark checkpoint")
            continue
        yield element(
            "line", x1=place, x2=place, y1=_LANE_TOP - 6, y2=_LANE_TOP + _LANE_HEIGHT + 3,
            class_=f"mark {mark.style}",
        )  # fmt: skip
        half = len(mark.label) * _LETTER / 2
        middle = min(max(place, half), right - half)
        if mark.label and middle - half >= free_from:
            yield element(
                "text", mark.label, x=middle, y=_LANE_TOP - 11, text_anchor="middle",
                class_=f"mark-label {mark.style}",
            )  # fmt: skip
            free_from = middle + half + 4


def _axis(line: Timeline, size: Size, x: Callable[[float], float]) -> Iterator[Markup]:
    yield element("line", x1=x(0), x2=x(line.scale.high), y1=_AXIS_Y, y2=_AXIS_Y, class_="base")
    for tick in line.scale.ticks(size.x_ticks):
        place = x(tick.value)
        yield element("line", x1=place, x2=place, y1=_AXIS_Y, y2=_AXIS_Y + 4, class_="base")
        half = len(tick.label) * _LETTER / 2
        at = min(max(place, half), size.width - half)
        yield element("text", tick.label, x=at, y=_TEXT_Y + 2, text_anchor="middle")
