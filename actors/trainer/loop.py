"""The loop of one training worker: batches in, optimizer steps, snapshots and figures out.

It knows neither Ray nor how its seams are reached, so it runs as well inside a sweep's trial or a
test as on many machines. Life of a step: docs/architecture.md#life-of-a-training-step.
    W = ranks, B = sequences of one rank in the global batch, T = tokens per sequence.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from eagleray.actors.checkpoint.interval import SnapshotPace
from eagleray.actors.checkpoint.snapshot import Snapshotter, load_arrays
from eagleray.actors.checkpoint.state import Checkpoint, Snapshot
from eagleray.actors.data.mixer import Mixer, MixerSpec
from eagleray.actors.data.mixture import Mixture
from eagleray.actors.data.order import domains_of
from eagleray.actors.trainer.step_row import StepRow
from eagleray.actors.trainer.stepper import NonFiniteLossError, Stepper
from eagleray.platform.config import TrainConfig
from eagleray.platform.errors import ServiceError
from eagleray.platform.model.config import DecoderConfig
from eagleray.platform.model.decoder import Decoder

_PEAK_SIZE = 768
_PEAK_ROUNDS = 12
_MAX_SEED = 2**63


class RankBatch(Protocol):
    """This rank's part of one global batch."""

    @property
    def ids(self) -> np.ndarray:
        """int64 [B]."""

    @property
    def tokens(self) -> np.ndarray:
        """int32 [B, T + 1]."""


class BatchSource(Protocol):
    """Hands out batches; any step may be asked for, in any order, and answers alike each time."""

    def batch(self, step: int, rank: int, world_size: int, mixture: Mixture | None) -> RankBatch:
        """This rank's part of a step's global batch, drawn by `mixture` if there is one."""

    def eval_batch(self, index: int) -> np.ndarray:
        """Held-out tokens int32 [B, T + 1]; the same for the same index."""


class SnapshotSink(Protocol):
    """Takes snapshots, and gives back the newest complete one."""

    def begin(self, attempt: int) -> Checkpoint | None:
        """The state to go on from."""

    def submit(self, snapshot: Snapshot) -> None:
        """Take this rank's part; may return before it is kept."""

    def flush(self) -> None:
        """Return when the newest state, submitted or given by `begin`, is on storage."""


class Reporter(Protocol):
    """Hears what a worker does."""

    def begin(self, rank: int, world_size: int) -> int:
        """Rank 0 starts an attempt; its number, from 1."""

    def join(self, attempt: int, rank: int) -> None:
        """Every rank takes part in the attempt."""

    def report(self, row: StepRow) -> str | None:
        """Take one row of figures; a reason if training is to stop after this step."""


@dataclass(frozen=True)
class Seat:
    """Which worker of how many this is."""

    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True)
class LoopSpec:
    """What to train."""

    train: TrainConfig
    model: DecoderConfig
    seq_len: int
    mixer: MixerSpec | None = None
    """What decides the domains' weights on the way; None: they are known beforehand."""


