"""The training loop without Ray: exact resume, figures, stops."""

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from eagleray.actors.checkpoint.samples import SampleLog, audit
from eagleray.actors.checkpoint.state import Checkpoint, Snapshot
from eagleray.actors.checkpoint.store import CheckpointStore
from eagleray.actors.data.mixer import MixerSpec
from eagleray.actors.data.mixture import Mixture
from eagleray.actors.data.order import mixed_batch_ids
from eagleray.actors.trainer.loop import run_loop
from eagleray.actors.trainer.non_finite import NonFiniteLossError, Poison
from eagleray.actors.trainer.recorder import Fatal, RunRecorder, WorkerInfo
from eagleray.actors.trainer.schedule import learning_rate
from eagleray.actors.trainer.seams import LoopSpec, Seat
from eagleray.actors.trainer.step_row import StepRow
from eagleray.actors.trainer.stepper import Stepper, make_optimizer
from eagleray.platform.config import (
    AdamWConfig,
    BanditMixtureConfig,
    CheckpointConfig,
    ProjectConfig,
    ScheduleConfig,
    TrainConfig,
    with_overrides,
)
from eagleray.platform.model.config import DecoderConfig
from eagleray.platform.model.decoder import Decoder
from eagleray.platform.runs import RunStatus, RunStore
from eagleray.platform.storage import Storage

MODEL = DecoderConfig(
    vocab_size=50, dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, ffn_dim=32,
    max_seq_len=16,
)  # fmt: skip
SEQ_LEN = 8


@dataclass(frozen=True)
class FakeBatch:
    ids: np.ndarray
    tokens: np.ndarray


class FakeSource:
    """Tokens that count upwards, so that there is something to learn."""

    def __init__(self, batch_size: int = 4) -> None:
        self._batch_size = batch_size

    def batch(
        self, step: int, rank: int, world_size: int, mixture: Mixture | None = None
    ) -> FakeBatch:
        ids = np.arange(step * self._batch_size, (step + 1) * self._batch_size)
        tokens = (ids[:, None] + np.arange(SEQ_LEN + 1)) % 50
        return FakeBatch(ids, tokens.astype(np.int32))

    def eval_batch(self, index: int) -> np.ndarray:
        return self.batch(index + 1000, 0, 1).tokens


@dataclass
class StoreSink:
    """The real store without an actor around it."""

    store: CheckpointStore
    killed_at: int | None = None
    flushed: int = 0

    def begin(self, attempt: int) -> Checkpoint | None:
        return self.store.begin(attempt)

    def renew(self, attempt: int) -> int:
        return self.store.renew(attempt)

    def submit(self, snapshot: Snapshot) -> int:
        if self.killed_at is not None and snapshot.step >= self.killed_at:
            raise KeyboardInterrupt
        return self.store.submit(snapshot)

    def settle(self) -> None:
        """Parts are taken at once."""

    def flush(self) -> None:
        self.store.flush()
        self.flushed += 1


@dataclass
class ListReporter:
    rows: list[StepRow] = field(default_factory=list)
    attempts: int = 0
    stop_at: int | None = None
    skips: list[Poison] = field(default_factory=list)
    rewinds_to: dict[Poison, int] = field(default_factory=dict)

    def begin(self, rank: int, world_size: int) -> int:
        self.attempts += 1
        return self.attempts

    def join(self, attempt: int, rank: int) -> None:
        assert (attempt, rank) == (self.attempts, 0)

    def started(self, attempt: int, step: int) -> None:
        """Nobody asks."""

    def skipped(self, poison: Poison) -> None:
        self.skips.append(poison)

    def rewound(self, poison: Poison, to_step: int) -> None:
        self.rewinds_to[poison] = to_step

    def rewinds(self) -> list[Poison]:
        return list(self.rewinds_to)

    def report(self, row: StepRow) -> str | None:
        self.rows.append(row)
        return "enough" if row.step == self.stop_at else None


def config(**changes: object) -> TrainConfig:
    base = {
        "train.steps": 12, "train.batch_size": 4, "train.micro_batch_size": 4,
        "train.schedule.warmup_steps": 2, "train.checkpoint.every_steps": 3,
        "train.eval.every_steps": 6, "train.log_every_steps": 2, "train.optimizer.lr": 0.01,
    }  # fmt: skip
    changed = {f"train.{key}": value for key, value in changes.items()}
    return with_overrides(ProjectConfig(name="t"), {**base, **changed}).train


