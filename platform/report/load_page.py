"""A page of two pictures: what clients of an endpoint waited for."""

from collections.abc import Mapping, Sequence
from importlib import resources

from markupsafe import Markup, escape

from eagleray.platform.report.chart import WIDE, Chart, Line, Point, draw
from eagleray.platform.report.scales import PercentScale, fit_linear, thinned

_MAX_POINTS = 320


def load_page(title: str, lines: Sequence[str], waits: Mapping[str, Sequence[float]]) -> str:
    """A self-contained HTML page.

    Args:
        title: What was driven.
        lines: What came out, in words.
        waits: What was waited for -> the seconds of each request; drawn as the share of requests
            that waited no longer.
    """
    style = resources.files("eagleray.platform.report").joinpath("page.css").read_text()
    pictures = [_waited(name, seconds) for name, seconds in waits.items() if seconds]
    told = Markup("").join(Markup("<p class='when'>{}</p>").format(line) for line in lines)
    figures = Markup("").join(
        Markup("<figure class='card'><figcaption class='head'><h2>{} <small>{}</small></h2>"
               "</figcaption><div class='plot'>{}</div></figure>").format(
            chart.title, chart.unit, draw(chart, WIDE)
        )
        for chart in pictures
    )  # fmt: skip
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>{escape(title)}</title><style>{style}</style></head><body><main>"
        f"<h1>{escape(title)}</h1>{told}<section class='panels'>{figures}</section>"
        "</main></body></html>\n"
    )


def _waited(name: str, seconds: Sequence[float]) -> Chart:
    ordered = sorted(seconds)
    points = tuple(Point(ordered[i], (i + 1) / len(ordered)) for i in thinned(ordered, _MAX_POINTS))
    return Chart(
        name=name.replace(" ", "-"),
        title=name,
        unit="seconds; share of requests that waited no longer",
        about=f"How long requests waited for the {name}: median {ordered[len(ordered) // 2]:.3g} "
        f"s, longest {ordered[-1]:.3g} s.",
        x=fit_linear(ordered, from_zero=True),
        y=PercentScale(0.0, 1.0, 0.25),
        lines=(Line(name, "train", points),),
    )
