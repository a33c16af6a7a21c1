"""One rank of data-parallel runs without Ray; started as a program by test_trainer_parallel.py.

Usage: parallel_rank.py FOLDER RANK PHASE...      with PHASE = NAME:WORLD_SIZE:STEPS
A phase trains FOLDER/NAME on the first WORLD_SIZE ranks up to STEPS, going on from where an earlier
phase of that name stopped. Ranks share nothing but the process group: rank 0's store is the run's;
the others hand their parts in through a folder that rank 0 reads, as an actor would receive them.
"""

import json
import pickle
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from eagleray.actors.checkpoint.state import Checkpoint, Snapshot
from eagleray.actors.checkpoint.store import CheckpointStore
from eagleray.actors.data.mixture import Mixture
from eagleray.actors.trainer.loop import run_loop
from eagleray.actors.trainer.non_finite import Poison
from eagleray.actors.trainer.seams import LoopSpec, Seat
from eagleray.actors.trainer.step_row import StepRow
from eagleray.platform.config import CheckpointConfig, ProjectConfig, with_overrides
from eagleray.platform.model.config import DecoderConfig
from eagleray.platform.storage import Storage

BATCH, SEQ_LEN, VOCAB = 6, 8, 50
MODEL = DecoderConfig(
    vocab_size=VOCAB, dim=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, ffn_dim=32,
    max_seq_len=16,
)  # fmt: skip


class Batch:
    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids
        self.tokens = ((ids[:, None] * 7 + np.arange(SEQ_LEN + 1)) % VOCAB).astype(np.int32)


class Source:
    """Draws random numbers as a dropout does, one more on each rank, and notes them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def batch(self, step: int, rank: int, world_size: int, mixture: Mixture | None = None) -> Batch:
        drawn = torch.rand(rank + 1).tolist()
        with (self._folder / f"noise-{rank}").open("a") as file:
            file.write(json.dumps([step, drawn]) + "\n")
        ids = np.arange(step * BATCH, (step + 1) * BATCH)
        return Batch(np.split(ids, world_size)[rank])

    def eval_batch(self, index: int) -> np.ndarray:
        first = (index + 1000) * BATCH
        return Batch(np.arange(first, first + BATCH)).tokens


class Sink:
    """Rank 0 owns the store; the parts of the others come as files of this test's own folder."""

    def __init__(self, folder: Path, seat: Seat) -> None:
        self._mail, self._seat = folder / "mail", seat
        self._mail.mkdir(exist_ok=True)
        self._store = CheckpointStore(Storage(folder), "run", CheckpointConfig(keep=9))

    def begin(self, attempt: int) -> Checkpoint | None:
        return self._store.begin(attempt)

    def renew(self, attempt: int) -> int:
        return self._store.renew(attempt)

    def submit(self, snapshot: Snapshot) -> int:
        name = f"{snapshot.attempt}-{snapshot.step}-{snapshot.rank}"
        if self._seat.rank:
            (self._mail / f".{name}").write_bytes(pickle.dumps(snapshot))
            (self._mail / f".{name}").rename(self._mail / name)
            return 0
        self._store.submit(snapshot)
        for rank in range(1, self._seat.world_size):
            path = self._mail / f"{snapshot.attempt}-{snapshot.step}-{rank}"
            deadline = time.monotonic() + 60
            while not path.exists():
                assert time.monotonic() < deadline, f"no part of rank {rank}"
                time.sleep(0.005)
            self._store.submit(pickle.loads(path.read_bytes()))
        return self._store.status().newest_step

    def settle(self) -> None:
        """Parts are taken at once."""

    def flush(self) -> None:
        if self._seat.rank == 0:
            self._store.flush()


class Reporter:
    def __init__(self, folder: Path, stop_at: int) -> None:
        self._attempts, self._rows, self._stop_at = folder / "attempt", folder / "rows", stop_at

    def begin(self, rank: int, world_size: int) -> int:
        attempt = int(self._attempts.read_text()) + 1 if self._attempts.exists() else 1
        self._attempts.write_text(str(attempt))
        return attempt

    def join(self, attempt: int, rank: int) -> None:
        pass

    def started(self, attempt: int, step: int) -> None:
        """Nobody asks."""

    def skipped(self, poison: Poison) -> None:
        """Nothing is skipped."""

    def rewound(self, poison: Poison, to_step: int) -> None:
        """Nothing is rewound."""

    def rewinds(self) -> list[Poison]:
        return []

    def report(self, row: StepRow) -> str | None:
        with self._rows.open("a") as file:
            file.write(json.dumps([row.step, row.loss, row.grad_norm, row.eval_loss]) + "\n")
        return "enough" if row.step == self._stop_at else None


def run_phase(base: Path, rank: int, number: int, phase: str) -> None:
    name, world, steps = phase.split(":")
    seat, folder = Seat(rank, int(world)), base / name
    if seat.rank >= seat.world_size:
        return
    folder.mkdir(exist_ok=True)
    if seat.world_size > 1:
        meeting = f"file://{base / f'rendezvous-{number}'}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=seat.world_size)
    train = with_overrides(
        ProjectConfig(name="t"),
        {
            "train.steps": 8, "train.batch_size": BATCH, "train.micro_batch_size": 2,
            "train.num_workers": seat.world_size, "train.checkpoint.every_steps": 2,
            "train.log_every_steps": 1, "train.eval.every_steps": 4, "train.eval.num_batches": 3,
            "train.clip_grad_norm": 0.5, "train.optimizer.lr": 0.01,
        },
    ).train  # fmt: skip
    spec = LoopSpec(train, MODEL, SEQ_LEN)
    run_loop(seat, spec, Source(folder), Sink(folder, seat), Reporter(folder, int(steps)))
    if seat.world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    for index, text in enumerate(sys.argv[3:]):
        run_phase(Path(sys.argv[1]), int(sys.argv[2]), index, text)
