"""Storage that is full, slow or broken, and writers that are killed: what the store makes of it."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagleray.actors.checkpoint.manifest import CheckpointFolder
from eagleray.actors.checkpoint.samples import SampleLog, audit
from eagleray.actors.checkpoint.state import Snapshot
from eagleray.actors.checkpoint.store import CheckpointStore
from eagleray.platform.config import CheckpointConfig
from eagleray.platform.errors import DeadlineExceededError, StorageError
from eagleray.platform.runs import RunStore
from eagleray.platform.storage import Storage

DISK_BYTES = 4_000_000
ARRAY_BYTES = 600_000


def part(step: int, attempt: int = 1) -> Snapshot:
    """A snapshot two steps after the one before."""
    arrays = {"model.w": np.full(ARRAY_BYTES // 4, step, np.float32)}
    ids = np.arange(step - 2, step)[:, None]
    return Snapshot(step, attempt, 0, 1, arrays, ids, step - 2)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        pytest.skip("there is no `mount` here to make a small disk with")
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], timeout=20, check=True)


class Told:
    """A run's store with its events, as its actor has them."""

    def __init__(self, storage: Storage, **config: Any) -> None:
        self.runs = RunStore(storage)
        self.run_id = self.runs.create("r", "train", {})
        self.storage = storage
        self.store = CheckpointStore(
            storage, self.run_id, CheckpointConfig(keep=2, **config),
            lambda event, **details: self.runs.add_event(self.run_id, event, **details),
        )  # fmt: skip
        self.folder = CheckpointFolder(storage, self.run_id)
        self.store.begin(1)

    def events(self) -> list[str]:
        return [event["event"] for event in self.runs.events(self.run_id)]

    def names(self) -> list[str]:
        place = self.storage.path(*self.folder.place())
        return sorted(name for name in os.listdir(place) if not name.endswith(".lock"))


def fill(path: Path) -> None:
    """Write to a file until its disk is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    assert not os.statvfs(path).f_bavail


def test_a_full_disk_costs_checkpoints_until_there_is_room_again(small_disk: Path) -> None:
    told = Told(Storage(small_disk))
    for step in (2, 4):
        told.store.submit(part(step))
    assert told.store.flush(4).written == 2
    ballast = small_disk / "ballast"
    fill(ballast)
    for step in (6, 8, 10):
        told.store.submit(part(step))
        with pytest.raises(StorageError, match="No space left on device"):
            told.store.flush(step)
    assert told.names() == ["00000002", "00000004"]
    assert told.folder.load(4).step == 4
    ballast.unlink()
    told.store.submit(part(12))
    assert told.store.flush(12).failed == 3
    assert told.folder.steps() == [4, 12]
    assert told.events() == ["checkpoint", "checkpoint", "checkpoint_failed", "checkpoint"]
    found = told.folder.load(12)
    result = audit(SampleLog(told.storage, told.run_id).chain(found.samples), [1_000])
    assert (result.is_exact, result.steps) == (True, 12)
    told.store.close()


def test_a_disk_with_room_for_all_but_the_checkpoint_keeps_the_newest_state_in_memory(
    small_disk: Path,
) -> None:
    told = Told(Storage(small_disk))
    told.store.submit(part(2))
    told.store.flush(2)
    ballast = small_disk / "ballast"
    fill(ballast)
    os.truncate(ballast, ballast.stat().st_size - ARRAY_BYTES // 2)
    for step in (4, 6):
        told.store.submit(part(step))
        with pytest.raises(StorageError, match="No space left on device"):
            told.store.flush(step)
    # Room for half of a checkpoint is room for events: the outage is told while it lasts, once.
    assert told.events() == ["checkpoint", "checkpoint_failed"]
    assert told.names() == ["00000002"]
    newest = told.store.begin(2)
    assert newest is not None
    assert newest.step == 6
    ballast.unlink()
    told.store.submit(part(8, attempt=2))
    assert told.store.flush(8).written == 2
    assert told.folder.steps() == [2, 8]
    told.store.close()


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_disk_that_reports_errors_costs_checkpoints_until_it_does_no_more(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    told = Told(storage)
    told.store.submit(part(2))
    told.store.flush(2)
    plain = getattr(os, call)
    folder = str(storage.path(*told.folder.place()))

    def fail(target: Any, *words: Any, **options: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else target
        if str(path).startswith(folder):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(target, *words, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        for step in (4, 6):
            told.store.submit(part(step))
            with pytest.raises(StorageError, match="Input/output error"):
                told.store.flush(step)
        assert told.names() == ["00000002"]
    told.store.submit(part(8))
    assert told.store.flush(8).failed == 2
    assert told.folder.steps() == [2, 8]
    assert told.folder.load(8).arrays["model.w"][0] == 8
    assert told.events() == ["checkpoint", "checkpoint_failed", "checkpoint"]
    told.store.close()


def test_a_storage_slower_than_the_snapshots_holds_them_back_up_to_the_deadline(
    storage: Storage, until: Callable[..., None]
) -> None:
    # A checkpoint takes minutes at this pace.
    told = Told(storage, max_bytes_per_s=2_000, write_timeout_s=0.2)

    def flood() -> None:
        for step in range(2, 12, 2):
            told.store.submit(part(step))

    with pytest.raises(DeadlineExceededError, match="max_bytes_per_s"):
        flood()
    status = told.store.status()
    assert (status.written, status.pending) == (0, 3)  # one in work, two that wait
    told.store._folder._pacer.bytes_per_s = None  # so that its thread ends with the test
    until(lambda: told.store.status().written == 3, "the three that were taken", 30)
    told.store.close()


# Writes step 2, then begins to write step 4 at a pace of minutes, and says that it has it.
STORE = """
import sys
from pathlib import Path
import numpy as np
from eagleray.actors.checkpoint import dcp
from eagleray.actors.checkpoint.state import Snapshot
from eagleray.actors.checkpoint.store import CheckpointStore
from eagleray.platform.config import CheckpointConfig
from eagleray.platform.storage import Storage
dcp._num_files = lambda arrays: 2
storage = Storage(Path(sys.argv[1]))

