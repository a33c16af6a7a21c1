"""The command line interrupted and killed: what it says, what it leaves, how it goes on."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from eagleray.actors.checkpoint.manifest import CheckpointFolder
from eagleray.platform.runs import RunStatus
from eagleray.project import Project, TrainedRun

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
EAGLERAY = str(Path(sys.executable).with_name("eagleray"))
HEARD = "stopping, and saving the last step; once more ends it at once\n"


@contextlib.contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`eagleray` in a project's folder; ended whatever the test does."""
    process = subprocess.Popen(
        [EAGLERAY, *arguments], cwd=folder, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def read_until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """The first line of standard output that fits."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        match = re.search(pattern, line)
        if match:
            return match
    assert process.stderr is not None
    pytest.fail(f"no line {pattern!r} in {seen}; stderr: {process.stderr.read()}")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [EAGLERAY, *arguments], cwd=folder, text=True, capture_output=True, timeout=400,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def has(pid: int, name: str) -> Callable[[], bool]:
    """Whether a process below another one bears a name."""

    def check() -> bool:
        for process in descendants(pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                if name in " ".join(process.cmdline()):
                    return True
        return False

    return check


def all_gone(processes: list[psutil.Process]) -> Callable[[], bool]:
    def check() -> bool:
        return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)

    return check


def end_by(
    process: subprocess.Popen[str], number: signal.Signals, until: Callable[..., None]
) -> tuple[int, str]:
    """Exit code and standard error after a signal, when every process below it is gone too."""
    children = descendants(process.pid)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=120)
    until(all_gone(children), "the end of every process", 60)
    return process.returncode, stderr


def test_a_terminated_run_leaves_nothing_and_is_resumed(
    make_project: Callable[..., Project], until: Callable[..., None], undisturbed: TrainedRun
) -> None:
    project = make_project()
    with started(project.loaded.root, "train") as process:
        run_id = read_until(process, r"run (\S+)")[1]
        read_until(process, r"step [1-9]\d\b")
        # As a supervisor does, and `eagleray stop`; it must be no worse than Ctrl-C.
        ended = end_by(process, signal.SIGTERM, until)
    assert ended == (143, f"{HEARD}stopped; go on with: eagleray resume {run_id}\n")
    assert project.runs.state(run_id).status is RunStatus.STOPPED
    # The workers were given the time to keep their last step.
    reported = project.runs.metrics(run_id)[-1]["step"]
    assert reported < 200
    assert CheckpointFolder(project.storage, run_id).steps()[-1] == reported

    resumed = run(project.loaded.root, "resume", run_id, "--json")
    assert resumed.returncode == 0, resumed.stderr
    found = json.loads(resumed.stdout)
    assert undisturbed.model is not None
    assert found["model"]["artifact"] == undisturbed.model.artifact
    assert (found["missing"], found["doubled"], found["samples"]) == (0, 0, 1600)


def test_a_run_may_be_ended_while_its_workers_start(
    make_project: Callable[..., Project], until: Callable[..., None]
) -> None:
    project = make_project()
    with started(project.loaded.root, "train") as process:
        run_id = read_until(process, r"run (\S+)")[1]
        until(has(process.pid, "ray::Controller"), "Ray Train's controller", 120)
        ended = end_by(process, signal.SIGINT, until)
    assert ended == (130, f"{HEARD}stopped; go on with: eagleray resume {run_id}\n")
    assert project.runs.state(run_id).status is RunStatus.STOPPED


def test_a_sweep_goes_on_after_its_driver_was_stopped_and_killed(
    make_project: Callable[..., Project], until: Callable[..., None]
) -> None:
    project = make_project()
    with started(project.loaded.root, "tune") as process:
        sweep_id = read_until(process, r"sweep (\S+)")[1]
        read_until(process, r"^1 trials")
        ended = end_by(process, signal.SIGINT, until)
    told = f"stopped; go on with: eagleray tune --resume {sweep_id}\n"
    assert ended == (130, f"stopping; once more ends it at once\n{told}")
    assert project.runs.state(sweep_id).status is RunStatus.STOPPED
    trials = [state for state in project.runs.all() if state.kind == "trial"]
    assert RunStatus.RUNNING not in {trial.status for trial in trials}

    with started(project.loaded.root, "tune", "--resume", sweep_id) as process:
        read_until(process, r"^[2-3] trials")
        children = descendants(process.pid)
        process.kill()
        process.wait()
    until(all_gone(children), "the end of every process of the sweep", 60)
    first = project.runs.events(sweep_id)

    resumed = run(project.loaded.root, "tune", "--resume", sweep_id, "--json")
    assert resumed.returncode == 0, resumed.stderr
    found = json.loads(resumed.stdout)
    assert [trial["number"] for trial in found["trials"]] == [0, 1, 2, 3]
    assert "running" not in {trial["status"] for trial in found["trials"]}
    # What was known before the kill is still there, unchanged and not run again.
    assert project.runs.events(sweep_id)[: len(first)] == first
    suggested = [e for e in project.runs.events(sweep_id) if e["event"] == "trial"]
    assert len(suggested) == len({e["run"] for e in suggested}) == 4

    best = Project.load(project.loaded.root, ["tune.best=last"])
    assert best.config.train.optimizer.lr == found["best"]["params"]["train.optimizer.lr"]
    tree = project.ledger.lineage(found["record"])
    kinds = {node.record.kind for _, node in tree.walk()}
    assert {"sweep", "dataset", "config", "code", "checkpoint", "run"} <= kinds
    again = run(project.loaded.root, "tune", "--resume", sweep_id)
    assert again.returncode == 2
    assert "is finished" in again.stderr
