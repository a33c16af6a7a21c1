"""The page itself: facts and pictures put into one self-contained HTML file.

Laws:
    * The file needs nothing but itself: no network, no font, no picture from elsewhere.
    * Everything that comes from a run is escaped; and a content security policy lets no script run
      but the page's own, so that even a mistake there would be inert.
    * Equal records give equal bytes.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from eagleray.platform.report.chart import Chart, draw, hover_data
from eagleray.platform.report.facts import RunFacts, read_facts
from eagleray.platform.report.figures import Summary, SweepSummary, summarize
from eagleray.platform.report.lineage import draw_tree
from eagleray.platform.report.run_charts import run_charts
from eagleray.platform.report.settings import as_yaml, changed_settings
from eagleray.platform.report.sweep_charts import sweep_charts
from eagleray.platform.report.tables import Table, run_tables, trial_table
from eagleray.platform.report.tiles import Tile, banner, sweep_tiles, training_tiles
from eagleray.platform.report.timeline import SIZES, draw_timeline, make_timeline, timeline_hover
from eagleray.platform.report.wording import moment
from eagleray.platform.storage import Storage

REPORT = "report.html"


@dataclass(frozen=True)
class Panel:
    """A chart, ready for the page."""

    chart: Chart | None
    pictures: tuple[Markup, ...]
    hover: dict[str, Any] = field(default_factory=dict)


def write_report(storage: Storage, run_id: str) -> Path:
    """Write `runs/<id>/report.html`, whatever state the run is in.

    Returns:
        Where it is.

    Raises:
        NotFoundError: There is no such run.
    """
    page = render_report(read_facts(storage, run_id))
    storage.put(page.encode(), "runs", run_id, REPORT)
    return storage.path("runs", run_id, REPORT)


def render_report(facts: RunFacts) -> str:
    """The page of a run."""
    state, summary = facts.state, summarize(facts)
    style, script = _part("page.css"), _part("page.js")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    # No script of the page but this one, and no other source of anything.
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return environment.from_string(_part("page.html")).render(
        policy=policy,
        style=Markup(style),
        script=Markup(script),
        state=state,
        summary=summary,
        started=moment(state.created_s),
        updated=moment(facts.history.ended_s),
        banner=banner(facts),
        aliases=facts.aliases,
        tiles=_tiles(facts, summary),
        timeline=_timeline(facts),
        panels=[_panel(chart) for chart in _charts(facts)],
        tables=_tables(facts),
        audit=_audit(summary),
        tree=draw_tree(facts.lineage) if facts.lineage else None,
        no_lineage=facts.no_lineage,
        changed=changed_settings(facts.config),
        config=as_yaml(facts.config) if facts.config else "",
    )


def _tiles(facts: RunFacts, summary: Summary | SweepSummary) -> list[Tile]:
    if isinstance(summary, SweepSummary):
        return sweep_tiles(summary)
    return training_tiles(facts, summary)


def _charts(facts: RunFacts) -> list[Chart]:
    if facts.state.kind == "sweep":
        space = facts.config.get("tune", {}).get("space") or {}
        return sweep_charts(facts.trials, space)
    planned = 0 if facts.state.status.is_terminal else facts.state.steps
    return run_charts(facts.history, planned)


def _tables(facts: RunFacts) -> Sequence[Table]:
    if facts.state.kind == "sweep":
        return trial_table(facts)
    return run_tables(facts)


def _audit(summary: Summary | SweepSummary) -> Summary | None:
    return summary if isinstance(summary, Summary) else None


def _panel(chart: Chart) -> Panel:
    pictures = tuple(draw(chart, size) for size in chart.sizes)
    return Panel(chart, pictures, hover_data(chart))


def _timeline(facts: RunFacts) -> Panel | None:
    line = make_timeline(facts.state, facts.history)
    if line is None:
        return None
    pictures = tuple(draw_timeline(line, size) for size in SIZES)
    return Panel(None, pictures, timeline_hover(line))


def _part(name: str) -> str:
    return resources.files("eagleray.platform.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(sha256(text.encode()).digest()).decode()
