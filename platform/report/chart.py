"""Charts as data, and how one is drawn: an inline SVG picture per width, and what hovering shows.

A chart is drawn twice, wide and narrow, and the style sheet shows one of them: shrinking one
picture to a telephone's width would shrink its letters too.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from eagleray.platform.report.scales import Scale
from eagleray.platform.report.svg import element, group, polyline

_DOTS_UP_TO = 60
_GAP_FROM = 8.0
"""Bars of this width have a hair of space between them."""
_LABEL_ROOM = 46.0
_LETTER = 6.6
"""Pixels of a letter of the labels, on average."""


@dataclass(frozen=True)
class Size:
    """Pixels of a picture, of the room beside its plot, and how many labels each axis takes."""

    name: str
    width: float
    height: float
    left: float = 46.0
    right: float = 14.0
    top: float = 20.0
    bottom: float = 30.0
    x_ticks: int = 7
    y_ticks: int = 5


WIDE = Size("wide", 560, 250)
NARROW = Size("narrow", 360, 220, left=42, right=12, x_ticks=5, y_ticks=4)


@dataclass(frozen=True)
class Point:
    """A place with the text that hovering shows."""

    x: float
    y: float
    text: str = ""


@dataclass(frozen=True)
class Line:
    """A curve; `style` is a class of the style sheet."""

    name: str
    style: str
    points: tuple[Point, ...]
    has_dots: bool = False
    """Dots even where there are many points."""


@dataclass(frozen=True)
class Bar:
    """Parts stacked between two x values: (style, height) from the bottom up."""

    x0: float
    x1: float
    parts: tuple[tuple[str, float], ...]
    text: str = ""


@dataclass(frozen=True)
class Dot:
    """A single point of a scatter."""

    x: float
    y: float
    style: str
    text: str = ""
    label: str = ""


@dataclass(frozen=True)
class Mark:
    """Something that happened at an x value: a fault, a restart, a checkpoint."""

    x: float
    style: str
    text: str
    label: str = ""


@dataclass(frozen=True)
class Band:
    """A stretch of x values that is set apart."""

    x0: float
    x1: float
    style: str = "down"


@dataclass(frozen=True)
class LegendItem:
    """What a colour means, and its latest or total figure."""

    style: str
    name: str
    figure: str = ""


@dataclass(frozen=True)
class Chart:
    """A picture with its words. `name` is unique on a page."""

    name: str
    title: str
    unit: str
    about: str
    """One or two sentences that say what is to be seen, for those who do not see it."""
    x: Scale
    y: Scale
    lines: tuple[Line, ...] = ()
    bars: tuple[Bar, ...] = ()
    dots: tuple[Dot, ...] = ()
    marks: tuple[Mark, ...] = ()
    bands: tuple[Band, ...] = ()
    legend: tuple[LegendItem, ...] = ()
    note: str = ""
    hover: str = "x"
    """x: a value of each curve at the pointer; nearest: the one closest point."""
    sizes: tuple[Size, ...] = field(default=(WIDE, NARROW))


def draw(chart: Chart, size: Size) -> Markup:
    """The picture of a chart at one size."""
    plot = _Plot(chart, size)
    return element(
        "svg",
        element("title", f"{chart.title} ({chart.unit})", id=f"{chart.name}-{size.name}-title"),
        element("desc", chart.about, id=f"{chart.name}-{size.name}-about"),
        *plot.elements(),
        viewBox=f"0 0 {size.width:g} {size.height:g}",
        role="img",
        aria_labelledby=f"{chart.name}-{size.name}-title {chart.name}-{size.name}-about",
        class_=f"chart {size.name}",
        # The script that answers the pointer finds the plot by these.
        data_plot=f"{plot.x0:g} {plot.x1:g} {plot.y0:g} {plot.y1:g}",
    )


def hover_data(chart: Chart) -> dict[str, Any]:
    """What hovering shows, in positions between 0 and 1, for any width."""
    series: list[dict[str, Any]] = [
        {
            "name": line.name,
            "style": line.style,
            "points": [_place(chart, p.x, p.y, p.text) for p in line.points],
        }
        for line in chart.lines
    ]
    if chart.bars:
        points = [_place(chart, (bar.x0 + bar.x1) / 2, None, bar.text) for bar in chart.bars]
        series.append({"name": "", "style": "", "points": points})
    if chart.dots:
        points = [_place(chart, dot.x, dot.y, dot.text) for dot in chart.dots]
        series.append({"name": "", "style": "", "points": points})
    return {
        "mode": chart.hover,
        "series": series,
        "marks": [[round(chart.x.at(mark.x), 4), mark.text] for mark in chart.marks],
    }


class _Plot:
    """One drawing of a chart."""

    def __init__(self, chart: Chart, size: Size) -> None:
        self._chart, self._size = chart, size
        self.x0, self.x1 = size.left, size.width - size.right
        self.y0, self.y1 = size.height - size.bottom, size.top

    def elements(self) -> Iterator[Markup]:
        chart = self._chart
        yield group(self._bands(), class_="bands")
        yield group(self._y_axis(), class_="axis")
        yield group(self._x_axis(), class_="axis")
        yield group(self._bars(), class_="bars")
        yield group(self._marks(), class_="marks")
        has_room = all(len(line.points) <= _DOTS_UP_TO for line in chart.lines)
        for line in chart.lines:
            yield self._line(line, has_dots=has_room or line.has_dots)
        yield group(self._dots(), class_="dots")
        yield element("g", Markup(""), class_="pointer")

    def _x(self, value: float) -> float:
        return self.x0 + min(1.0, max(0.0, self._chart.x.at(value))) * (self.x1 - self.x0)

    def _y(self, value: float) -> float:
        return self.y0 + min(1.0, max(0.0, self._chart.y.at(value))) * (self.y1 - self.y0)

    def _y_axis(self) -> Iterator[Markup]:
        for tick in self._chart.y.ticks(self._size.y_ticks):
            y = self._y(tick.value)
            yield element("line", x1=self.x0, x2=self.x1, y1=y, y2=y, class_="grid")
            yield element("text", tick.label, x=self.x0 - 8, y=y + 4, text_anchor="end")

    def _x_axis(self) -> Iterator[Markup]:
        yield element("line", x1=self.x0, x2=self.x1, y1=self.y0, y2=self.y0, class_="base")
        edge = self._size.width
        for tick in self._chart.x.ticks(self._size.x_ticks):
            x = self._x(tick.value)
            half = _LETTER * len(tick.label) / 2
            yield element("line", x1=x, x2=x, y1=self.y0, y2=self.y0 + 4, class_="base")
            yield element(
                "text", tick.label, x=min(x, edge - half), y=self.y0 + 18, text_anchor="middle"
            )

    def _bands(self) -> Iterator[Markup]:
        for band in self._chart.bands:
            x0, x1 = self._x(band.x0), self._x(band.x1)
            yield element(
                "rect", x=x0, y=self.y1, width=max(1.0, x1 - x0), height=self.y0 - self.y1,
                class_=f"band {band.style}",
            )  # fmt: skip

    def _marks(self) -> Iterator[Markup]:
        free_from = -1.0
        for mark in sorted(self._chart.marks, key=lambda m: m.x):
            x = self._x(mark.x)
            if mark.style == "checkpoint":
                y = self.y0
                yield element("path", d=_diamond(x, y, 3.5), class_="mark checkpoint")
                continue
            yield element("line", x1=x, x2=x, y1=self.y1, y2=self.y0, class_=f"mark {mark.style}")
            if mark.label and x >= free_from:
                anchor = "end" if x > self.x1 - _LABEL_ROOM else "middle"
                anchor = "start" if x < self.x0 + _LABEL_ROOM else anchor
                yield element(
                    "text", mark.label, x=x, y=self.y1 - 6, text_anchor=anchor,
                    class_=f"mark-label {mark.style}",
                )  # fmt: skip
                free_from = x + _LABEL_ROOM

    def _bars(self) -> Iterator[Markup]:
        for bar in self._chart.bars:
            x0, x1 = self._x(bar.x0), self._x(bar.x1)
            width = max(0.5, x1 - x0 - (1.0 if x1 - x0 > _GAP_FROM else 0.0))
            bottom = 0.0
            for style, height in bar.parts:
                top, low = self._y(bottom + height), self._y(bottom)
                bottom += height
                if low - top >= 0.05:
                    yield element(
                        "rect", x=x0, y=top, width=width, height=low - top, class_=f"part {style}"
                    )

    def _line(self, line: Line, *, has_dots: bool) -> Markup:
        points = [(self._x(p.x), self._y(p.y)) for p in line.points]
        drawn = [polyline(points, class_="curve")] if len(points) > 1 else []
        if has_dots or len(points) == 1:
            drawn += [element("circle", cx=x, cy=y, r=2.6) for x, y in points]
        return group(drawn, class_=f"line {line.style}")

    def _dots(self) -> Iterator[Markup]:
        for dot in self._chart.dots:
            x, y = self._x(dot.x), self._y(dot.y)
            is_best = "best" in dot.style.split()
            yield element("circle", cx=x, cy=y, r=6.0 if is_best else 4.0, class_=dot.style)
            if dot.label:
                side = -1 if x > self.x1 - _LABEL_ROOM else 1
                yield element(
                    "text", dot.label, x=x + side * 8, y=y - 7,
                    text_anchor="end" if side < 0 else "start", class_="dot-label",
                )  # fmt: skip


def _place(chart: Chart, x: float, y: float | None, text: str) -> list[Any]:
    height = 0.5 if y is None else min(1.0, max(0.0, chart.y.at(y)))
    return [round(chart.x.at(x), 4), round(height, 4), text]


def _diamond(x: float, y: float, r: float) -> str:
    return f"M{x:.1f} {y - r:.1f}L{x + r:.1f} {y:.1f}L{x:.1f} {y + r:.1f}L{x - r:.1f} {y:.1f}Z"
