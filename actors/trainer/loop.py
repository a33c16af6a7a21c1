"""The loop of one training worker: batches in, optimizer steps, snapshots and figures out.

It knows neither Ray nor how its seams are reached, so it runs as well inside a sweep's trial or a
test as on many machines. Life of a step: docs/architecture.md#life-of-a-training-step.
    W = ranks, B = sequences of one rank in the global batch, T = tokens per sequence.

A step is *applied* when the optimizer has changed the weights, and *settled* when all that is due
after it has been done: the mixture's decision, evaluation, figures, snapshot. A lost peer is met
inside a collective, so what a rank holds then is the state after its last applied step, whole; its
ranks come together again at the newest state that any of them holds, and settle it once more. All
that is due can therefore be done twice, or begun and not ended, without a trace.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from eagleray.actors.checkpoint.interval import SnapshotPace
from eagleray.actors.checkpoint.snapshot import Snapshotter, load_arrays, optimizer_tensors
from eagleray.actors.checkpoint.state import Checkpoint, Snapshot
from eagleray.actors.data.mixer import Mixer
from eagleray.actors.trainer.collectives import Collectives, agree_on
from eagleray.actors.trainer.held_out import held_out_loss
from eagleray.actors.trainer.journal import Entry, StepJournal
from eagleray.actors.trainer.non_finite import NonFiniteGuard, Poison, RewindError
from eagleray.actors.trainer.peak import measure_peak_flops
from eagleray.actors.trainer.random_state import (
    begin_stream,
    restore_bytes,
    restore_stream,
    stream_array,
    stream_bytes,
)
from eagleray.actors.trainer.schedule import learning_rate
from eagleray.actors.trainer.seams import (
    BatchSource,
    Bond,
    LoopSpec,
    Reporter,
    Seat,
    SnapshotSink,
    Standing,
)
from eagleray.actors.trainer.step_row import StepRow
from eagleray.actors.trainer.stepper import Losses, Stepper
from eagleray.actors.trainer.window import Gain, Window, gained_sums, noted_sums
from eagleray.platform.errors import EagleRayError
from eagleray.platform.model.decoder import Decoder


class PausedError(RuntimeError):
    """All ranks have paused after the same step, and the store has its snapshot."""


class StateLostError(RuntimeError):
    """What a dead rank alone knew is gone: the ranks go on from a snapshot."""


def run_loop(
    seat: Seat,
    spec: LoopSpec,
    source: BatchSource,
    sink: SnapshotSink,
    reporter: Reporter,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Train from the newest complete snapshot to the last step; see `RankTrainer.run`."""
    return RankTrainer(spec, clock).run(seat, source, sink, reporter)


