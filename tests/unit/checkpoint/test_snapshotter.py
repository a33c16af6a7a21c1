"""Snapshots that are copied while training goes on hold the values of the moment they began."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from eagleray.actors.checkpoint.manifest import CheckpointFolder
from eagleray.actors.checkpoint.snapshot import Snapshotter, take_arrays
from eagleray.actors.checkpoint.snapshot_buffer import SnapshotBuffer
from eagleray.actors.checkpoint.state import Checkpoint, Snapshot
from eagleray.actors.checkpoint.store import CheckpointStore
from eagleray.actors.trainer.stepper import Stepper
from eagleray.platform.config import CheckpointConfig, ProjectConfig, with_overrides
from eagleray.platform.errors import ServiceError
from eagleray.platform.model.config import DecoderConfig
from eagleray.platform.model.decoder import Decoder
from eagleray.platform.storage import Storage

MODES = ["handed over", "two buffers", "three buffers"]


@dataclass
class Sink:
    """The real store, without shared memory."""

    store: CheckpointStore

    def submit(self, snapshot: Snapshot) -> None:
        self.store.submit(snapshot)


class LendingSink(Sink):
    """The real store, whose buffers are attached as a worker does."""

    def lend(self, num_bytes: int) -> SnapshotBuffer | None:
        name = self.store.lend(1, num_bytes)
        return SnapshotBuffer.attach(name) if name else None


Made = tuple[CheckpointStore, Sink]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[str], Made]]:
    stores = []

    def made(mode: str) -> Made:
        config = CheckpointConfig(double_buffer=mode == "three buffers", write_timeout_s=20)
        store = CheckpointStore(Storage(tmp_path), "r", config)
        stores.append(store)
        store.begin(1)
        return store, Sink(store) if mode == "handed over" else LendingSink(store)

    yield made
    for store in stores:
        store.close()


def trained(steps: int = 2) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(1, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def part(step: int, first: int = 0, attempt: int = 1) -> Snapshot:
    rng = {"rng.0.cpu": np.arange(5, dtype=np.uint8)}
    return Snapshot(step, attempt, 0, 1, rng, np.arange(first, step)[:, None], first)


@torch.no_grad()
def change(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What an update might do at worst: every weight and every slot is another one."""
    for parameter in model.parameters():
        parameter.add_(41)
        for slot in optimizer.state[parameter].values():
            slot.add_(41)


def assert_same(found: Checkpoint | None, expected: dict[str, np.ndarray]) -> None:
    assert found is not None
    assert found.arrays.keys() == {*expected, "rng.0.cpu"}
    for name, array in expected.items():
        assert found.arrays[name].dtype == array.dtype
        assert found.arrays[name].shape == array.shape
        assert np.array_equal(found.arrays[name], array), name


@pytest.mark.parametrize("mode", MODES)
def test_values_are_those_of_the_call_though_all_change_after_the_join(
    make: Callable[[str], Made], tmp_path: Path, mode: str
) -> None:
    store, sink = make(mode)
    model, optimizer = trained()
    snapshotter = Snapshotter(model, optimizer, sink)
    for step in (2, 4, 6, 8):
        expected = take_arrays(model, optimizer)
        snapshotter.begin(part(step, step - 2))
        snapshotter.join()
        change(model, optimizer)
        store.flush(step)
        assert_same(CheckpointFolder(Storage(tmp_path), "r").load(step), expected)
    found = store.begin(2)
    assert_same(found, expected)
    assert (store.placed(8) is None) == (mode == "handed over")


@pytest.mark.parametrize("mode", MODES)
def test_without_the_join_a_snapshot_would_be_torn(make: Callable[[str], Made], mode: str) -> None:
    store, sink = make(mode)
    model, optimizer = trained()
    copied, changed = threading.Event(), threading.Event()

    def copy(target: np.ndarray, source: np.ndarray) -> None:
        if copied.is_set():
            assert changed.wait(20)
        np.copyto(target, source)
        copied.set()

    before = take_arrays(model, optimizer)
    snapshotter = Snapshotter(model, optimizer, sink, copy=copy)
    snapshotter.begin(part(2))
    assert copied.wait(20)
    change(model, optimizer)
    changed.set()
    snapshotter.join()
    after = take_arrays(model, optimizer)
    found = store.begin(2)
    assert found is not None
    early = [name for name in before if np.array_equal(found.arrays[name], before[name])]
    late = [name for name in before if np.array_equal(found.arrays[name], after[name])]
    assert (len(early), len(late)) == (1, len(before) - 1)


