"""The checkpoint store: complete or absent, damage noticed, the sample log exact."""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagleray.actors.checkpoint.manifest import CheckpointFolder, newest_intact
from eagleray.actors.checkpoint.samples import SampleLog, Segment, audit
from eagleray.actors.checkpoint.snapshot import load_arrays, model_arrays, take_arrays
from eagleray.actors.checkpoint.state import Checkpoint, Snapshot
from eagleray.actors.checkpoint.store import CheckpointStore
from eagleray.platform.config import CheckpointConfig
from eagleray.platform.errors import (
    DeadlineExceededError,
    IntegrityError,
    ServiceError,
    StorageError,
)
from eagleray.platform.storage import Storage

SMALL = 4_096
"""Files up to this are flipped at every byte, larger ones at NUM_FLIPS."""
NUM_FLIPS = 2_000


@pytest.fixture
def store(tmp_path: Path) -> Storage:
    return Storage(tmp_path)


def checkpoint(step: int, value: float = 1.0, **meta: Any) -> Checkpoint:
    arrays = {
        "model.w": np.full((3, 2), value, np.float32),
        "rng.0.cpu": np.arange(5, dtype=np.uint8),
    }
    return Checkpoint(step, arrays, "", dict(meta))


def part(step: int, rank: int = 0, world: int = 1, attempt: int = 1, first: int = 0) -> Snapshot:
    ids = np.arange(first, step)[:, None] * world + rank
    arrays = {"model.w": np.full(4, step, np.float32)} if rank == 0 else {}
    return Snapshot(step, attempt, rank, world, arrays, ids, first)


def test_a_checkpoint_is_read_back_bit_for_bit(store: Storage) -> None:
    folder = CheckpointFolder(store, "r")
    written = Checkpoint(
        7,
        {
            "a": np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32),
            "b": np.arange(3, dtype=np.int64),
            "scalar": np.array(2.5, np.float64),
        },
        "",
        {"eval_loss": 1.5},
    )
    folder.write(written)
    found = folder.load(7)
    assert found.meta == {"eval_loss": 1.5}
    assert found.arrays.keys() == written.arrays.keys()
    for name, array in written.arrays.items():
        assert found.arrays[name].dtype == array.dtype
        assert np.array_equal(found.arrays[name], array)