def train(
    storage: Storage,
    run_id: str,
    reporter: ListReporter,
    killed_at: int | None = None,
    **changes: object,
) -> Checkpoint:
    store = CheckpointStore(storage, run_id, CheckpointConfig())
    spec = LoopSpec(config(**changes), MODEL, SEQ_LEN)
    run_loop(Seat(), spec, FakeSource(), StoreSink(store, killed_at), reporter)
    found = store.begin(99)
    assert found is not None
    return found


def test_a_killed_and_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    whole_rows, parts_rows = ListReporter(), ListReporter()
    whole = train(storage, "whole", whole_rows)
    # A resume of a resume: the first misses the snapshot at 6, the second that at 9.
    for killed_at in (6, 9):
        with pytest.raises(KeyboardInterrupt):
            train(storage, "parts", parts_rows, killed_at)
    parts = train(storage, "parts", parts_rows)
    assert parts.step == whole.step == 12
    assert parts.arrays.keys() == whole.arrays.keys()
    for name, array in whole.arrays.items():
        assert np.array_equal(array, parts.arrays[name]), name
    last = {row.step: (row.loss, row.lr, row.grad_norm) for row in parts_rows.rows}
    # A row that spans the restart covers fewer steps; those after it must agree exactly.
    for row in whole_rows.rows:
        if row.step >= 10:
            assert last[row.step] == (row.loss, row.lr, row.grad_norm)
    result = audit(SampleLog(storage, "parts").chain(parts.samples), [10_000])
    assert (result.steps, result.samples, result.is_exact) == (12, 48, True)


def test_snapshots_as_often_as_pays_change_neither_bits_nor_samples(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    changes = {"steps": 14, "checkpoint.mtbf_s": 1e-9, "checkpoint.overhead_budget": 0.99}
    fixed = train(storage, "fixed", ListReporter(), **changes)
    auto = train(storage, "auto", ListReporter(), **{**changes, "checkpoint.every_steps": "auto"})
    for name, array in fixed.arrays.items():
        assert np.array_equal(array, auto.arrays[name]), name
    segments = SampleLog(storage, "auto").chain(auto.samples)
    assert [segment.first_step for segment in segments] == [0, 10]
    assert audit(segments, [10_000]).is_exact


def test_training_learns_and_its_rows_add_up(tmp_path: Path) -> None:
    reporter = ListReporter()
    found = train(Storage(tmp_path), "r", reporter, steps=60)
    first, last = reporter.rows[0], reporter.rows[-1]
    assert last.loss < first.loss * 0.8
    assert last.step == 60
    assert last.mfu > 0
    assert last.compute_s > 0
    assert last.eval_loss is not None
    assert found.meta["eval_loss"] == last.eval_loss
    evaluated = [row.step for row in reporter.rows if row.eval_loss is not None]
    assert evaluated == list(range(6, 61, 6))


def test_a_stop_leaves_a_checkpoint_at_that_step(tmp_path: Path) -> None:
    reporter = ListReporter(stop_at=4)
    found = train(Storage(tmp_path), "r", reporter)
    assert found.step == 4
    assert reporter.rows[-1].step == 4


def test_a_state_of_the_last_step_is_flushed_before_the_run_ends(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    train(storage, "r", ListReporter())
    sink, reporter = StoreSink(CheckpointStore(storage, "r", CheckpointConfig())), ListReporter()
    assert run_loop(Seat(), LoopSpec(config(), MODEL, SEQ_LEN), FakeSource(), sink, reporter) == 12
    assert sink.flushed == 1
    assert reporter.rows == []


def test_a_held_out_loss_that_is_no_number_is_neither_reported_nor_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stepper, "evaluate", lambda *_: (math.inf, 8))
    reporter = ListReporter()
    with pytest.raises(NonFiniteLossError, match="held-out loss is inf at step 5"):
        train(Storage(tmp_path), "r", reporter)
    assert [row.step for row in reporter.rows] == [2, 4]


def test_any_seed_that_the_configuration_takes_trains(tmp_path: Path) -> None:
    assert train(Storage(tmp_path), "r", ListReporter(), steps=2, seed=2**63 - 1).step == 2


def test_accumulation_equals_the_whole_batch() -> None:
    tokens = FakeSource().batch(0, 0, 1).tokens
    results = []
    for micro in (4, 2, 1):
        model = Decoder(MODEL)
        model.init_weights(torch.Generator().manual_seed(0))
        stepper = Stepper(model, config(micro_batch_size=micro))
        result = stepper.step(0, tokens)
        results.append((result.loss_sum, result.grad_norm, next(model.parameters()).clone()))
    for loss, norm, weights in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-5)
        assert norm == pytest.approx(results[0][1], rel=1e-4)
        assert torch.allclose(weights, results[0][2], atol=1e-5)