def test_the_step_after_it_waits_for_a_snapshot_before_its_update(
    make: Callable[[str], Made],
) -> None:
    store, sink = make("two buffers")
    decoder = DecoderConfig(
        vocab_size=50, dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, ffn_dim=32,
        max_seq_len=16,
    )  # fmt: skip
    model = Decoder(decoder)
    model.init_weights(torch.Generator().manual_seed(0))
    stepper = Stepper(model, with_overrides(ProjectConfig(name="t"), {}).train)
    tokens = np.arange(18, dtype=np.int32).reshape(2, 9)
    stepper.step(0, tokens)
    joining = threading.Event()

    def copy(target: np.ndarray, source: np.ndarray) -> None:
        assert joining.wait(20)
        np.copyto(target, source)

    snapshotter = Snapshotter(model, stepper.optimizer, sink, copy=copy)

    def join() -> None:
        joining.set()
        snapshotter.join()

    stepper.before_update = join
    expected = take_arrays(model, stepper.optimizer)
    snapshotter.begin(part(1))
    result = stepper.step(1, tokens)
    assert_same(store.begin(2), expected)
    assert not np.array_equal(
        take_arrays(model, stepper.optimizer)["optimizer.exp_avg.norm.weight"],
        expected["optimizer.exp_avg.norm.weight"],
    )
    assert result.before_update_s > 0


def test_who_waits_for_a_snapshot_takes_part_in_its_copy(make: Callable[[str], Made]) -> None:
    store, sink = make("two buffers")
    model, optimizer = trained()
    helped = threading.Event()

    def copy(target: np.ndarray, source: np.ndarray) -> None:
        if threading.current_thread() is threading.main_thread():
            helped.set()
        assert helped.wait(20), "the thread of the snapshot copies alone"
        np.copyto(target, source)

    expected = take_arrays(model, optimizer)
    snapshotter = Snapshotter(model, optimizer, sink, copy=copy)
    snapshotter.begin(part(2))
    snapshotter.join()
    assert_same(store.begin(2), expected)
    assert snapshotter.cost_s >= snapshotter.blocked_s > 0


def test_an_array_larger_than_a_piece_is_copied_whole(make: Callable[[str], Made]) -> None:
    store, sink = make("two buffers")
    model = torch.nn.Linear(3, 3_000_017)
    optimizer = torch.optim.SGD(model.parameters())
    Snapshotter(model, optimizer, sink).begin(part(2))
    store.flush(2)
    assert_same(store.begin(2), take_arrays(model, optimizer))


def test_what_a_copy_or_a_sink_raises_comes_from_the_join(make: Callable[[str], Made]) -> None:
    model, optimizer = trained()

    class Broken(Sink):
        def submit(self, snapshot: Snapshot) -> None:
            raise ServiceError("the store is gone")

    snapshotter = Snapshotter(model, optimizer, Broken(make("handed over")[0]))
    snapshotter.begin(part(2))
    with pytest.raises(ServiceError, match="the store is gone"):
        snapshotter.join()
    snapshotter.join()


def test_a_rank_without_state_hands_in_its_part_alone(make: Callable[[str], Made]) -> None:
    store, sink = make("two buffers")
    model, optimizer = trained()
    expected = take_arrays(model, optimizer)
    for rank in (1, 0):
        snapshot = Snapshot(2, 1, rank, 2, {f"rng.{rank}.cpu": np.zeros(1)}, np.zeros((2, 1)), 0)
        snapshotter = Snapshotter(model, optimizer, sink, has_state=rank == 0)
        snapshotter.begin(snapshot)
        snapshotter.join()
    found = store.begin(2)
    assert found is not None
    assert found.arrays.keys() == {*expected, "rng.0.cpu", "rng.1.cpu"}


def test_snapshots_use_the_same_memory_again(make: Callable[[str], Made]) -> None:
    store, sink = make("two buffers")
    model, optimizer = trained()
    snapshotter = Snapshotter(model, optimizer, sink)
    sizes, places = [], set()
    for step in range(1, 7):
        snapshotter.begin(part(step, step - 1))
        snapshotter.join()
        placed = store.placed(step)
        assert placed is not None
        places.add(placed.buffer)
        sizes.append(store.flush(step).shared_bytes)
    assert len(places) == 2
    assert sizes == [sizes[0]] + [2 * sizes[0]] * 5
    assert sizes[0] >= sum(array.nbytes for array in take_arrays(model, optimizer).values())


def test_without_room_arrays_are_handed_over_and_one_event_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    store = CheckpointStore(
        Storage(tmp_path), "r", CheckpointConfig(),
        lambda event, **details: events.append((event, details.get("message", ""))),
    )  # fmt: skip
    store.begin(1)
    monkeypatch.setattr(store._buffers, "_available", lambda: 5000)
    model, optimizer = trained()
    snapshotter = Snapshotter(model, optimizer, LendingSink(store))
    for step in (2, 4):
        expected = take_arrays(model, optimizer)
        snapshotter.begin(part(step, step - 2))
        snapshotter.join()
        change(model, optimizer)
    store.close()
    assert_same(store.begin(2), expected)
    (told,) = [message for event, message in events if event == "snapshots_not_shared"]
    assert "needs 28,096 bytes of shared memory, 5,000 are free" in told
