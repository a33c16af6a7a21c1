"""A training state outside of its process: plain arrays and values, no torch.

The store's process imports this and not torch, which it needs only to write.
    S = steps since the snapshot before, B = sequences per rank and step.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eagleray.actors.checkpoint.snapshot_buffer import Placed


@dataclass(frozen=True)
class Snapshot:
    """The state after `step` optimizer steps, as seen by one rank.

    Replicated state (model, optimizer) comes from rank 0 alone; every rank adds its random state
    and the ids of the samples that it trained on since the previous snapshot, so that what trained
    the weights is committed together with them.
    """

    step: int
    attempt: int
    rank: int
    world_size: int
    arrays: dict[str, np.ndarray]
    samples_SB: np.ndarray
    first_step: int
    """Step of the first row of `samples_SB`."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Plain values: metrics, progress; from rank 0."""
    placed: Placed | None = None
    """Further arrays, in a buffer that the store lent to this rank."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete training state."""

    step: int
    arrays: dict[str, np.ndarray]
    samples: str
    """Name of the last segment of the sample log that led here."""
    meta: dict[str, Any]


@dataclass(frozen=True)
class HandedOver:
    """A checkpoint on its way to a worker; placed arrays do not travel with it."""

    checkpoint: Checkpoint
    placed: Placed | None = None
