"""The wall clock jumps under a run: nothing that counts seconds may count them by it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.chaos.runs import STEPS

from eagleray.platform.report import goodput, read_facts
from eagleray.project import Project, TrainedRun

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
MakeProject = Callable[..., Project]
# Python looks for a module of this name as it starts.
_SHIFTED_CLOCK = """\
import os
import time

_plain_time, _offset = time.time, os.environ["TEST_CLOCK_OFFSET"]


def _shifted_time():
    with open(_offset) as file:
        return _plain_time() + float(file.read() or 0)


time.time = _shifted_time
"""


def test_a_run_is_recovered_and_told_right_while_the_clock_jumps(
    make_project: MakeProject, undisturbed: TrainedRun, tmp_path: Path
) -> None:
    project = make_project()
    (tmp_path / "sitecustomize.py").write_text(_SHIFTED_CLOCK)
    clock, result = tmp_path / "offset", tmp_path / "result.json"
    clock.write_text("0")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": path, "TEST_CLOCK_OFFSET": str(clock)}
    # A cluster of its own: the clock is that of all its processes.
    environment.pop("RAY_ADDRESS", None)
    driver = subprocess.run(
        [sys.executable, "-m", "tests.chaos.clock_driver",
         str(project.loaded.root), str(clock), str(result)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert driver.returncode == 0, driver.stderr[-3000:]
    found = json.loads(result.read_text())
    assert (found["fired"], found["jumps_left"]) == (2, 0)
    assert (found["steps"], found["missing"], found["doubled"]) == (STEPS, 0, 0)
    assert undisturbed.model is not None
    assert (found["artifact"], found["eval_loss"]) == (
        undisturbed.model.artifact, undisturbed.eval_loss,
    )  # fmt: skip
    # Nobody was taken for hung or slow, and no second was told that did not pass.
    events = project.runs.events(found["run_id"])
    assert {"hang", "resize"}.isdisjoint(event["event"] for event in events)
    assert found["attempts"] == 3
    for recovery in (event for event in events if event["event"] == "recovery"):
        assert all(0 <= recovery[name] < 60 for name in recovery if name.endswith("ed_s"))
    rows = project.runs.metrics(found["run_id"])
    assert sorted(row["time_s"] for row in rows) == [row["time_s"] for row in rows]
    assert rows[-1]["time_s"] - rows[0]["time_s"] < 300
    told = goodput(read_facts(project.storage, found["run_id"]).history)
    assert told is not None
    assert 0.2 < told.share <= 1
