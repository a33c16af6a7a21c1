"""The recorder when storage takes nothing for a while."""

from typing import Any

import pytest

from eagleray.actors.trainer.recorder import RunRecorder
from eagleray.actors.trainer.step_row import StepRow
from eagleray.platform.errors import StorageError
from eagleray.platform.runs import RunStore
from eagleray.platform.storage import Storage


def row(step: int) -> StepRow:
    return StepRow(1, step, 2.0, 1.0, 0.1, 100.0, 0.5, 0.0, 1.0, 0.0, 0.0, 0.0)


def test_figures_that_find_no_room_wait_and_do_not_end_the_run(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs = RunStore(storage)
    run_id = runs.create("tiny", "train", {}, 40)
    recorder = RunRecorder(runs, run_id)
    recorder.begin(1, "token")
    recorder.report(row(10))
    plain = Storage.append

    def full(*_: Any) -> None:
        raise StorageError("no space left on device")

    monkeypatch.setattr(Storage, "append", full)
    assert recorder.report(row(20)) is None
    recorder.report(row(30))
    assert [kept.step for kept in recorder.view(0).rows] == [10, 20, 30]
    assert [kept["step"] for kept in runs.metrics(run_id)] == [10]
    monkeypatch.setattr(Storage, "append", plain)
    recorder.report(row(40))
    assert [kept["step"] for kept in runs.metrics(run_id)] == [10, 20, 30, 40]
    assert runs.state(run_id).step == 40
    assert len([r for r in caplog.records if "wait in memory" in r.message]) == 1
