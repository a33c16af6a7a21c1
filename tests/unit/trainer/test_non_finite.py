"""A step that is not finite stops the run, is skipped, or is gone back from."""

import json
import math
import pickle
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.trainer.simulator import POISON, PoisonableStepper
from tests.unit.trainer.test_train_loop import (
    MODEL,
    SEQ_LEN,
    FakeBatch,
    FakeSource,
    ListReporter,
    StoreSink,
    config,
)

from eagleray.actors.checkpoint.samples import SampleLog, audit
from eagleray.actors.checkpoint.snapshot import take_arrays
from eagleray.actors.checkpoint.state import Checkpoint
from eagleray.actors.checkpoint.store import CheckpointStore
from eagleray.actors.trainer import loop
from eagleray.actors.trainer.non_finite import (
    NonFiniteGuard,
    NonFiniteLossError,
    Poison,
    RewindError,
)
from eagleray.actors.trainer.recorder import RunRecorder
from eagleray.actors.trainer.seams import LoopSpec, Seat
from eagleray.platform.config import CheckpointConfig, NonFiniteConfig
from eagleray.platform.model.decoder import Decoder
from eagleray.platform.runs import RunStore
from eagleray.platform.storage import Storage

NAN = float("nan")


@dataclass
class PoisonedSource(FakeSource):
    """Batches of which some are poisonous; notes which were asked for."""

    poisoned: set[int]
    asked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def batch(self, step: int, rank: int, world_size: int, mixture: object = None) -> FakeBatch:
        batch = super().batch(step, rank, world_size)
        if step < 1000:
            self.asked.append(step)
        if step in self.poisoned:
            batch.tokens[0, 0] = POISON
        return batch


@pytest.fixture(autouse=True)
def poisonable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "Stepper", PoisonableStepper)


def train(
    folder: Path, poisoned: set[int], reporter: ListReporter, **changes: object
) -> tuple[Checkpoint, PoisonedSource]:
    store = CheckpointStore(Storage(folder), "r", CheckpointConfig())
    spec = LoopSpec(config(**changes), replace(MODEL, vocab_size=51), SEQ_LEN)
    source = PoisonedSource(poisoned)
    loop.run_loop(Seat(), spec, source, StoreSink(store), reporter)
    found = store.begin(99)
    assert found is not None
    store.close()
    return found, source


def test_by_default_the_run_stops_and_names_the_other_ways(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLossError, match="the loss is nan at step 4") as caught:
        train(tmp_path, {4}, ListReporter())
    assert "train.non_finite.action: skip" in caught.value.fix
    assert "rewind" in caught.value.fix
    assert caught.value.step == 4
    thawed = pickle.loads(pickle.dumps(caught.value))
    assert (thawed.what, thawed.fix, thawed.step) == (caught.value.what, caught.value.fix, 4)


def test_a_skipped_step_changes_no_weight_no_moment_and_no_count() -> None:
    model = Decoder(MODEL)
    model.init_weights(torch.Generator().manual_seed(0))
    stepper = PoisonableStepper(model, config())
    stepper.step(0, FakeSource().batch(0, 0, 1).tokens)
    before = take_arrays(model, stepper.optimizer)
    guard = NonFiniteGuard(NonFiniteConfig(action="skip"))
    tokens = FakeSource().batch(1, 0, 1).tokens
    result = stepper.step(1, tokens, admits=lambda step, _, norm: guard.admits(step, NAN, norm))
    assert not result.is_applied
    after = take_arrays(model, stepper.optimizer)
    assert {name: a.tobytes() for name, a in before.items()} == {
        name: a.tobytes() for name, a in after.items()
    }
    assert stepper.step(2, tokens).is_applied


def test_a_run_goes_on_behind_skipped_steps_and_counts_them(tmp_path: Path) -> None:
    reporter = ListReporter()
    found, source = train(
        tmp_path, {0, 4, 5}, reporter, **{"non_finite.action": "skip", "log_every_steps": 1}
    )
    assert found.step == 12
    assert found.meta["skipped"]["count"] == 3
    assert found.arrays["optimizer.step.norm.weight"] == 9
    assert all(np.isfinite(array).all() for array in found.arrays.values())
    assert [poison.step for poison in reporter.skips] == [0, 4, 5]
    rows = {row.step: row for row in reporter.rows}
    # Step 4 is the fifth.
    assert [step for step, row in rows.items() if row.loss is None] == [1, 5, 6]
    assert all(math.isfinite(row.grad_norm) for row in reporter.rows)
    assert [rows[step].skipped_steps for step in (1, 4, 5, 6, 12)] == [1, 1, 2, 3, 3]
    log = SampleLog(Storage(tmp_path), "r").chain(found.samples)
    assert (audit(log, [10_000]).samples, audit(log, [10_000]).is_exact) == (48, True)
    assert source.asked == list(range(12))


