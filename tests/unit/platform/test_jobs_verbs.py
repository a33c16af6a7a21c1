"""The verbs submit, ps, logs and stop where no cluster runs."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from eagleray.cli import console as cli_console
from eagleray.cli.app import app
from eagleray.platform.errors import EagleRayError, NotFoundError, UsageError
from eagleray.platform.jobs import Job, JobRecords, JobStatus
from eagleray.platform.runs import RunStatus, RunStore
from eagleray.platform.storage import Storage


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "eagleray.yaml").write_text("name: test\nstorage: {uri: storage}\n")
    return tmp_path


@pytest.fixture
def records(project: Path, storage: Storage) -> JobRecords:
    """The records of the project: its storage is the fixture's."""
    return JobRecords(storage)


def run(project: Path, verb: str, *words: str) -> Result:
    return CliRunner().invoke(app, [verb, "--config", str(project), *words])


def rows(project: Path) -> list[dict[str, str]]:
    listed: list[dict[str, str]] = json.loads(run(project, "ps", "--json").stdout)
    return listed


def test_a_dry_submission_lists_every_file_with_its_size(project: Path) -> None:
    document = json.loads(
        run(project, "submit", "--dry-run", "--json", "--", "train", "train.steps=5").stdout
    )
    assert document["arguments"] == ["train", "train.steps=5"]
    names = {file["name"] for file in document["files"]}
    assert {"eagleray.yaml", "eagleray/platform/errors.py"} <= names
    assert all(package["bytes"] > 0 for package in document["packages"])


def test_a_dry_submission_tells_people_the_totals(project: Path) -> None:
    assert "project: 1 files" in run(project, "submit", "--dry-run", "--", "train").stdout


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["trayn"], "did you mean train?"),
        (["train", "train.stepz=1"], "did you mean `train.steps`"),
        (["--", "--json"], "no verb"),
    ],
)
def test_mistakes_are_told_here_not_by_a_failed_job(
    project: Path, words: list[str], complaint: str
) -> None:
    result = run(project, "submit", "--", *words)
    assert isinstance(result.exception, UsageError)
    assert complaint in str(result.exception)


@pytest.mark.parametrize("words", [["submit", "--", "train"], ["stop", "x"], ["logs", "x"]])
def test_without_a_cluster_the_way_to_one_is_told(project: Path, words: list[str]) -> None:
    result = run(project, *words)
    assert isinstance(result.exception, NotFoundError)
    assert result.exception.exit_code == 2


def test_an_address_must_be_a_dashboards(project: Path) -> None:
    result = run(project, "submit", "--address", "host:6379", "--", "train")
    assert isinstance(result.exception, UsageError)
    assert "http://host:8265" in result.exception.fix


def test_an_address_where_nobody_answers_is_a_clear_failure(project: Path) -> None:
    result = run(project, "stop", "--address", "http://127.0.0.1:1", "x")
    assert isinstance(result.exception, EagleRayError)
    assert "http://127.0.0.1:1" in result.exception.what


def test_nothing_to_list_is_said(project: Path) -> None:
    assert "no jobs and no runs yet" in run(project, "ps").stdout


def test_jobs_and_runs_are_listed_together_newest_first(
    project: Path, records: JobRecords, storage: Storage
) -> None:
    records.save(Job("train-abc", JobStatus.FINISHED, "eagleray train", 10.0))
    run_id = RunStore(storage, clock=lambda: 20.0).create("test", "train", {}, steps=7)
    assert [(row["id"], row["kind"]) for row in rows(project)] == [
        (run_id, "train"),
        ("train-abc", "job"),
    ]
    assert "train-abc" in run(project, "ps").stdout


def test_a_long_message_takes_no_room_from_the_status(
    project: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, message = RunStore(storage), "8 training workers can never be placed, " * 9
    run_id = runs.create("test", "train", {})
    runs.update(run_id, status=RunStatus.FAILED, message=message)
    (line,) = [line for line in run(project, "ps").stdout.splitlines() if run_id in line]
    assert line.rstrip().endswith(message.rstrip())
    shown = io.StringIO()
    screen = Console(file=shown, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(cli_console, "console", screen)
    run(project, "ps")
    (line,) = [line for line in shown.getvalue().splitlines() if run_id in line]
    assert len(line) <= 80
    assert line.split()[:3] == [run_id, "train", "failed"]
    assert line.endswith("...")


def test_a_job_whose_cluster_is_gone_is_listed_as_lost_and_another_clusters_is_not(
    project: Path, records: JobRecords
) -> None:
    for job_id, cluster in (("ours", "http://127.0.0.1:8265"), ("theirs", "http://far:8265")):
        records.save(Job(job_id, JobStatus.RUNNING, "eagleray train", 10.0, cluster=cluster))
    statuses = {row["id"]: row["status"] for row in rows(project)}
    assert statuses == {"ours": "lost", "theirs": "running"}


@pytest.mark.parametrize("verb", ["logs", "stop"])
def test_a_run_is_told_apart_from_a_job(project: Path, storage: Storage, verb: str) -> None:
    run_id = RunStore(storage).create("test", "train", {}, steps=7)
    result = run(project, verb, run_id)
    assert isinstance(result.exception, UsageError)
    assert f"{run_id} is a train run (pending), not a job" in result.exception.what


def test_logs_outlive_the_cluster(project: Path, records: JobRecords) -> None:
    records.save(Job("train-abc", JobStatus.FINISHED, "eagleray train", 10.0))
    records.keep_log("train-abc", "step 1\n")
    assert run(project, "logs", "train-abc").stdout == "step 1\n"


def test_a_job_that_left_no_log_is_told_apart_from_an_unknown_one(
    project: Path, records: JobRecords
) -> None:
    records.save(Job("train-abc", JobStatus.FINISHED, "eagleray train", 10.0))
    assert "left no log" in str(run(project, "logs", "train-abc").exception)
    assert "no job 'x'" in str(run(project, "logs", "x").exception)
