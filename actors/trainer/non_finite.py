"""What becomes of a step whose loss or gradient norm is not finite: stop, skip, or rewind.

All ranks judge by figures that are averaged over all of them, so they decide alike. A skipped step
changes neither weights nor moments nor the optimizer's own count of steps; the global step, the
learning rate's schedule and the order of samples go on, so its batch counts as consumed.

Megatron-LM skips the update likewise when its loss scale overflows, and counts such iterations;
PaLM's runs went back some 100 steps before a spike and left out 200-500 batches (Chowdhery et al.
2022, arXiv:2204.02311, section 5.1). Here the poisonous batch is known, so it alone is left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagleray.platform.config import NonFiniteConfig
from eagleray.platform.errors import RunFailedError

_REMEDY = "lower train.optimizer.lr or train.clip_grad_norm, or look at the data of that step"


@dataclass(frozen=True)
class Poison:
    """What was not finite, and at which step, counted from 0."""

    step: int
    quantity: str
    value: float

    def listed(self) -> list[Any]:
        """Plain values; JSON knows no number that is not finite, so it is a text there."""
        return [self.step, self.quantity, str(self.value)]

    @classmethod
    def from_list(cls, listed: Sequence[Any]) -> "Poison":
        """What `listed` gave."""
        step, quantity, value = listed
        return cls(int(step), str(quantity), float(value))


class NonFiniteLossError(RunFailedError):
    """The loss, held-out loss or gradient is NaN or infinite, and the run is not to go on."""

    def __init__(self, what: str, fix: str, step: int) -> None:
        super().__init__(what, fix)
        self.args = (what, fix, step)
        self.step = step


class RewindError(RuntimeError):
    """Training is to go on from the newest complete snapshot."""

    def __init__(self, poison: Poison) -> None:
        super().__init__(poison)
        self.poison = poison


def poison_of(step: int, loss: float, grad_norm: float) -> Poison | None:
    """What is not finite in a step's figures over all ranks; None if both are."""
    if not math.isfinite(loss):
        return Poison(step, "the loss", loss)
    if not math.isfinite(grad_norm):
        return Poison(step, "the gradient norm", grad_norm)
    return None


def stopped_by(poison: Poison) -> NonFiniteLossError:
    """The end of a run that stops at the first such step."""
    what = f"training stopped: {poison.quantity} is {poison.value} at step {poison.step}"
    fix = (
        f"{_REMEDY}; train.non_finite.action: skip leaves out such a step's update, rewind goes "
        "back to the newest snapshot and leaves out the step"
    )
    return NonFiniteLossError(what, fix, poison.step)


class NonFiniteGuard:
    """Decides about the steps of one rank; those of all ranks decide alike.

    Args:
        config: What to do.
    """

    def __init__(self, config: NonFiniteConfig) -> None:
        self._config = config
        self.count = 0
        """Steps behind the present state whose update was skipped."""
        self._row: list[Poison] = []  # the newest of them, without a step between
        self._rewound: dict[int, Poison] = {}

    @property
    def rewinds(self) -> bool:
        """Whether it may ask to go back."""
        return self._config.action == "rewind"

    def admits(self, step: int, loss: float, grad_norm: float) -> bool:
        """Whether the update of a step is to be applied; if not, the step counts as skipped.

        Raises:
            NonFiniteLossError: The run is to end.
            RewindError: It is to go back; the next time, the step is skipped.
        """
        poison = self._rewound.get(step) or poison_of(step, loss, grad_norm)
        if poison is None:
            return True
        if self._config.action == "stop":
            raise stopped_by(poison)
        before = self._row if self.skipped_at(step - 1) else []
        row = [*before, poison]
        if len(row) > self._config.max_steps:
            raise self._exhausted(row)
        if self.rewinds and step not in self._rewound:
            self._rewound[step] = poison
            raise RewindError(poison)
        self._row = row
        self.count += 1
        return False

    def skipped_at(self, step: int) -> Poison | None:
        """Why the update of the newest step was skipped; None if it was not, or is another step."""
        return self._row[-1] if self._row and self._row[-1].step == step else None

    def remember(self, rewound: Sequence[Sequence[Any]]) -> None:
        """Take over which steps the run has been rewound for, as lists; others are forgotten."""
        poisons = map(Poison.from_list, rewound)
        self._rewound = {poison.step: poison for poison in poisons}

    def state(self) -> dict[str, Any]:
        """Plain values; what was skipped on the way to the present state."""
        return {"count": self.count, "row": [poison.listed() for poison in self._row]}

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Go on from a state; None: nothing was skipped."""
        known = state or {"count": 0, "row": []}
        self.count = int(known["count"])
        self._row = [Poison.from_list(listed) for listed in known["row"]]

    def _exhausted(self, row: list[Poison]) -> NonFiniteLossError:
        listed = ", ".join(f"{each.quantity} {each.value} at step {each.step}" for each in row)
        what = (
            f"training stopped: {len(row)} steps in a row are not finite ({listed}), more than "
            f"train.non_finite.max_steps = {self._config.max_steps}"
        )
        return NonFiniteLossError(what, f"{_REMEDY}; or raise that limit", row[-1].step)
