"""A run of several ranks in one process, whose order and deaths a seed decides.

The loop, the journals, the seating, the checkpoint store and the sample log are the real ones.
Simulated are what passes between ranks, and time: each rank is a thread, and one of them runs at a
time, up to its next call of something outside. There it may be killed, and another goes on.

A collective that a rank has taken part in may reach some of the others and fail at the rest when
that rank dies: whatever order real connections would break in is among those drawn.
"""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from eagleray.actors.checkpoint.snapshot import Snapshotter
from eagleray.actors.checkpoint.state import Checkpoint, Snapshot
from eagleray.actors.checkpoint.store import CheckpointStore
from eagleray.actors.data.mixture import Mixture
from eagleray.actors.data.order import mixed_batch_ids
from eagleray.actors.trainer.collectives import Collectives, PeerLostError
from eagleray.actors.trainer.journal import StepJournal
from eagleray.actors.trainer.loop import PausedError, RankTrainer, StateLostError
from eagleray.actors.trainer.non_finite import Poison
from eagleray.actors.trainer.seams import LoopSpec, Seat, Standing
from eagleray.actors.trainer.seating import bond_of
from eagleray.actors.trainer.step_row import StepRow
from eagleray.actors.trainer.stepper import Stepper
from eagleray.platform.config import CheckpointConfig
from eagleray.platform.errors import ServiceError
from eagleray.platform.storage import Storage

SIZES = (60, 40)
POISON = 50
"""A token; the loss of a sequence that begins with it is NaN."""
_SEED = 3
_JOURNAL_ROWS = 64
_LEFT = int | PeerLostError | PausedError | StateLostError | ServiceError


class Killed(BaseException):
    """SIGKILL: nothing of the rank runs any more."""


@dataclass
class Rank:
    """A process of one rank."""

    trainer: RankTrainer
    journal: StepJournal
    standing: Standing | None = None
    is_noted: bool = False