def test_every_flipped_byte_is_noticed_and_the_checkpoint_before_is_used(
    store: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    folder = CheckpointFolder(store, "r")
    draw = random.Random(3)
    for step in (1, 2):
        large = {"model.large": np.arange(5_000, dtype=np.float32)}
        folder.write(Checkpoint(step, large | checkpoint(step).arrays, "", {}))
    files = sorted(folder.path(2).iterdir())
    assert [path.name for path in files if path.stat().st_size > SMALL] == ["__0_0.distcp"]
    flipped = 0
    for path in files:
        clean = path.read_bytes()
        positions = range(len(clean))
        if len(clean) > SMALL:
            positions = draw.sample(positions, NUM_FLIPS)
        with path.open("r+b", buffering=0) as file:
            for count, position in enumerate(positions):
                file.seek(position)
                file.write(bytes([clean[position] ^ 1 << draw.randrange(8)]))
                with pytest.raises(IntegrityError, match=path.name.removesuffix(".sha256")):
                    folder.load(2)
                if count % 500 == 0:
                    found = CheckpointStore(store, "r", CheckpointConfig())
                    before = found.begin(1)
                    found.close()
                    assert before is not None
                    assert before.step == 1
                    assert "checkpoint skipped: " in caplog.messages[-1]
                file.seek(position)
                file.write(clean[position : position + 1])
                flipped += 1
        path.write_bytes(clean[:-1])
        with pytest.raises(IntegrityError):
            folder.verify(2)
        path.write_bytes(clean)
    assert flipped > NUM_FLIPS + 1_000
    assert folder.load(2).step == 2


def test_the_newest_intact_one_is_found_behind_damaged_ones(store: Storage) -> None:
    folder = CheckpointFolder(store, "r")
    for step in (1, 2, 3):
        folder.write(checkpoint(step, step))
    place = store.path("runs", "r", "checkpoints")
    next((place / "00000003").glob("*.distcp")).unlink()
    (place / "00000002" / "manifest.sha256").unlink()  # as an early checkpoint of format 1
    (place / "00000002" / "manifest.json").write_bytes(
        (place / "00000002" / "manifest.json").read_bytes().replace(b'"format":1', b'"format":9')
    )
    found, damaged = newest_intact(folder)
    assert found is not None
    assert found.step == 1
    assert [type(error) for error in damaged] == [IntegrityError, IntegrityError]
    assert "format 9" in str(damaged[1])


def test_a_folder_without_manifest_does_not_exist(store: Storage) -> None:
    folder = CheckpointFolder(store, "r")
    folder.write(checkpoint(1))
    store.path("runs", "r", "checkpoints", "00000001", "manifest.json").unlink()
    assert folder.steps() == []
    assert newest_intact(folder) == (None, [])


def test_a_write_that_fails_leaves_nothing_and_says_why(
    store: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    folder = CheckpointFolder(store, "r")
    with monkeypatch.context() as patch:
        patch.setattr("eagleray.actors.checkpoint.dcp.dcp_save", full)
        with pytest.raises(StorageError, match="has room"):
            folder.write(checkpoint(1))
    assert os.listdir(store.path("runs", "r", "checkpoints")) == []


def test_only_a_complete_snapshot_counts(store: Storage) -> None:
    keeper = CheckpointStore(store, "r", CheckpointConfig())
    assert keeper.begin(1) is None
    keeper.submit(part(2, rank=0, world=2))
    assert keeper.begin(2) is None
    keeper.submit(part(2, rank=1, world=2, attempt=1))
    assert keeper.status().dropped == 1
    for rank in (1, 0):
        keeper.submit(part(2, rank=rank, world=2, attempt=2))
    assert keeper.flush().written == 1
    found = keeper.begin(3)
    assert found is not None
    assert found.step == 2
    (segment,) = SampleLog(store, "r").chain(found.samples)
    assert segment.ids_SG.tolist() == [[0, 1], [2, 3]]


def test_a_new_process_goes_on_from_storage(store: Storage) -> None:
    first = CheckpointStore(store, "r", CheckpointConfig())
    first.begin(1)
    first.submit(part(3))
    first.flush()
    second = CheckpointStore(store, "r", CheckpointConfig())
    found = second.begin(2)
    assert found is not None
    second.submit(part(5, attempt=2, first=3))
    second.flush()
    third = CheckpointStore(store, "r", CheckpointConfig()).begin(3)
    assert third is not None
    segments = SampleLog(store, "r").chain(third.samples)
    assert [segment.first_step for segment in segments] == [0, 3]
    assert audit(segments, [100]).is_exact


def test_the_newest_and_the_best_are_kept(store: Storage) -> None:
    keeper = CheckpointStore(store, "r", CheckpointConfig(keep=2))
    keeper.begin(1)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 4.0)):
        meta = {} if loss is None else {"eval_loss": loss}
        snapshot = part(step, first=step - 1)
        keeper.submit(Snapshot(**{**vars(snapshot), "meta": meta}))
        keeper.flush()
    assert CheckpointFolder(store, "r").steps() == [2, 4, 5]


def test_storage_that_refuses_stops_nothing_but_is_told(
    store: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    keeper = CheckpointStore(store, "r", CheckpointConfig(), lambda name, **_: events.append(name))
    keeper.begin(1)

    def refuse(*_: object) -> str:
        raise StorageError("storage is full")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "write", refuse)
        keeper.submit(part(2))
        with pytest.raises(StorageError, match="storage is full"):
            keeper.flush()
    # From memory the run could go on; the next write mends it, with no sample lost from the log.
    again = keeper.begin(1)
    assert again is not None
    assert again.step == 2
    keeper.submit(part(4, first=2))
    keeper.flush()
    assert events == ["checkpoint_failed", "checkpoint"]
    found = keeper.begin(2)
    assert found is not None
    assert audit(SampleLog(store, "r").chain(found.samples), [100]).is_exact


