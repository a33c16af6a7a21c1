"""The record of a cluster: found again, never mistaken, never shared between two commands."""

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from eagleray.platform.cluster.guard import start_ticks
from eagleray.platform.cluster.state import ClusterRecord, ClusterState, boot_id
from eagleray.platform.cluster.versions import Versions
from eagleray.platform.errors import DeadlineExceededError, StorageError
from eagleray.platform.storage import Storage


@pytest.fixture
def record(tmp_path: Path) -> ClusterRecord:
    return ClusterRecord(Storage(tmp_path))


@pytest.fixture
def state() -> ClusterState:
    """A cluster whose guard is this very process."""
    return ClusterState(
        mark="0123456789abcdef",
        guard_pid=os.getpid(),
        guard_start_ticks=start_ticks(os.getpid()) or 0,
        boot_id=boot_id(),
        host=socket.gethostname(),
        address="127.0.0.1:20000",
        dashboard_url="http://127.0.0.1:20001",
        metrics_port=20002,
        # Something that surely stands on our own command line.
        folder=Path("/proc/self/cmdline").read_bytes().split(b"\0")[0].decode(),
        token_file="/nowhere/token",
        versions=Versions.here(),
        started_s=1.0,
    )


def test_a_written_record_is_read_back_equal(record: ClusterRecord, state: ClusterState) -> None:
    record.write(state)
    assert record.read() == state


def test_no_record_reads_as_none_and_forgetting_it_again_is_harmless(record: ClusterRecord) -> None:
    record.forget()
    assert record.read() is None


def test_a_record_of_another_format_is_refused_by_its_number(
    record: ClusterRecord, tmp_path: Path
) -> None:
    Storage(tmp_path).put_json({"format": 99}, "cluster", "state.json")
    with pytest.raises(StorageError, match="format 99, this version reads 1"):
        record.read()


def test_a_damaged_record_is_refused_with_its_path(record: ClusterRecord, tmp_path: Path) -> None:
    Storage(tmp_path).put_json({"format": 1, "mark": "x"}, "cluster", "state.json")
    with pytest.raises(StorageError, match=r"state\.json has format unreadable"):
        record.read()


def test_a_guard_with_the_recorded_start_time_is_alive(state: ClusterState) -> None:
    assert state.is_alive


@pytest.mark.parametrize(
    "change",
    [
        {"guard_start_ticks": 1},
        {"boot_id": "another boot"},
        {"guard_pid": 2**22 + 1},
        {"folder": "/tmp/a-folder-that-is-not-on-the-command-line"},
        {"host": "another-host"},
    ],
)
def test_a_pid_used_again_is_never_taken_for_the_guard(
    state: ClusterState, change: dict[str, object]
) -> None:
    assert not replace(state, **change).is_alive  # type: ignore[arg-type]


def test_a_second_command_gives_up_at_its_deadline(record: ClusterRecord) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with (
        record.locked(5.0),
        pytest.raises(DeadlineExceededError, match=r"another `up` or `down`.*5 s"),
        record.locked(5.0, clock=lambda: now[0], sleep=sleep),
    ):
        raise AssertionError("the lock was given out twice")
    assert 5.0 <= now[0] < 6.0


def test_the_lock_is_free_again_after_a_failure(record: ClusterRecord) -> None:
    with pytest.raises(KeyError), record.locked(1.0):
        raise KeyError
    with record.locked(0.0):
        pass