class Schedule:
    """Lets one rank run at a time; a seed decides which, and who is killed where.

    Args:
        seed: Of all that is drawn.
        kill_rate: Chance of a death at each point.
        max_kills: Deaths in all.
    """

    def __init__(self, seed: int, kill_rate: float, max_kills: int) -> None:
        self.draw = random.Random(seed)
        self._kill_rate, self._kills_left = kill_rate, max_kills
        self.kills = 0
        self._turn: dict[int, threading.Semaphore] = {}
        self._yielded = threading.Semaphore(0)
        self._doomed: set[int] = set()
        self.gone: set[int] = set()
        self.broken: set[int] = set()
        """Those that did not come to their end."""

    def point(self, rank: int) -> None:
        """A rank calls something outside: others may run first, and it may die."""
        if threading.current_thread().name != f"rank-{rank}":
            return  # What is left of an attempt that is over.
        self._yielded.release()
        self._turn[rank].acquire()
        if rank in self._doomed:
            raise Killed

    def run(self, bodies: dict[int, Callable[[], Any]]) -> dict[int, Any]:
        """Run all ranks to their ends; what each returned, or the exception that ended it."""
        results: dict[int, Any] = {}
        self._turn = {rank: threading.Semaphore(0) for rank in bodies}
        self._doomed, self.gone, self.broken = set(), set(), set()

        def live(rank: int) -> None:
            self._turn[rank].acquire()
            try:
                results[rank] = bodies[rank]()
            except BaseException as error:  # noqa: BLE001 - looked at by who waits
                results[rank] = error
                self.broken.add(rank)
            finally:
                self.gone.add(rank)
                self._yielded.release()

        threads = [
            threading.Thread(target=live, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in bodies
        ]
        for thread in threads:
            thread.start()
        while len(self.gone) < len(bodies):
            rank = self.draw.choice(sorted(set(bodies) - self.gone))
            if self._kills_left and self.draw.random() < self._kill_rate:
                self._kills_left -= 1
                self.kills += 1
                self._doomed.add(rank)
            self._turn[rank].release()
            self._yielded.acquire()
        for thread in threads:
            thread.join()
        return results


class SimulatedCollectives(Collectives):
    """What passes between the ranks of one attempt."""

    def __init__(self, seat: Seat, schedule: Schedule, board: dict[int, dict[int, Any]]) -> None:
        super().__init__(seat)
        self._schedule, self._board, self._next = schedule, board, 0

    def begin_sum(self, flat: torch.Tensor) -> "_Sum":
        number = self._bring(flat.clone())
        return _Sum(self, number, flat)

    def sums(self, values: np.ndarray) -> np.ndarray:
        total: np.ndarray = sum(self.all_of(self._bring(values.copy())))
        return total

    def array_from(self, array: np.ndarray, source: int) -> np.ndarray:
        sent: np.ndarray = self.all_of(self._bring(array.copy()))[source]
        return sent.copy()

    def share_chunk(self, flat: torch.Tensor, source: int) -> None:
        flat.copy_(self.all_of(self._bring(flat.clone()))[source])

    def _bring(self, value: Any) -> int:
        self._schedule.point(self._seat.rank)
        number = self._next
        self._next += 1
        self._board.setdefault(number, {})[self._seat.rank] = value
        return number

    def all_of(self, number: int) -> list[Any]:
        """What all ranks brought to a collective."""
        brought, schedule = self._board[number], self._schedule
        while len(brought) < self._seat.world_size:
            if schedule.broken - set(brought):
                raise PeerLostError("a peer is gone")
            schedule.point(self._seat.rank)
        # A peer that has brought its part and died since may have reached us or not.
        if schedule.broken and schedule.draw.random() < 0.5:
            raise PeerLostError("a peer is gone")
        return [brought[rank] for rank in sorted(brought)]


class SimulatedSnapshotter(Snapshotter):
    """Copies and hands in either at once or when it is joined, in the thread of its rank."""

    draw = random.Random(0)
    _waiting: Snapshot | None = None

    def begin(self, part: Snapshot) -> None:
        self.join()
        if self.draw.random() < 0.5:
            self._waiting = part
        else:
            super().begin(part)

    def join(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            super().begin(waiting)
        super().join()


class AtOnce:
    """Stands for a thread of a snapshotter: runs where it is started."""

    def __init__(self, *, target: Callable[..., None], args: tuple[Any, ...], **_: Any) -> None:
        self._run = lambda: target(*args)

    def start(self) -> None:
        self._run()


@dataclass
class _Sum:
    peers: SimulatedCollectives
    number: int
    flat: torch.Tensor

    def wait(self) -> None:
        self.flat.copy_(sum(self.peers.all_of(self.number)))


@dataclass(frozen=True)
class Batch:
    ids: np.ndarray
    tokens: np.ndarray


class PoisonableStepper(Stepper):
    """Knows POISON."""

    def _losses(self, tokens_BT1: torch.Tensor) -> torch.Tensor:
        factor_B = torch.where(tokens_BT1[:, 0] == POISON, float("nan"), 1.0)
        return super()._losses(tokens_BT1) * factor_B


@dataclass
class Source:
    """Batches of one rank, of two domains; one sequence of the last rank may be poisonous."""

    schedule: Schedule
    rank: int
    batch_size: int
    seq_len: int
    poisoned: frozenset[int] = frozenset()
    """Steps."""

    def batch(self, step: int, rank: int, world_size: int, mixture: Mixture | None) -> Batch:
        self.schedule.point(self.rank)
        assert mixture is not None
        ids = np.split(mixed_batch_ids(_SEED, SIZES, mixture, step, self.batch_size), world_size)
        tokens = self._tokens(ids[rank])
        if step in self.poisoned and rank == world_size - 1:
            tokens[-1, 0] = POISON
        return Batch(ids[rank], tokens)

    def eval_batch(self, index: int) -> np.ndarray:
        self.schedule.point(self.rank)
        return self._tokens(np.arange(self.batch_size) + 1000 * index)

    def _tokens(self, ids: np.ndarray) -> np.ndarray:
        factor = np.where(ids < SIZES[0], 1, 7)[:, None]
        return ((ids[:, None] + factor * np.arange(self.seq_len + 1)) % 50).astype(np.int32)


@dataclass
class Run:
    """A run on one storage; its actors may be killed as its ranks may."""

    spec: LoopSpec
    storage: Storage
    schedule: Schedule
    world_size: int
    store_loss: float = 0.0
    """Chance that the checkpoint store dies between two attempts."""
    poisoned: frozenset[int] = frozenset()
    """Steps."""
    pause_rate: float = 0.0
    """Chance of each step of a rank that it wishes a pause."""
    sizes: tuple[int, ...] = ()
    """Numbers of ranks; one of them is drawn after each pause."""
    rows: dict[int, StepRow] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    rewound: dict[Poison, int] = field(default_factory=dict)
    """What was not finite -> after which step the run went on."""
    attempts: int = 0
    starts: dict[int, int] = field(default_factory=dict)
    """Attempt -> the step after which it went on."""
    pauses: list[tuple[int, int]] = field(default_factory=list)
    """Attempts that all ranks have left at a pause, and after which step."""

    def train(self) -> Checkpoint:
        """Attempt after attempt, until all steps are done; the final state."""
        store = self._store()
        ranks = {rank: self._born() for rank in range(self.world_size)}
        inherited: dict[int, list[StepJournal]] = {}
        while True:
            self.attempts += 1
            assert self.attempts < 200, "the run does not come to its end"
            results = self._attempt(ranks, inherited, store)
            if all(isinstance(result, int) for result in results.values()):
                break
            if all(isinstance(result, PausedError) for result in results.values()):
                standing = ranks[0].trainer.standing
                assert standing is not None
                self.pauses.append((self.attempts, standing.applied))
                before, self.world_size = self.world_size, self._size()
                if self.world_size != before:
                    ranks, inherited = self._resized(ranks), {}
                    continue
            is_lost = any(isinstance(result, StateLostError) for result in results.values())
            for rank, result in results.items():
                if isinstance(result, Killed):
                    inherited.setdefault(rank, []).insert(0, ranks[rank].journal)
                    ranks[rank] = self._born()
                elif isinstance(result, _LEFT):
                    trainer = ranks[rank].trainer
                    ranks[rank].standing = None if is_lost else trainer.standing
                    ranks[rank].is_noted = not is_lost and trainer.is_noted
                else:
                    raise result
            if is_lost:
                inherited = {}
            if self.schedule.draw.random() < self.store_loss:
                store = self._store()
        found = store.begin(self.attempts + 1)
        assert found is not None
        store.close()
        return found

    def _attempt(
        self,
        ranks: dict[int, Rank],
        inherited: dict[int, list[StepJournal]],
        store: CheckpointStore,
    ) -> dict[int, Any]:
        standings = {rank: each.standing for rank, each in ranks.items()}
        is_known = all(each.is_noted or rank in inherited for rank, each in ranks.items())
        bond = bond_of(standings) if is_known else None
        board: dict[int, dict[int, Any]] = {}

        def body(rank: int) -> Callable[[], int]:
            seat, each = Seat(rank, self.world_size), ranks[rank]
            train = self.spec.train

            def live() -> int:
                return each.trainer.run(
                    seat,
                    Source(self.schedule, rank, train.batch_size, self.spec.seq_len, self.poisoned),
                    _Sink(store, self.schedule, rank),
                    _Reporter(self, rank),
                    bond,
                    each.journal,
                    inherited.get(rank, ()),
                    peers=SimulatedCollectives(seat, self.schedule, board),
                    wants_pause=lambda: self.schedule.draw.random() < self.pause_rate,
                )

            return live

        results = self.schedule.run({rank: body(rank) for rank in ranks})
        for rank, result in results.items():
            if not isinstance(result, Killed):
                ranks[rank].trainer.drop()
        return results

    def _size(self) -> int:
        return self.schedule.draw.choice(self.sizes or (self.world_size,))

    def _resized(self, ranks: dict[int, Rank]) -> dict[int, Rank]:
        """Another number of ranks; who stays knows nothing that counts there."""
        stay = {
            rank: Rank(each.trainer, self._journal())
            for rank, each in ranks.items()
            if rank < self.world_size
        }
        fresh = {rank: self._born() for rank in range(self.world_size) if rank not in stay}
        return stay | fresh

    def _born(self) -> Rank:
        return Rank(RankTrainer(self.spec), self._journal())

    def _journal(self) -> StepJournal:
        return StepJournal.create(_JOURNAL_ROWS, self.spec.train.batch_size // self.world_size)

    def _store(self) -> CheckpointStore:
        return CheckpointStore(self.storage, "run", CheckpointConfig(keep=2))


@dataclass
class _Sink:
    store: CheckpointStore
    schedule: Schedule
    rank: int

    def begin(self, attempt: int) -> Checkpoint | None:
        self.schedule.point(self.rank)
        return self.store.begin(attempt)

    def renew(self, attempt: int) -> int:
        self.schedule.point(self.rank)
        return self.store.renew(attempt)

    def submit(self, snapshot: Snapshot) -> int:
        self.schedule.point(self.rank)
        self.store.submit(snapshot)
        self.schedule.point(self.rank)
        # So that what is on storage does not depend on the writer's thread.
        return self.store.flush().newest_step

    def settle(self) -> None:
        """Parts are taken at once."""

    def flush(self) -> None:
        self.schedule.point(self.rank)
        self.store.flush()


@dataclass
class _Reporter:
    run: Run
    rank: int

    def begin(self, rank: int, world_size: int) -> int:
        self.run.schedule.point(self.rank)
        return self.run.attempts

    def join(self, attempt: int, rank: int) -> None:
        assert attempt == self.run.attempts

    def started(self, attempt: int, step: int) -> None:
        self.run.starts[attempt] = step

    def skipped(self, poison: Poison) -> None:
        self.run.schedule.point(self.rank)
        self.run.skipped.add(poison.step)

    def rewound(self, poison: Poison, to_step: int) -> None:
        self.run.schedule.point(self.rank)
        self.run.rewound.setdefault(poison, to_step)

    def rewinds(self) -> list[Poison]:
        self.run.schedule.point(self.rank)
        return list(self.run.rewound)

    def report(self, row: StepRow) -> str | None:
        self.run.schedule.point(self.rank)
        self.run.rows[row.step] = row
        return None