def test_samples_of_a_refused_log_reach_the_next_segment(
    store: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = CheckpointStore(store, "r", CheckpointConfig())
    keeper.begin(1)

    def refuse(*_: object) -> str:
        raise StorageError("storage is full")

    with monkeypatch.context() as patch:
        patch.setattr(SampleLog, "append", refuse)
        keeper.submit(part(2))
    keeper.submit(part(3, first=2))
    keeper.flush()
    found = keeper.begin(2)
    assert found is not None
    (segment,) = SampleLog(store, "r").chain(found.samples)
    assert segment.ids_SG.ravel().tolist() == [0, 1, 2]


def test_a_slow_storage_holds_up_to_its_deadline(
    store: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    gate = threading.Event()
    plain = CheckpointFolder.write

    def slow(self: CheckpointFolder, given: Checkpoint) -> str:
        gate.wait(30)
        return plain(self, given)

    monkeypatch.setattr(CheckpointFolder, "write", slow)
    keeper = CheckpointStore(store, "r", CheckpointConfig(write_timeout_s=0.05))
    keeper.begin(1)

    def flood() -> None:
        for step in range(1, 6):
            keeper.submit(part(step, first=step - 1))

    with pytest.raises(DeadlineExceededError, match="write_timeout_s"):
        flood()
    gate.set()


def test_a_part_that_waited_is_dropped_when_its_attempt_is_over(
    store: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    gate = threading.Event()
    plain = CheckpointFolder.write

    def slow(self: CheckpointFolder, given: Checkpoint) -> str:
        gate.wait(30)
        return plain(self, given)

    monkeypatch.setattr(CheckpointFolder, "write", slow)
    keeper = CheckpointStore(store, "r", CheckpointConfig(write_timeout_s=30))
    keeper.begin(1)

    def fill() -> None:
        for step in range(1, 5):  # one being written, two queued, one that waits
            keeper.submit(part(step, first=step - 1))

    waiting = threading.Thread(target=fill)
    waiting.start()
    while keeper.status().pending < 3:
        waiting.join(0.01)
    first = keeper.begin(2)
    waiting.join(20)
    gate.set()
    second = keeper.begin(2)
    assert first is not None
    assert first is second
    assert first.step == 3
    assert keeper.status().dropped == 1
    keeper.submit(part(5, attempt=2, first=3))
    keeper.flush(5)
    found = keeper.begin(3)
    assert found is not None
    assert audit(SampleLog(store, "r").chain(found.samples), [100]).is_exact


def test_a_restarted_store_refuses_what_it_cannot_join_to_its_log(store: Storage) -> None:
    first = CheckpointStore(store, "r", CheckpointConfig())
    first.begin(1)
    first.submit(part(3))
    first.flush(3)
    restarted = CheckpointStore(store, "r", CheckpointConfig())
    with pytest.raises(ServiceError, match="snapshot of step 6 went with it"):
        restarted.submit(part(6, first=3))
    with pytest.raises(ServiceError, match="checkpoint of step 6 went with it"):
        restarted.flush(6)
    found = restarted.begin(2)
    assert found is not None
    assert restarted.flush(found.step).written == 0


def test_a_flush_waits_for_the_parts_of_every_rank(store: Storage) -> None:
    keeper = CheckpointStore(store, "r", CheckpointConfig(write_timeout_s=0.05))
    keeper.begin(1)
    keeper.submit(part(2, rank=0, world=2))
    with pytest.raises(DeadlineExceededError):
        keeper.flush(2)


def test_damaged_newer_checkpoints_do_not_push_out_intact_ones(store: Storage) -> None:
    first = CheckpointStore(store, "r", CheckpointConfig(keep=1))
    first.begin(1)
    first.submit(part(4))
    first.flush()
    folder = CheckpointFolder(store, "r")
    for step in (5, 9):
        folder.write(checkpoint(step))
        store.put(b"{", "runs", "r", "checkpoints", f"{step:08d}", "manifest.json")
    events: list[str] = []
    second = CheckpointStore(
        store, "r", CheckpointConfig(keep=1), lambda name, **_: events.append(name)
    )
    found = second.begin(2)
    assert found is not None
    assert found.step == 4
    second.submit(part(6, attempt=2, first=4))
    assert second.flush(6).failed == 0
    assert folder.steps() == [6]
    assert events == ["checkpoint_damaged", "checkpoint_damaged", "checkpoint"]


def test_what_a_killed_writer_left_is_removed(store: Storage) -> None:
    left = store.path("runs", "r", "checkpoints", ".tmp-dead")
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"x")
    CheckpointStore(store, "r", CheckpointConfig()).begin(1)
    assert not left.exists()


def test_an_event_that_cannot_be_recorded_stops_no_checkpoint(store: Storage) -> None:
    def full(*_: object, **__: object) -> None:
        raise StorageError("storage is full")

    keeper = CheckpointStore(store, "r", CheckpointConfig(write_timeout_s=5), full)
    keeper.begin(1)
    for step in (1, 2):
        keeper.submit(part(step, first=step - 1))
    assert keeper.flush(2).written == 2


def test_a_closed_store_has_written_all_and_its_thread_is_gone(store: Storage) -> None:
    keeper = CheckpointStore(store, "r", CheckpointConfig())
    keeper.begin(1)
    keeper.submit(part(3))
    keeper.close()
    assert CheckpointFolder(store, "r").steps() == [3]
    assert not keeper._writer.is_alive()


def test_the_audit_counts_gaps_overlaps_and_repeats() -> None:
    def segment(first: int, ids: list[list[int]]) -> Segment:
        return Segment(first, np.array(ids), "")

    assert audit([], [4]).is_exact
    exact = audit([segment(0, [[0, 1], [2, 3]]), segment(2, [[3, 0], [1, 2]])], [4])
    assert (exact.steps, exact.samples, exact.is_exact) == (4, 8, True)
    doubled = audit([segment(0, [[0, 1], [1, 3]])], [4])
    assert (doubled.missing, doubled.doubled) == (1, 1)
    gap = audit([segment(0, [[0, 1]]), segment(2, [[2, 3]])], [100])
    assert (gap.missing, gap.doubled) == (2, 0)
    overlap = audit([segment(0, [[0, 1], [2, 3]]), segment(1, [[4, 5]])], [100])
    assert (overlap.missing, overlap.doubled) == (0, 2)


def test_a_changed_sample_log_is_noticed(store: Storage) -> None:
    log = SampleLog(store, "r")
    name = log.append(Segment(0, np.arange(4).reshape(2, 2), ""))
    path = store.path("runs", "r", "samples", name)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="cannot be audited"):
        log.chain(name)


def test_optimizer_and_model_go_round_through_arrays() -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.AdamW]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model: torch.nn.Module, optimizer: torch.optim.AdamW, steps: int) -> None:
        for _ in range(steps):
            model(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    whole, whole_optimizer = make()
    train(whole, whole_optimizer, 5)
    first, first_optimizer = make()
    train(first, first_optimizer, 2)
    arrays = take_arrays(first, first_optimizer)
    train(first, first_optimizer, 1)  # what was taken must not follow
    second, second_optimizer = make()
    for array in arrays.values():
        array.flags.writeable = False  # as it arrives through Ray
    load_arrays(arrays, second, second_optimizer)
    train(second, second_optimizer, 3)
    for one, two in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two)
    assert set(model_arrays(arrays)) == {"weight", "bias"}