@dataclass
class _Window:
    """Sums since the last row."""

    started: float
    steps: int = 0
    loss_sum: float = 0.0
    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def run_loop(
    seat: Seat,
    spec: LoopSpec,
    source: BatchSource,
    sink: SnapshotSink,
    reporter: Reporter,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Train from the newest complete snapshot to the last step.

    Every rank of the group calls it; with more than one, the default process group must exist.

    Returns:
        The number of steps that the final weights have seen.

    Raises:
        NonFiniteLossError: A loss or gradient is not finite.
        ServiceError: The ranks were given different states to go on from.
    """
    train = spec.train
    torch.set_num_threads(train.threads_per_worker)
    model = Decoder(spec.model)
    model.init_weights(torch.Generator().manual_seed(train.seed))
    model.to(train.device)
    stepper = Stepper(model, train, seat.world_size, clock)
    snapshotter = Snapshotter(model, stepper.optimizer, sink, has_state=seat.rank == 0)
    stepper.before_update = snapshotter.join
    peak = _over_ranks([measure_peak_flops(train.device)], seat)[0]

    attempt = reporter.begin(seat.rank, seat.world_size) if seat.rank == 0 else 0
    attempt = _from_rank_zero(attempt, seat)
    reporter.join(attempt, seat.rank)
    restored = sink.begin(attempt)
    start = restored.step if restored else 0
    _agree(start, seat)
    # The stream of a rank depends on nothing but the seed and the rank, at a resize too.
    torch.manual_seed((train.seed * 1_000_003 + seat.rank) % _MAX_SEED)
    if restored:
        _restore(restored, seat, model, stepper)
    mixer = _mixer(spec, restored, seat)
    pace = SnapshotPace(train.checkpoint, start, clock)

    samples: list[np.ndarray] = []
    first_step = start
    evaluated: dict[int, float] = {}  # step -> held-out loss
    window = _Window(clock())
    # What the mixer decided since the last row, and by which losses.
    decided: tuple[dict[str, float] | None, dict[str, float | None] | None] = (None, None)
    for step in range(start, train.steps):
        asked = clock()
        mixture = mixer.mixture.since(step * train.batch_size) if mixer else None
        batch = source.batch(step, seat.rank, seat.world_size, mixture)
        window.add("data", clock() - asked)
        result = stepper.step(step, batch.tokens, wants_losses=mixer is not None)
        samples.append(batch.ids)
        if mixer and result.loss_B is not None:
            mixer.add(domains_of(batch.ids, mixer.sizes), result.loss_B, spec.seq_len)
        window.steps += 1
        window.loss_sum += result.loss_sum
        window.tokens += result.tokens
        window.add("compute", result.compute_s)
        window.add("communication", result.communication_s)
        window.add("checkpoint", result.before_update_s)
        done = step + 1
        is_last = done == train.steps
        if mixer and mixer.is_due(done):
            _decide(mixer, seat)
            decided = mixer.weights, mixer.losses
        if is_last or done % train.eval.every_steps == 0:
            begun = clock()
            evaluated[done] = _evaluate(stepper, source, train.eval.num_batches, seat)
            window.add("eval", clock() - begun)
            # A figure that is no number can neither be recorded nor compared.
            if not math.isfinite(evaluated[done]):
                raise NonFiniteLossError(step, "the held-out loss", evaluated[done])
        stop = None
        if is_last or done in evaluated or done % train.log_every_steps == 0:
            loss_sum, tokens = _over_ranks([window.loss_sum, float(window.tokens)], seat)
            elapsed = clock() - window.started
            # Evaluation and checkpoints count as time that trained nothing.
            flops = spec.model.flops_per_token(spec.seq_len) * tokens
            row = StepRow(
                attempt, done, loss_sum / tokens, result.grad_norm, result.lr, tokens / elapsed,
                flops / elapsed / peak, **_seconds(window),
                eval_loss=evaluated.get(done), weights=decided[0], domain_losses=decided[1],
            )  # fmt: skip
            stop = reporter.report(row) if seat.rank == 0 else None
            is_last = is_last or bool(_from_rank_zero(int(stop is not None), seat))
            window, decided = _Window(clock()), (None, None)
        if is_last or pace.is_due(done):
            begun = clock()
            arrays = {_rng_name(seat.rank): torch.get_rng_state().numpy().copy()}
            meta: dict[str, Any] = {"eval_loss": evaluated[done]} if done in evaluated else {}
            if mixer:
                _gather(mixer, seat)
                meta["mixer"] = mixer.state()
            snapshotter.begin(
                Snapshot(
                    done,
                    attempt,
                    seat.rank,
                    seat.world_size,
                    arrays,
                    np.stack(samples),
                    first_step,
                    meta,
                )
            )
            samples, first_step = [], done
            if pace.is_auto:
                proposed = pace.propose(done, snapshotter.cost_s)
                pace.follow(done, _from_rank_zero(proposed, seat))
            window.add("checkpoint", clock() - begun)
        if is_last:
            snapshotter.join()
            sink.flush()
            return done
    # The attempt before died after its last step: its state may be in the store's memory alone.
    sink.flush()
    return start


def _mixer(spec: LoopSpec, restored: Checkpoint | None, seat: Seat) -> Mixer | None:
    if spec.mixer is None:
        return None
    mixer = Mixer(spec.mixer, spec.train.batch_size)
    if restored:
        mixer.load_state(restored.meta["mixer"], is_first=seat.rank == 0)
    return mixer


def _decide(mixer: Mixer, seat: Seat) -> None:
    """Let rank 0 choose the next weights from the losses of all ranks, and tell the others."""
    sums = _sums_over_ranks(mixer.sums(), seat)
    quotas = [0] * len(mixer.sizes)
    if seat.rank == 0:
        mixer.decide(sums)
        quotas = mixer.quotas()
    # The others add zeros.
    mixer.apply(_sums_over_ranks(np.array(quotas, dtype=np.int64), seat).tolist())


def _gather(mixer: Mixer, seat: Seat) -> None:
    """Bring the sums of an interval that goes on to rank 0, whose state is saved."""
    sums = _sums_over_ranks(mixer.sums(), seat)
    if seat.rank == 0:
        mixer.keep(sums)


def _sums_over_ranks(sums: np.ndarray, seat: Seat) -> np.ndarray:
    if seat.world_size == 1:
        return sums
    tensor = torch.from_numpy(sums).to(_group_device())
    dist.all_reduce(tensor)
    summed: np.ndarray = tensor.cpu().numpy()
    return summed


def measure_peak_flops(device: str, clock: Callable[[], float] = time.perf_counter) -> float:
    """FLOP/s of a plain fp32 matrix product on the threads training uses: the yardstick of MFU."""
    a = torch.ones(_PEAK_SIZE, _PEAK_SIZE, device=device)
    best = float("inf")
    for _ in range(_PEAK_ROUNDS):
        begun = clock()
        float((a @ a)[0, 0].item())  # item() waits for the device
        best = min(best, clock() - begun)
    return 2 * float(_PEAK_SIZE) ** 3 / best


def _agree(start: int, seat: Seat) -> None:
    """Refuse to train from states of different steps, as from a store that died between ranks."""
    lead = _from_rank_zero(start, seat)
    if lead != start:
        raise ServiceError(
            f"rank {seat.rank} was given the state after step {start}, rank 0 that after {lead}: "
            f"the checkpoint store was restarted in between",
            "the next attempt starts from one state",
        )


def _restore(checkpoint: Checkpoint, seat: Seat, model: Decoder, stepper: Stepper) -> None:
    load_arrays(checkpoint.arrays, model, stepper.optimizer)
    state = checkpoint.arrays.get(_rng_name(seat.rank))
    if state is not None and checkpoint.meta.get("world_size") == seat.world_size:
        torch.set_rng_state(torch.from_numpy(np.array(state, copy=True)))


def _evaluate(stepper: Stepper, source: BatchSource, num_batches: int, seat: Seat) -> float:
    total, count = 0.0, 0
    for index in range(seat.rank, num_batches, seat.world_size):
        loss_sum, tokens = stepper.evaluate(source.eval_batch(index))
        total, count = total + loss_sum, count + tokens
    total, tokens_seen = _over_ranks([total, float(count)], seat)
    return total / tokens_seen


def _over_ranks(values: list[float], seat: Seat) -> list[float]:
    if seat.world_size == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=_group_device())
    dist.all_reduce(tensor)
    summed: list[float] = tensor.tolist()
    return summed


def _from_rank_zero(value: int, seat: Seat) -> int:
    if seat.world_size == 1:
        return value
    tensor = torch.tensor([value], dtype=torch.int64, device=_group_device())
    dist.broadcast(tensor, src=0)
    return int(tensor.item())


def _group_device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def _seconds(window: _Window) -> dict[str, float]:
    names = ("data", "compute", "communication", "checkpoint", "eval")
    return {f"{name}_s": window.seconds.get(name, 0.0) for name in names}


def _rng_name(rank: int) -> str:
    return f"rng.{rank}.cpu"