def test_too_many_in_a_row_end_the_run_and_are_all_named(tmp_path: Path) -> None:
    changes = {"non_finite.action": "skip", "non_finite.max_steps": 2}
    with pytest.raises(NonFiniteLossError, match="3 steps in a row are not finite") as caught:
        train(tmp_path, {1, 2, 4, 5, 6, 7}, ListReporter(), **changes)
    for step in (4, 5, 6):
        assert f"the loss nan at step {step}" in str(caught.value)
    assert "max_steps = 2" in str(caught.value)


def test_a_rewind_goes_on_from_the_newest_snapshot_and_skips_the_step(tmp_path: Path) -> None:
    reporter, skipping = ListReporter(), ListReporter()
    found, source = train(tmp_path / "a", {4}, reporter, **{"non_finite.action": "rewind"})
    # A snapshot was taken after three steps.
    assert source.asked == [0, 1, 2, 3, 4, 3, 4, *range(5, 12)]
    assert [(p.step, to) for p, to in reporter.rewinds_to.items()] == [(4, 3)]
    assert [poison.step for poison in reporter.skips] == [4]
    other, _ = train(tmp_path / "b", {4}, skipping, **{"non_finite.action": "skip"})
    for name, array in other.arrays.items():
        assert np.array_equal(array, found.arrays[name]), name
    log = SampleLog(Storage(tmp_path / "a"), "r").chain(found.samples)
    assert audit(log, [10_000]).is_exact


def test_without_a_snapshot_a_rewind_goes_to_the_beginning(tmp_path: Path) -> None:
    _, source = train(tmp_path, {1}, ListReporter(), **{"non_finite.action": "rewind"})
    assert source.asked == [0, 1, 0, 1, *range(2, 12)]


def test_a_step_that_was_rewound_is_skipped_although_it_is_finite_now() -> None:
    guard = NonFiniteGuard(NonFiniteConfig(action="rewind"))
    with pytest.raises(RewindError):
        guard.admits(7, 1.0, math.inf)
    assert guard.admits(6, 1.0, 1.0)
    assert not guard.admits(7, 1.0, 1.0)
    assert guard.skipped_at(7) == Poison(7, "the gradient norm", math.inf)


def test_what_a_run_was_rewound_for_is_known_in_its_next_attempt(tmp_path: Path) -> None:
    reporter = ListReporter()
    reporter.rewinds_to[Poison(4, "the loss", NAN)] = 3
    _, source = train(tmp_path, {4}, reporter, **{"non_finite.action": "rewind"})
    assert source.asked == list(range(12))


def test_a_rewind_that_would_be_followed_by_too_many_skips_ends_the_run() -> None:
    guard = NonFiniteGuard(NonFiniteConfig(action="rewind", max_steps=1))
    guard.remember([Poison(3, "the loss", NAN).listed()])
    assert not guard.admits(3, NAN, NAN)
    with pytest.raises(NonFiniteLossError, match="2 steps in a row"):
        guard.admits(4, NAN, NAN)


def test_the_guards_state_survives_json() -> None:
    guard = NonFiniteGuard(NonFiniteConfig(action="skip"))
    guard.admits(3, 1.0, -math.inf)
    other = NonFiniteGuard(NonFiniteConfig(action="skip"))
    other.load_state(json.loads(json.dumps(guard.state(), allow_nan=False)))
    assert (other.count, other.skipped_at(3)) == (1, Poison(3, "the gradient norm", -math.inf))
    other.load_state(None)
    assert (other.count, other.skipped_at(3)) == (0, None)


def test_the_record_names_each_such_step_once_whatever_restarts(tmp_path: Path) -> None:
    runs = RunStore(Storage(tmp_path))
    run_id = runs.create("r", "train", {})
    poison = Poison(7, "the loss", NAN)
    for _ in range(2):
        recorder = RunRecorder(runs, run_id)
        recorder.rewound(poison, 5)
        recorder.skipped(poison)
    told = [{k: v for k, v in e.items() if k != "time_s"} for e in runs.events(run_id)]
    known = {"attempt": 0, "step": 7, "what": "the loss", "value": "nan"}
    assert told == [
        {**known, "event": "rewound", "from_step": 7, "to_step": 5},
        {**known, "event": "batch_skipped"},
    ]
    assert [each.listed() for each in recorder.rewinds()] == [poison.listed()]