class RankTrainer:
    """One rank's training. Its state stays between runs, until another snapshot is taken up.

    Args:
        spec: What to train.
        clock: Seconds.
    """

    def __init__(self, spec: LoopSpec, clock: Callable[[], float] = time.perf_counter) -> None:
        self._spec, self._clock = spec, clock
        train = spec.train
        torch.set_num_threads(train.threads_per_worker)
        self._model = Decoder(spec.model).to(train.device)
        self._stepper = Stepper(self._model, train, 1, clock)
        self._own_peak = measure_peak_flops(train.device, clock)
        self._is_pausing = False
        self._journal: StepJournal | None = None
        self._seat, self._attempt, self._peak = Seat(), 0, 0.0
        self._peers = Collectives(self._seat)
        self._is_whole = self.is_noted = False
        self._guard = NonFiniteGuard(train.non_finite)
        self._snapshotter: Snapshotter | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        fresh = Decoder(self._spec.model)
        fresh.init_weights(torch.Generator().manual_seed(self._spec.train.seed))
        self._model.load_state_dict(fresh.state_dict())
        self._forget()
        self._is_new = True

    def _forget(self) -> None:
        """All but the weights."""
        self._stepper.reset()
        self._mixer = (
            Mixer(self._spec.mixer, self._spec.train.batch_size) if self._spec.mixer else None
        )
        self._applied = self._settled = self._logged = self._first = 0
        self._ids: dict[int, np.ndarray] = {}  # step -> what was read, since the last snapshot
        self._guard.load_state(None)
        self._window = Window(self._clock())
        self._next_window: Window | None = None
        self._has_decided = False  # since the last row
        self._grad_norm = 0.0
        self._eval_loss: tuple[int, float] | None = None  # step, held-out loss
        self._pace = SnapshotPace(self._spec.train.checkpoint, 0, self._clock)

    def warm_up(self) -> None:
        """Take a step on nothing and forget it, so that the first real one loads nothing more."""
        train = self._spec.train
        rows = min(train.micro_batch_size, train.batch_size)
        tokens = np.zeros((rows, self._spec.seq_len + 1), dtype=np.int32)
        self._stepper.step(0, tokens)
        self._begin_anew()

    @property
    def has_stepped(self) -> bool:
        """Whether it has applied a step since it was last told to run."""
        return self._applied > self._first

    def abandon(self) -> None:
        """Its state may be half of a step's; another rank's, or a snapshot, takes its place."""
        self._is_whole = False

    @property
    def standing(self) -> Standing | None:
        """How far it has come, None if it holds no whole state; not while it runs."""
        if not self._is_whole:
            return None
        decisions = self._mixer.decisions if self._mixer else 0
        return Standing(self._applied, decisions, self._settled)

    def run(
        self,
        seat: Seat,
        source: BatchSource,
        sink: SnapshotSink,
        reporter: Reporter,
        bond: Bond | None = None,
        journal: StepJournal | None = None,
        inherited: Sequence[StepJournal] = (),
        tell: Callable[[str], None] = lambda phase: None,
        peers: Collectives | None = None,
        wants_pause: Callable[[], bool] = lambda: False,
    ) -> int:
        """Train to the last step.

        Every rank of the group calls it; with more than one, the default process group must exist.

        Args:
            seat: Of this rank.
            source: Of its batches.
            sink: Of its snapshots.
            reporter: Hears of figures.
            bond: How to go on without a snapshot; None: from the newest complete one.
            journal: Where to note what nobody else knows.
            inherited: Those of the processes that sat here and died, the last one first.
            tell: Hears `restored` and, after the first step, `stepped`.
            peers: The ranks; None: of the default process group.
            wants_pause: Asked in each step; if it holds on any rank, all pause after that step.

        Returns:
            The number of steps that the final weights have seen.

        Raises:
            NonFiniteLossError: A loss or gradient is not finite, and `train.non_finite` says so.
            ServiceError: The ranks were given different states to go on from.
            PeerLostError: Another rank is gone; run again, with what is left.
            PausedError: All ranks have paused.
            StateLostError: The bond cannot be made.
        """
        self._seat, self._journal = seat, journal
        self._peers = peers or Collectives(seat)
        self._stepper.span(seat.world_size, self._peers)
        self._snapshotter = Snapshotter(
            self._model, self._stepper.optimizer, sink, has_state=seat.rank == 0
        )
        self._stepper.before_update, self._stepper.wants_pause = self._snapshotter.join, wants_pause
        self._is_pausing = False
        attempt = reporter.begin(seat.rank, seat.world_size) if seat.rank == 0 else 0
        self._attempt = self._peers.from_rank_zero(attempt)
        reporter.join(self._attempt, seat.rank)
        if self._guard.rewinds:
            told = [each.listed() for each in reporter.rewinds()] if seat.rank == 0 else []
            self._guard.remember(self._peers.values_from(told, 0))
        if bond is None:
            self._take_up(sink.begin(self._attempt))
            self._peak = float(self._peers.sums(np.array([self._own_peak]))[0])
        else:
            newest = sink.renew(self._attempt) if seat.rank == 0 else 0
            known = [journal, *inherited] if journal else []
            self._rejoin(bond, known, self._peers.from_rank_zero(newest))
        self._note_start()
        if seat.rank == 0:
            reporter.started(self._attempt, self._applied)
        tell("restored")
        return self._train(source, sink, reporter, tell)

    def drop(self) -> None:
        """Forget the step that was interrupted, once the group is down."""
        self._stepper.drop()
        if self._snapshotter is not None:
            # What it copies must not change; whether it arrives, the next attempt asks the store.
            with contextlib.suppress(EagleRayError):
                self._snapshotter.join()

    def _train(
        self,
        source: BatchSource,
        sink: SnapshotSink,
        reporter: Reporter,
        tell: Callable[[str], None],
    ) -> int:
        first = self._first = self._applied
        is_over = self._settled < self._applied and self._settle(source, sink, reporter)
        while not is_over and self._applied < self._spec.train.steps:
            try:
                self._step(source)
            except RewindError as error:
                self._rewind(error.poison, sink, reporter)
                continue
            if self._applied == first + 1:
                tell("stepped")
            is_over = self._settle(source, sink, reporter)
            if self._is_pausing and not is_over:
                self._pause(sink)
        assert self._snapshotter is not None
        self._snapshotter.join()
        sink.settle()
        # A part that does not come would be waited for in vain.
        self._peers.from_rank_zero(0)
        # Also if nothing was left to do: the state may be in the store's memory alone.
        sink.flush()
        return self._applied

    def _step(self, source: BatchSource) -> None:
        step, seat, mixer = self._applied, self._seat, self._mixer
        if self._next_window is not None:
            self._window, self._next_window = self._next_window, None
            self._has_decided = False
        self._is_new = False
        asked = self._clock()
        mixture = mixer.mixture.since(step * self._spec.train.batch_size) if mixer else None
        batch = source.batch(step, seat.rank, seat.world_size, mixture)
        window = self._window.spent("data", self._clock() - asked)
        gain = Gain(0.0, 0)

        def note(losses: Losses) -> None:
            nonlocal gain
            sums = gained_sums(mixer, batch.ids, losses.loss_B, self._spec.seq_len)
            gain = Gain(losses.loss_sum, losses.tokens, sums)
            self._note(step + 1, window, gain, batch.ids)

        result = self._stepper.step(
            step, batch.tokens, note, wants_losses=mixer is not None, admits=self._guard.admits
        )
        self._applied, self._is_pausing = step + 1, result.is_pause
        self._ids[step] = batch.ids
        if result.is_applied:
            self._grad_norm = result.grad_norm
            window = window.plus(gain.loss_sum, gain.tokens)
            if mixer and gain.sums is not None:
                mixer.set_sums(mixer.sums() + gain.sums)
        window = window.spent("compute", result.compute_s)
        window = window.spent("communication", result.communication_s)
        self._window = window.spent("checkpoint", result.before_update_s)

    def _rewind(self, poison: Poison, sink: SnapshotSink, reporter: Reporter) -> None:
        """Go back to the newest complete snapshot, as all ranks do."""
        assert self._snapshotter is not None
        self._snapshotter.join()
        sink.settle()
        # What another rank has yet to hand in would complete a newer one.
        self._peers.sums(np.zeros(1))
        if self._journal is not None:
            self._journal.clear()
        self._take_up(sink.begin(self._attempt))
        self._note_start()
        if self._seat.rank == 0:
            reporter.rewound(poison, self._applied)

    def _settle(self, source: BatchSource, sink: SnapshotSink, reporter: Reporter) -> bool:
        """Do what is due after the last applied step; whether training ends with it."""
        done, seat, train = self._applied, self._seat, self._spec.train
        is_last = done == train.steps
        poison = self._guard.skipped_at(done - 1)
        if poison is not None and seat.rank == 0:
            reporter.skipped(poison)
        if self._mixer and self._mixer.decisions < self._mixer.decisions_due(done):
            self._decide(self._mixer)
        if self._is_eval_due(done) and not (self._eval_loss and self._eval_loss[0] == done):
            self._evaluate(source)
        if self._is_row_due(done):
            row = self._row()
            stop = reporter.report(row) if seat.rank == 0 else None
            is_last = bool(self._peers.from_rank_zero(int(stop is not None))) or is_last
            self._next_window = Window(self._clock())
        if (is_last or self._pace.is_due(done)) and self._logged < done:
            begun = self._clock()
            self._submit()
            # It counts as time that trained nothing.
            took = self._clock() - begun
            if self._next_window is not None:
                self._next_window = self._next_window.spent("checkpoint", took)
            else:
                self._window = self._window.spent("checkpoint", took)
        self._settled = done
        return is_last

    def _pause(self, sink: SnapshotSink) -> NoReturn:
        assert self._snapshotter is not None
        if self._logged < self._applied:
            self._submit()
        self._snapshotter.join()
        sink.settle()
        raise PausedError(f"paused after step {self._applied}")

    def _decide(self, mixer: Mixer) -> None:
        """Let rank 0 choose the next weights from the losses of all ranks, and tell the others."""
        sums = self._peers.sums(mixer.sums())
        mixer.apply(self._peers.array_from(mixer.decision(sums), 0))
        self._has_decided = True

    def _evaluate(self, source: BatchSource) -> None:
        begun, count = self._clock(), self._spec.train.eval.num_batches
        loss = held_out_loss(
            self._stepper, source, self._peers, self._seat, count, self._applied - 1
        )
        self._eval_loss = self._applied, loss
        self._window = self._window.spent("eval", self._clock() - begun)

    def _row(self) -> StepRow:
        train, window, mixer = self._spec.train, self._window, self._mixer
        done = self._applied
        sums = self._peers.sums(np.array([window.loss_sum, float(window.tokens)]))
        loss_sum, tokens = sums.tolist()
        elapsed = self._clock() - window.began
        flops = self._spec.model.flops_per_token(self._spec.seq_len) * tokens
        names = ("data", "compute", "communication", "checkpoint", "eval")
        seconds = {f"{name}_s": window.seconds.get(name, 0.0) for name in names}
        lr = learning_rate(done - 1, train.steps, train.optimizer.lr, train.schedule)
        loss = loss_sum / tokens if tokens else None
        return StepRow(
            self._attempt, done, loss, self._grad_norm, lr, tokens / elapsed,
            flops / elapsed / self._peak, **seconds, eval_loss=self._eval_loss_at(done),
            weights=mixer.weights if mixer and self._has_decided else None,
            domain_losses=mixer.losses if mixer and self._has_decided else None,
            skipped_steps=self._guard.count,
        )  # fmt: skip

    def _submit(self) -> None:
        done, seat, snapshotter = self._applied, self._seat, self._snapshotter
        assert snapshotter is not None
        arrays = stream_array(seat.rank)
        loss = self._eval_loss_at(done)
        meta: dict[str, Any] = {} if loss is None else {"eval_loss": loss}
        if self._mixer:
            meta["mixer"] = self._mixer.state(self._peers.sums(self._mixer.sums()))
        if self._guard.count:
            meta["skipped"] = self._guard.state()
        samples = np.stack([self._ids[step] for step in range(self._logged, done)])
        snapshotter.begin(
            Snapshot(
                done, self._attempt, seat.rank, seat.world_size, arrays, samples, self._logged, meta
            )
        )
        self._logged = done
        # Until its snapshot is on storage, a step may have to be handed in again.
        written = snapshotter.written
        self._ids = {step: ids for step, ids in self._ids.items() if step >= written}
        if self._pace.is_auto:
            proposed = self._pace.propose(done, snapshotter.cost_s)
            self._pace.follow(done, self._peers.from_rank_zero(proposed))

    def _take_up(self, checkpoint: Checkpoint | None) -> None:
        """Go on from a snapshot; from the beginning without one."""
        start = checkpoint.step if checkpoint else 0
        agree_on(start, self._peers, self._seat)
        self._is_whole = False
        if checkpoint is not None:
            self._forget()
        elif not self._is_new:
            self._begin_anew()
        # At a resize a rank's stream begins anew.
        begin_stream(self._spec.train.seed, self._seat.rank, start)
        self._window = Window(self._clock())
        self._pace = SnapshotPace(self._spec.train.checkpoint, start, self._clock)
        if checkpoint is not None:
            self._load(checkpoint)
        self._is_whole = True

    def _load(self, checkpoint: Checkpoint) -> None:
        rank = self._seat.rank
        self._is_new = False
        load_arrays(checkpoint.arrays, self._model, self._stepper.optimizer)
        if checkpoint.meta.get("world_size") == self._seat.world_size:
            restore_stream(checkpoint.arrays, rank)
        if self._mixer:
            self._mixer.load_state(checkpoint.meta["mixer"], is_first=rank == 0)
        self._guard.load_state(checkpoint.meta.get("skipped"))
        self._applied = self._settled = self._logged = checkpoint.step

    def _rejoin(self, bond: Bond, known: Sequence[StepJournal], newest: int) -> None:
        """Go on from the newest state that a rank holds.

        Args:
            bond: Which, and whose.
            known: The journals of who sat here.
            newest: Step of the newest complete snapshot.
        """
        found = ((journal.entry(bond.done), journal.ids(newest, bond.done)) for journal in known)
        entry, ids = next(((e, i) for e, i in found if e and i is not None), (None, None))
        is_lost = self._peers.sums(np.array([entry is None], dtype=np.int64))[0] > 0
        if is_lost or entry is None or ids is None:
            raise StateLostError(f"a dead rank's journal of step {bond.done} is gone")
        if self._applied != bond.done:
            # Until it holds all of the other's.
            self._is_whole = False
        self._is_new = False
        if not bond.done:
            self._begin_anew()
        elif bond.is_shared:
            self._peers.share(optimizer_tensors(self._model, self._stepper.optimizer), bond.source)
        common = self._peers.values_from(self._common(), bond.source)
        restore_bytes(entry.rng)
        self._applied, self._settled, self._logged = bond.done, bond.settled, newest
        self._ids = ids
        self._eval_loss = tuple(common["eval_loss"]) if common["eval_loss"] else None
        self._grad_norm, self._peak = common["grad_norm"], common["peak"]
        self._has_decided = common["has_decided"]
        self._pace.set_state(common["pace"])
        self._guard.load_state(common["skipped"])
        is_skipped = self._guard.skipped_at(bond.done - 1) is not None
        began = self._clock() - common["elapsed_s"]
        self._window = Window.noted(entry, began, is_skipped=is_skipped)
        is_row_settled = bond.settled == bond.done and self._is_row_due(bond.done)
        self._next_window = Window(self._clock()) if is_row_settled else None
        if self._mixer:
            self._mixer.load_state(common["mixer"], is_first=True)
            # What a decision has used up is no longer counted.
            if self._mixer.decisions == entry.decisions:
                self._mixer.set_sums(noted_sums(entry, is_skipped=is_skipped))
        self._is_whole = True

    def _common(self) -> dict[str, Any]:
        """What all ranks know alike, beside model and optimizer."""
        mixer = self._mixer
        return {
            "eval_loss": self._eval_loss, "grad_norm": self._grad_norm, "peak": self._peak,
            "has_decided": self._has_decided, "elapsed_s": self._clock() - self._window.began,
            "pace": self._pace.state(), "skipped": self._guard.state(),
            "mixer": mixer.state(np.zeros_like(mixer.sums())) if mixer else None,
        }  # fmt: skip

    def _note_start(self) -> None:
        """Note the state that is gone on from."""
        if self._journal is None:
            return
        for step, ids in self._ids.items():
            self._journal.keep_ids(step, ids)
        self._note(self._applied, self._window)
        self.is_noted = True

    def _note(
        self, done: int, window: Window, gain: Gain | None = None, ids: np.ndarray | None = None
    ) -> None:
        if self._journal is None:
            return
        decisions, sums = 0, None
        if self._mixer:
            decisions, sums = self._mixer.decisions, self._mixer.sums().tolist()
        gained = gain.state() if gain else None
        self._journal.write(
            Entry(done, stream_bytes(), window.state(), decisions, sums, gained), ids
        )

    def _is_eval_due(self, done: int) -> bool:
        return done == self._spec.train.steps or done % self._spec.train.eval.every_steps == 0

    def _is_row_due(self, done: int) -> bool:
        return self._is_eval_due(done) or done % self._spec.train.log_every_steps == 0

    def _eval_loss_at(self, done: int) -> float | None:
        return self._eval_loss[1] if self._eval_loss and self._eval_loss[0] == done else None