def submit(store, step, size):
    arrays = {f"model.w{i}": np.full(size, step, np.float32) for i in range(2)}
    ids = np.arange(step - 2, step)[:, None]
    store.submit(Snapshot(step, 1, 0, 1, arrays, ids, step - 2))

quick = CheckpointStore(storage, "r", CheckpointConfig(keep=1))
quick.begin(1)
submit(quick, 2, 1_000)
quick.close()
slow = CheckpointStore(storage, "r", CheckpointConfig(keep=1, max_bytes_per_s=2_000))
slow.begin(1)
submit(slow, 4, 100_000)
print("taken", flush=True)
sys.stdin.read()
"""


def test_a_store_killed_while_it_writes_leaves_the_checkpoint_before(
    tmp_path: Path, until: Callable[..., None]
) -> None:
    """The pointer must not move, nor the old one go, before the new one is whole (keep=1)."""
    storage = Storage(tmp_path)
    folder = CheckpointFolder(storage, "r")
    place = storage.path(*folder.place())
    process = subprocess.Popen(
        [sys.executable, "-c", STORE, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"

        def half_written() -> list[Path]:
            return [path for path in place.glob(".tmp-*/*.distcp") if path.stat().st_size]

        until(lambda: len(half_written()) == 2, "two files under way")
        process.send_signal(signal.SIGKILL)
        process.wait(20)
        assert half_written()
    finally:
        process.kill()
        process.communicate()
    assert folder.steps() == [2]
    events: list[str] = []
    store = CheckpointStore(
        storage, "r", CheckpointConfig(keep=1), lambda event, **_: events.append(event)
    )
    found = store.begin(2)
    assert found is not None
    assert found.step == 2
    # The next attempt writes the same step in fewer files: nothing of the first one mixes in.
    store.submit(part(4, attempt=2))
    store.flush(4)
    store.close()
    assert sorted(path.name for path in folder.path(4).iterdir()) == [
        ".metadata", "__0_0.distcp", "manifest.json", "manifest.sha256"
    ]  # fmt: skip
    assert folder.load(4).arrays["model.w"][0] == 4
    assert [name for name in os.listdir(place) if name.startswith(".tmp")] == []
    assert events == ["checkpoint"]
