"""What a training worker is made of and talks to. No torch: who only seats workers needs none.

B = sequences of one rank in the global batch, T = tokens per sequence.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from eagleray.actors.checkpoint.state import Checkpoint, Snapshot
from eagleray.actors.data.mixer import MixerSpec
from eagleray.actors.data.mixture import Mixture
from eagleray.actors.trainer.non_finite import Poison
from eagleray.actors.trainer.step_row import StepRow
from eagleray.platform.config import TrainConfig
from eagleray.platform.model.config import DecoderConfig


@dataclass(frozen=True)
class Seat:
    """Which worker of how many this is."""

    rank: int = 0
    world_size: int = 1


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

    def renew(self, attempt: int) -> int:
        """Go on with the state that the ranks hold; the newest complete snapshot's step, or 0."""

    def submit(self, snapshot: Snapshot) -> int:
        """Take this rank's part; may return before it is kept.

        Returns:
            The newest step that is known to be on storage; 0 if none is.
        """

    def settle(self) -> None:
        """Return when the part that was handed in has been received."""

    def flush(self) -> None:
        """Return when the newest state, submitted or given by `begin`, is on storage."""


class Reporter(Protocol):
    """Hears what a worker does."""

    def begin(self, rank: int, world_size: int) -> int:
        """Rank 0 starts an attempt; its number, from 1."""

    def join(self, attempt: int, rank: int) -> None:
        """Every rank takes part in the attempt."""

    def started(self, attempt: int, step: int) -> None:
        """Rank 0: the attempt goes on after so many steps."""

    def report(self, row: StepRow) -> str | None:
        """Take one row of figures; a reason if training is to stop after this step."""

    def skipped(self, poison: Poison) -> None:
        """Rank 0: the update of a step was skipped; may be told more than once."""

    def rewound(self, poison: Poison, to_step: int) -> None:
        """Rank 0: training goes on from an earlier state; may be told more than once."""

    def rewinds(self) -> list[Poison]:
        """What the run has been rewound for so far, in any attempt."""


@dataclass(frozen=True)
class LoopSpec:
    """What to train."""

    train: TrainConfig
    model: DecoderConfig
    seq_len: int
    mixer: MixerSpec | None = None
    """What decides the domains' weights on the way; None: they are known beforehand."""


@dataclass(frozen=True)
class Bond:
    """How ranks that lost a peer come together again.

    Attributes:
        done: The newest state that a rank holds, in applied steps.
        settled: The least that a survivor has settled.
        source: The rank that gives its state to the others.
        is_shared: Whether a rank lacks that state.
    """

    done: int
    settled: int
    source: int
    is_shared: bool


@dataclass(frozen=True)
class Standing:
    """How far a rank has come."""

    applied: int
    decisions: int
    settled: int