def test_a_poisoned_gradient_stops_before_the_update() -> None:
    model = Decoder(MODEL)
    model.init_weights(torch.Generator().manual_seed(0))
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(NonFiniteLossError, match="at step 3"):
        Stepper(model, config()).step(3, FakeSource().batch(3, 0, 1).tokens)
    for one, two in zip(before, model.parameters(), strict=True):
        assert torch.equal(one.nan_to_num(), two.nan_to_num())


def test_bf16_trains_close_to_fp32() -> None:
    tokens = FakeSource().batch(0, 0, 1).tokens
    losses = []
    for precision in ("fp32", "bf16"):
        model = Decoder(MODEL)
        model.init_weights(torch.Generator().manual_seed(0))
        losses.append(Stepper(model, config(precision=precision)).step(0, tokens).loss_sum)
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert losses[1] != losses[0]


def test_norms_do_not_decay() -> None:
    groups = make_optimizer(Decoder(MODEL), AdamWConfig(weight_decay=0.3)).param_groups
    decays = {
        parameter.ndim: group["weight_decay"] for group in groups for parameter in group["params"]
    }
    assert decays == {1: 0.0, 2: 0.3}


@pytest.mark.parametrize(("step", "share"), [(0, 0.25), (3, 1.0), (4, 1.0), (9, 0.1)])
def test_the_rate_warms_up_and_falls_to_its_floor(step: int, share: float) -> None:
    schedule = ScheduleConfig(warmup_steps=4, min_lr_ratio=0.1)
    assert learning_rate(step, 10, 2.0, schedule) == pytest.approx(2.0 * share)


def test_without_a_number_a_tenth_of_the_steps_warms_up() -> None:
    assert learning_rate(19, 200, 1.0, ScheduleConfig()) == pytest.approx(1.0)
    assert learning_rate(9, 200, 1.0, ScheduleConfig()) == pytest.approx(0.5)


def test_the_rate_is_halfway_in_the_middle() -> None:
    schedule = ScheduleConfig(warmup_steps=0, min_lr_ratio=0.0)
    assert learning_rate(50, 101, 1.0, schedule) == pytest.approx(0.5)
    assert math.isclose(learning_rate(0, 1, 1.0, schedule), 1.0)


def row(attempt: int, step: int) -> StepRow:
    return StepRow(attempt, step, 1.0, 1.0, 0.1, 10.0, 0.5, 0, 0, 0, 0, 0)


def test_the_recorder_numbers_attempts_through_its_own_restart(tmp_path: Path) -> None:
    runs = RunStore(Storage(tmp_path))
    run_id = runs.create("r", "train", {}, steps=10)
    recorder = RunRecorder(runs, run_id, clock=lambda: 7.0)
    assert recorder.begin(2, "a") == recorder.begin(2, "a") == 1
    recorder.join(1, WorkerInfo(1, 11, "h", "n"))
    recorder.join(1, WorkerInfo(0, 10, "h", "n"))
    recorder.join(0, WorkerInfo(0, 9, "h", "n"))
    recorder.report(row(1, 2))
    recorder.report(row(1, 2))  # asked again, since the answer was lost
    view = recorder.view(0)
    assert [worker.pid for worker in view.workers] == [10, 11]
    assert [r.step for r in view.rows] == [2]
    assert recorder.view(1).rows == ()
    assert view.first_row_at == {1: 7.0}
    assert runs.state(run_id).status is RunStatus.RUNNING
    assert runs.state(run_id).step == 2

    restarted = RunRecorder(runs, run_id)
    assert restarted.view(0).rows == view.rows
    assert restarted.view(0).first_row_at == {1: 7.0}
    assert restarted.begin(2, "a") == 1
    assert restarted.begin(2, "b") == 2
    restarted.report(row(1, 4))  # from a worker that does not know yet that it is dead
    assert restarted.view(1).rows == ()
    events = [event["event"] for event in runs.events(run_id)]
    assert events == ["attempt", "worker", "worker", "attempt"]


