"""Shared memory between a store and its workers: lent, held, used again, never torn."""

import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eagleray.actors.checkpoint.buffer_pool import BufferPool
from eagleray.actors.checkpoint.manifest import CheckpointFolder
from eagleray.actors.checkpoint.snapshot_buffer import (
    BufferName,
    NoRoomError,
    Placed,
    SnapshotBuffer,
    available_bytes,
    lay_out,
    placed_arrays,
)
from eagleray.actors.checkpoint.state import Checkpoint, Snapshot
from eagleray.actors.checkpoint.store import CheckpointStore
from eagleray.platform.config import CheckpointConfig
from eagleray.platform.errors import DeadlineExceededError, ServiceError
from eagleray.platform.storage import Storage

PLACES, NUM_BYTES = lay_out([("a", np.dtype(np.float32), (3, 5)), ("b", np.dtype(np.int64), ())])


def filled(name: BufferName, attempt: int, step: int, value: float | None = None) -> Snapshot:
    """A worker's work, from lent memory to the part that it hands in."""
    buffer = SnapshotBuffer.attach(name)
    buffer.fill(attempt, step)
    arrays = buffer.arrays(PLACES)
    arrays["a"][:] = step if value is None else value
    arrays["b"][()] = step
    buffer.complete(attempt, step)
    return Snapshot(
        step, attempt, 0, 1, {}, np.zeros((1, 1)), step - 1, placed=Placed(name, PLACES)
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    made = CheckpointStore(Storage(tmp_path), "r", CheckpointConfig(write_timeout_s=20))
    made.begin(1)
    yield made
    made.close()


def lent(store: CheckpointStore, attempt: int = 1) -> BufferName:
    name = store.lend(attempt, NUM_BYTES)
    assert name is not None
    return name


def value_of(found: Checkpoint | None) -> float:
    assert found is not None
    values = np.unique(found.arrays["a"])
    assert values.shape == (1,), "torn"
    return float(values[0])


class Gate:
    """Storage that writes once it is let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        plain = CheckpointFolder.write

        def write(folder: CheckpointFolder, checkpoint: Checkpoint) -> str:
            assert self.opened.wait(20)
            return plain(folder, checkpoint)

        monkeypatch.setattr(CheckpointFolder, "write", write)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, store: CheckpointStore) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.opened.set()
    store.flush()


def test_arrays_arrive_in_another_mapping_as_they_were_put() -> None:
    buffer = SnapshotBuffer.create(NUM_BYTES)
    there = SnapshotBuffer.attach(buffer.name).arrays(PLACES)
    there["a"][:] = np.arange(15).reshape(3, 5)
    there["b"][()] = -7
    extra = {"c": np.ones(2)}
    found = placed_arrays(Placed(buffer.name, PLACES), extra)
    assert {name: (array.dtype, array.shape) for name, array in found.items()} == {
        "a": (np.float32, (3, 5)), "b": (np.int64, ()), "c": (np.float64, (2,)),
    }  # fmt: skip
    assert found["a"].tolist() == np.arange(15).reshape(3, 5).tolist()
    assert found["b"] == -7
    buffer.close()
    # The mapping stays as long as an array of it.
    there["a"][0, 0] = 5
    assert found["a"][0, 0] == 5


def test_only_what_was_completed_for_this_step_is_held() -> None:
    buffer = SnapshotBuffer.create(NUM_BYTES)
    assert not buffer.holds(1, 2)
    buffer.fill(1, 2)
    assert not buffer.holds(1, 2)
    buffer.complete(1, 2)
    assert buffer.holds(1, 2)
    assert not buffer.holds(2, 2)
    assert not buffer.holds(1, 3)
    buffer.fill(1, 4)
    assert not buffer.holds(1, 2)
    buffer.close()


def test_another_file_in_the_place_of_a_buffer_is_not_taken_for_it() -> None:
    buffer = SnapshotBuffer.create(NUM_BYTES)
    with pytest.raises(LookupError, match="another file"):
        SnapshotBuffer.attach(replace(buffer.name, token=b"0" * 16))
    with pytest.raises(LookupError, match="another file"):
        SnapshotBuffer.attach(replace(buffer.name, num_bytes=NUM_BYTES - 64))
    buffer.close()
    with pytest.raises(OSError, match="No such file"):
        SnapshotBuffer.attach(buffer.name)


def test_nobody_can_cut_a_buffer_under_its_readers() -> None:
    buffer = SnapshotBuffer.create(NUM_BYTES)
    with pytest.raises(PermissionError):
        os.ftruncate(buffer.name.descriptor, mmap.PAGESIZE)
    buffer.close()


def test_a_buffer_without_room_is_refused_with_both_figures() -> None:
    with pytest.raises(NoRoomError, match=r"needs 1,000,000 bytes .*, 999,999 are free"):
        SnapshotBuffer.create(1_000_000, 999_999)
    assert 0 < available_bytes() < 1 << 50


def test_the_newest_state_stays_while_the_next_is_copied(store: CheckpointStore) -> None:
    store.submit(filled(lent(store), 1, 1))
    store.flush(1)
    # A worker that dies in the middle of its copy.
    half = SnapshotBuffer.attach(lent(store))
    half.fill(1, 2)
    half.arrays(PLACES)["a"][:1] = 2
    found = store.begin(2)
    assert value_of(found) == 1
    assert store.placed(1) is not None


def test_a_worker_that_outlives_its_attempt_spoils_nothing(store: CheckpointStore) -> None:
    store.submit(filled(lent(store), 1, 1))
    late_name = lent(store)
    late = SnapshotBuffer.attach(late_name)
    late.fill(1, 2)
    store.begin(2)
    name = lent(store, 2)
    assert name != late_name
    store.submit(filled(name, 2, 2))
    late.arrays(PLACES)["a"][:] = -1
    late.complete(1, 2)
    store.submit(replace(filled(name, 2, 2), attempt=1, placed=Placed(late_name, PLACES)))
    assert store.flush(2).dropped == 1
    assert value_of(store.begin(3)) == 2
    assert store.lend(1, NUM_BYTES) is None


def test_a_part_that_is_not_whole_is_refused(store: CheckpointStore) -> None:
    name = lent(store)
    part = filled(name, 1, 1)
    SnapshotBuffer.attach(name).fill(1, 1)
    with pytest.raises(ServiceError, match="step 1 in attempt 1 is not whole"):
        store.submit(part)
    assert store.begin(2) is None


def test_a_restarted_store_lends_nothing_in_an_attempt_that_it_did_not_begin(
    store: CheckpointStore,
) -> None:
    with pytest.raises(ServiceError, match="restarted"):
        store.lend(2, NUM_BYTES)


def test_what_is_being_written_is_not_lent(store: CheckpointStore, gate: Gate) -> None:
    for step in (1, 2):
        store.submit(filled(lent(store), 1, step))
    waiting: list[BufferName | None] = []
    thread = threading.Thread(target=lambda: waiting.append(store.lend(1, NUM_BYTES)))
    thread.start()
    thread.join(0.05)
    assert waiting == []
    gate.opened.set()
    thread.join(20)
    (name,) = waiting
    assert name is not None
    store.submit(filled(name, 1, 3))
    store.flush(3)
    assert value_of(store.begin(2)) == 3


@pytest.mark.parametrize("double_buffer", [False, True])
def test_a_storage_too_slow_for_the_buffers_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, double_buffer: bool
) -> None:
    gate = Gate(monkeypatch)
    config = CheckpointConfig(write_timeout_s=0.05, double_buffer=double_buffer)
    store = CheckpointStore(Storage(tmp_path), "r", config)
    store.begin(1)
    try:
        for step in range(1, 4 if double_buffer else 3):
            store.submit(filled(lent(store), 1, step))
        with pytest.raises(DeadlineExceededError, match="lend memory for a snapshot"):
            lent(store)
    finally:
        gate.opened.set()
        store.close()


def test_what_storage_refused_is_used_again(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagleray.actors.checkpoint.samples import SampleLog
    from eagleray.platform.errors import StorageError

    def refuse(*_: object) -> str:
        raise StorageError("storage is full")

    with monkeypatch.context() as patch:
        patch.setattr(SampleLog, "append", refuse)
        for step in (1, 2, 3):
            store.submit(filled(lent(store), 1, step))
    store.submit(filled(lent(store), 1, 4))
    assert store.flush(4).shared_bytes == NUM_BYTES
    assert value_of(store.begin(2)) == 4


def test_buffers_of_another_size_give_way() -> None:
    pool = BufferPool(2)
    first = pool.lend(64)
    assert first is not None
    SnapshotBuffer.attach(first).complete(1, 1)
    pool.take(Placed(first, ()), 1, 1)
    pool.lend(64)
    assert pool.lend(128) is None
    pool.hold_only({})
    assert pool.lend(128) is not None
    assert pool.num_bytes == 64 + 128
    pool.close()
    assert pool.num_bytes == 0
