"""The verbs report and show."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from eagleray.cli import report
from eagleray.platform.errors import NotFoundError, StorageError
from eagleray.platform.runs import RunStatus, RunStore
from eagleray.platform.storage import Storage


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "eagleray.yaml").write_text("name: sotu\n", encoding="utf-8")
    return tmp_path


@pytest.fixture
def run_id(project: Path) -> str:
    runs = RunStore(Storage(project / ".eagleray"))
    made = runs.create("sotu", "train", {"name": "sotu"}, steps=10)
    runs.add_event(made, "attempt", attempt=1, world_size=2, token="hidden-token")
    runs.add_event(made, "checkpoint", step=5, digest="c" * 64)
    runs.add_event(made, "fault", attempt=1, ranks=[1], message="[/bold] rank 1 [red]died")
    runs.update(made, status=RunStatus.FAILED, step=5, message="redis://u:pw@h is gone")
    return made


def invoke(project: Path, *words: str) -> Result:
    app = typer.Typer()
    report.register(app)
    result = CliRunner().invoke(app, [*words, "--config", str(project)], env={"COLUMNS": "200"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_report_prints_the_path_of_the_page(project: Path, run_id: str) -> None:
    result = invoke(project, "report", run_id)
    path = Path(result.output.strip())
    assert path == project / ".eagleray" / "runs" / run_id / "report.html"
    assert run_id in path.read_text(encoding="utf-8")


def test_report_writes_elsewhere_and_gives_figures_to_scripts(
    project: Path, run_id: str, tmp_path: Path
) -> None:
    target = tmp_path / "out.html"
    document = json.loads(invoke(project, "report", run_id, "--out", str(target), "--json").output)
    assert document["path"] == str(target)
    assert document["figures"]["faults"] == 1
    assert target.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert not (project / ".eagleray" / "runs" / run_id / "report.html").exists()


def test_report_says_what_is_wrong(project: Path, run_id: str, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no run 'none'"):
        invoke(project, "report", "none")
    with pytest.raises(StorageError, match="cannot be written"):
        invoke(project, "report", run_id, "--out", str(tmp_path / "no" / "out.html"))


def test_show_prints_state_figures_and_events_as_they_are(project: Path, run_id: str) -> None:
    output = invoke(project, "show", run_id).output
    for words in (
        "failed", "redis://**********@h is gone", "steps redone", "[/bold] rank 1 [red]died",
        "digest cccccccccccc, step 5",
    ):  # fmt: skip
        assert words in output
    assert "hidden-token" not in output


def test_show_gives_everything_to_scripts(project: Path, run_id: str) -> None:
    document = json.loads(invoke(project, "show", run_id, "--json").output)
    assert document["state"]["status"] == "failed"
    assert document["figures"]["step"] == 5
    assert [event["event"] for event in document["events"]] == ["attempt", "checkpoint", "fault"]
    assert "pw@" not in json.dumps(document)
