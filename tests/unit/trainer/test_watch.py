"""What the worker at a place sees of its process: that it is stopped, and that it does no step."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

from eagleray.actors.trainer import worker
from eagleray.actors.trainer.journal import Entry, StepJournal
from eagleray.actors.trainer.worker import Watch

Until = Callable[..., None]


class Clock:
    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(worker.time, "monotonic", lambda: clock.now)
    return clock


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as sleeping:
        yield sleeping
        sleeping.kill()


def state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_a_process_that_stays_stopped_is_told_of_and_one_that_goes_on_is_not(
    process: subprocess.Popen[bytes], clock: Clock, until: Until
) -> None:
    watch = Watch(process.pid, None, 1000.0)
    assert watch.look() == ""
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: state(process.pid) == "T", "a stopped process")
    assert watch.look() == ""
    clock.now += 0.9
    assert watch.look() == ""
    os.kill(process.pid, signal.SIGCONT)
    until(lambda: state(process.pid) != "T", "a process that goes on")
    assert watch.look() == ""
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: state(process.pid) == "T", "a stopped process")
    assert watch.look() == ""
    clock.now += 1.0
    assert watch.look() == "stopped"


def test_a_process_that_notes_no_step_is_told_of_once_per_deadline(
    process: subprocess.Popen[bytes], clock: Clock
) -> None:
    journal = StepJournal.create(8, 2)
    watch = Watch(process.pid, journal, 10.0)
    assert watch.look() == ""
    for done in range(1, 4):
        clock.now += 9.0
        journal.write(Entry(done, b""))
        assert watch.look() == ""
    clock.now += 9.9
    assert watch.look() == ""
    clock.now += 0.1
    assert watch.look() == "stuck"
    assert watch.look() == ""
    clock.now += 10.0
    assert watch.look() == "stuck"


def test_what_is_gone_or_not_there_yet_is_neither(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert Watch(process.pid, None, 1000.0).look() == ""
    assert Watch(0, None, 1000.0).look() == ""
