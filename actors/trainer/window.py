"""Sums of one rank between two rows of figures."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from eagleray.actors.data.mixer import Mixer
from eagleray.actors.data.order import domains_of
from eagleray.actors.trainer.journal import Entry


@dataclass(frozen=True)
class Gain:
    """What a step adds to the sums of its rank, unless its update is skipped."""

    loss_sum: float
    tokens: int
    sums: np.ndarray | None = None
    """Its losses by domain, int64 [2, D], if a mixture follows them."""

    def state(self) -> dict[str, Any]:
        """Plain values."""
        sums = None if self.sums is None else self.sums.tolist()
        return {"loss_sum": self.loss_sum, "tokens": self.tokens, "sums": sums}


@dataclass(frozen=True)
class Window:
    """Sums of one rank since the last row; `began` by its clock."""

    began: float
    loss_sum: float = 0.0
    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def noted(cls, entry: Entry, began: float, *, is_skipped: bool) -> "Window":
        """That of a journal's entry.

        Args:
            entry: Of the newest state.
            began: When the window began.
            is_skipped: The update of its newest step was skipped.
        """
        window = cls(began, **entry.window)
        if is_skipped or not entry.gain:
            return window
        return window.plus(entry.gain["loss_sum"], entry.gain["tokens"])

    def plus(self, loss_sum: float, tokens: int) -> "Window":
        """With the loss of a step."""
        return replace(self, loss_sum=self.loss_sum + loss_sum, tokens=self.tokens + tokens)

    def spent(self, name: str, seconds: float) -> "Window":
        """With time that went into a part."""
        total = self.seconds.get(name, 0.0) + seconds
        return replace(self, seconds={**self.seconds, name: total})

    def state(self) -> dict[str, Any]:
        """Plain values, for a journal's entry."""
        return {name: value for name, value in asdict(self).items() if name != "began"}


def noted_sums(entry: Entry, *, is_skipped: bool) -> np.ndarray:
    """A journal's sums by domain, int64 [2, D]; arguments as for `Window.noted`."""
    sums = np.array(entry.sums, dtype=np.int64)
    if is_skipped or entry.gain is None or entry.gain["sums"] is None:
        return sums
    total: np.ndarray = sums + np.array(entry.gain["sums"], dtype=np.int64)
    return total


def gained_sums(
    mixer: Mixer | None, ids: np.ndarray, loss_B: np.ndarray | None, seq_len: int
) -> np.ndarray | None:
    """A step's losses by domain; None without a mixture that follows them.

    Args:
        mixer: Of the run, if its mixture follows losses.
        ids: Of the step's sequences, int64 [B].
        loss_B: Mean loss of each, float64 [B].
        seq_len: Tokens of a sequence.
    """
    # One that is not finite on this rank is not over all ranks: the step is skipped.
    if mixer is None or loss_B is None or not np.isfinite(loss_B).all():
        return None
    domain_B = domains_of(ids, mixer.sizes)
    gained: np.ndarray = mixer.sums_with(domain_B, loss_B, seq_len) - mixer.sums()
    return gained