def test_the_first_fatal_failure_counts_and_reaches_every_worker(tmp_path: Path) -> None:
    runs = RunStore(Storage(tmp_path))
    run_id = runs.create("r", "train", {})
    recorder = RunRecorder(runs, run_id)
    recorder.begin(1, "a")
    first = Fatal("DataError", "shard 3 is gone", "rebuild", 2)
    recorder.fail(first)
    recorder.fail(Fatal("Other", "later", "", 1))
    assert recorder.fatal() == first
    assert recorder.view(0).fatal == first
    recorder.request_stop("user")
    assert recorder.report(row(1, 1)) == "user"
    recorder.fault("rank 1: gone", [1])
    recorder.event("note", {"a": 1})
    assert [e["event"] for e in runs.events(run_id)] == ["attempt", "fatal", "fault", "note"]


class MixedSource(FakeSource):
    """Two domains, the second with tokens that cannot be guessed; notes what was drawn."""

    SIZES = (60, 40)

    def __init__(self) -> None:
        super().__init__()
        self.drawn: dict[int, list[int]] = {}

    def batch(
        self, step: int, rank: int, world_size: int, mixture: Mixture | None = None
    ) -> FakeBatch:
        assert mixture is not None
        ids = mixed_batch_ids(3, self.SIZES, mixture, step, 4)
        self.drawn[step] = ids.tolist()
        tokens = (ids[:, None] + np.arange(SEQ_LEN + 1)) % 50
        noise = np.random.default_rng(ids[0]).integers(0, 50, tokens.shape)
        tokens = np.where(ids[:, None] < self.SIZES[0], tokens, noise)
        return FakeBatch(ids, tokens.astype(np.int32))

    def eval_batch(self, index: int) -> np.ndarray:
        return FakeSource().eval_batch(index)


def mixed(
    storage: Storage, run_id: str, source: MixedSource, killed_at: int | None = None
) -> tuple[Checkpoint, ListReporter]:
    store, reporter = CheckpointStore(storage, run_id, CheckpointConfig()), ListReporter()
    mixture = BanditMixtureConfig(kind="bandit", every_steps=4, decay=0.5, temperature=0.01)
    spec = LoopSpec(
        config(steps=40), MODEL, SEQ_LEN, MixerSpec(mixture, ("plain", "noise"), source.SIZES)
    )
    run_loop(Seat(), spec, source, StoreSink(store, killed_at), reporter)
    found = store.begin(99)
    assert found is not None
    return found, reporter


def test_a_mixture_that_follows_the_losses_is_replayed_exactly_after_a_kill(tmp_path: Path) -> None:
    whole_source, source = MixedSource(), MixedSource()
    whole, reporter = mixed(Storage(tmp_path), "whole", whole_source)
    weights = [row.weights["noise"] for row in reporter.rows if row.weights]
    assert weights[-1] > 0.5
    # Snapshots come every 3 steps, decisions every 4: each resume is inside an interval.
    for killed_at in (6, 21, 30):
        with pytest.raises(KeyboardInterrupt):
            mixed(Storage(tmp_path), "parts", source, killed_at)
    parts, _ = mixed(Storage(tmp_path), "parts", source)
    assert source.drawn == whole_source.drawn
    assert parts.meta["mixer"] == whole.meta["mixer"]
    for name, array in whole.arrays.items():
        assert np.array_equal(array, parts.arrays[name]), name
    found = audit(SampleLog(Storage(tmp_path), "parts").chain(parts.samples), MixedSource.SIZES)
    assert found.is_exact
