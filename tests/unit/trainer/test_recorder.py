"""The recorder when storage takes nothing for a while, and when its process is restarted."""

from typing import Any

import pytest

from eagleray.actors.trainer.recorder import Fatal, RunRecorder, WorkerInfo
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


def test_a_restarted_recorder_knows_who_trains_and_one_of_a_later_driver_does_not(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = RunStore(storage)
    run_id = runs.create("tiny", "train", {}, 40)
    first = RunRecorder(runs, run_id)
    first.begin(2, "a")
    first.join(1, WorkerInfo(0, 10, "h", "n"))
    first.begin(2, "b")
    workers = [WorkerInfo(0, 11, "h", "n"), WorkerInfo(1, 12, "h", "m")]
    for worker in (*workers, *workers):
        first.join(2, worker)
    first.join(1, WorkerInfo(1, 13, "h", "m"))
    assert len([e for e in runs.events(run_id) if e["event"] == "worker"]) == 3
    restarted = RunRecorder(runs, run_id, is_restarted=True)
    assert list(restarted.view(0).workers) == workers
    assert RunRecorder(runs, run_id).view(0).workers == ()
    # What was fatal stays so for this driver, and not for one that resumes the run.
    fatal = Fatal("RunFailedError", "it", "do", 1)
    restarted.fail(fatal)
    assert RunRecorder(runs, run_id, is_restarted=True).fatal() == fatal
    resumed = RunRecorder(runs, run_id)
    assert resumed.fatal() is None
    resumed.begin(2, "c")
    again = RunRecorder(runs, run_id, is_restarted=True)
    assert (again.fatal(), again.view(0).workers) == (None, ())

    def full(*_: Any) -> None:
        raise StorageError("no space left on device")

    monkeypatch.setattr(Storage, "append", full)
    again.join(3, workers[0])
    assert again.view(0).workers == (workers[0],)
