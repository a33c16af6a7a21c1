"""Verbs that tell of one run: report writes its page, show prints its state, figures and events."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eagleray.cli.console import ConfigOption, JsonOption, console, emit, table
from eagleray.platform.config import CONFIG_NAME
from eagleray.platform.errors import StorageError
from eagleray.project import Project

if TYPE_CHECKING:
    from eagleray.platform.report import RunFacts

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run or a sweep.")]
_MAX_EVENTS = 30
_MAX_TEXT, _DIGEST = 90, 12
_NOT_SHOWN = ("time_s", "event", "token")


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command()(report)
    app.command()(show)


def report(
    run_id: RunArgument,
    out: Annotated[
        Path | None, typer.Option(help="Write there instead of into the run's folder.")
    ] = None,
    config: ConfigOption = Path(CONFIG_NAME),
    as_json: JsonOption = False,
) -> None:
    """Write a run's report: one HTML file that needs nothing else. Prints its path.

    Example: eagleray report my-project-7f3k --out run.html
    """
    from eagleray.platform.report import read_facts, render_report, summarize, write_report

    storage = Project.load(config).storage
    facts = read_facts(storage, run_id)
    path = write_report(storage, run_id) if out is None else _write(render_report(facts), out)
    document = {"path": str(path), "figures": dataclasses.asdict(summarize(facts))}
    emit(document, as_json, lambda: console.print(str(path), markup=False, soft_wrap=True))


def show(
    run_id: RunArgument, config: ConfigOption = Path(CONFIG_NAME), as_json: JsonOption = False
) -> None:
    """Print a run's state, figures and events.

    Example: eagleray show my-project-7f3k
    """
    from eagleray.platform.report import masked, read_facts, summarize

    project = Project.load(config)
    facts = read_facts(project.storage, run_id)
    figures = dataclasses.asdict(summarize(facts))
    events = [masked(event) for event in project.runs.events(run_id)]
    document = {"state": dataclasses.asdict(facts.state), "figures": figures, "events": events}

    def tables() -> None:
        rows = [[name.replace("_", " "), _figure(name, value)] for name, value in figures.items()]
        shown = [row for row in rows if row[1] != ""]
        console.print(table(run_id, ["", ""], shown))
        if events:
            console.print()
            console.print(_events(facts, events))

    emit(document, as_json, tables)


def _write(page: str, out: Path) -> Path:
    partial = out.with_name(f".{out.name}.partial")
    try:
        partial.write_text(page, encoding="utf-8")
        partial.replace(out)
    except OSError as error:
        raise StorageError(
            f"{out} cannot be written: {error.strerror or error}", "name another file with --out"
        ) from error
    return out.resolve()


def _events(facts: "RunFacts", events: list[dict[str, Any]]) -> Any:
    from eagleray.platform.report.wording import duration

    at = facts.history.clock.at
    rows = [
        [duration(at(event["time_s"])), event["event"], _details(event)]
        for event in events[-_MAX_EVENTS:]
    ]
    title = "events" if len(events) <= _MAX_EVENTS else f"the last {_MAX_EVENTS} events"
    return table(title, ["at", "event", ""], rows)


def _details(event: dict[str, Any]) -> str:
    parts = {key: value for key, value in event.items() if key not in _NOT_SHOWN}
    if "digest" in parts:
        parts["digest"] = str(parts["digest"])[:_DIGEST]
    return ", ".join(f"{key} {_short(value)}" for key, value in sorted(parts.items()))


def _figure(name: str, value: Any) -> str:
    if name == "time_shares" and value:
        return ", ".join(f"{part} {share:.1%}" for part, share in value.items())
    if name in ("mfu", "goodput") and value is not None:
        return f"{value:.1%}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return _short(value)


def _short(value: Any) -> str:
    if value is None or value in ({}, [], ""):
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(part)}" for key, part in value.items())
    text = str(value)
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."
