"""Goodput: the share of a run's wall time that went into steps behind its final weights.

Laws:
    * A step counts once, in the attempt that made it stand; time that trained nothing, trained what
      was redone, or waited for a batch, a checkpoint or an evaluation does not count.
    * Between two rows of one attempt all else is step time. What the first row of an attempt took
      cannot be told from the recovery before it: its steps count at the median of the run.
    * The wall time runs from the first row to the last one, without pauses.
"""

from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from eagleray.platform.report.history import History, Row

_WAITS = ("data", "checkpoint", "eval")


@dataclass(frozen=True)
class Goodput:
    """Where the wall time of a run went, in seconds."""

    wall_s: float
    useful_s: float
    """In steps that count."""
    waited_s: float
    """For batches, checkpoints and evaluations, between steps that count."""

    @property
    def share(self) -> float:
        """Useful time to wall time."""
        return self.useful_s / self.wall_s

    @property
    def lost_s(self) -> float:
        """To faults: without a step, or in one that was redone."""
        return max(0.0, self.wall_s - self.useful_s - self.waited_s)

    def at(self, faults: int, every_s: float) -> float:
        """The share if one fault came each `every_s` seconds and cost what it did in this run.

        Args:
            faults: In this run.
            every_s: From one to the next; what is shorter than a recovery leaves nothing.
        """
        undisturbed = self.useful_s / max(self.useful_s + self.waited_s, 1e-9)
        cost_s = self.lost_s / faults if faults else 0.0
        return undisturbed * max(0.0, 1 - cost_s / every_s)


def goodput(history: History) -> Goodput | None:
    """Of a run so far; None if no attempt has two rows that count."""
    at = history.clock.at
    kept = sorted(history.kept, key=lambda row: row.time_s)
    spans = [_Span(at(b.time_s) - at(a.time_s), a, b) for a, b in pairwise(kept)]
    paces = [span.step_s / span.num_steps for span in spans if span.is_of_one_attempt]
    if not paces:
        return None
    useful_s = waited_s = 0.0
    for span in spans:
        if span.is_of_one_attempt:
            useful_s += span.step_s
            waited_s += span.gap_s - span.step_s
        else:
            useful_s += min(span.gap_s, median(paces) * span.num_steps)
    wall_s = at(kept[-1].time_s) - at(history.rows[0].time_s)
    return Goodput(wall_s, useful_s, waited_s) if wall_s > 0 else None


@dataclass(frozen=True)
class _Span:
    """From one row to the next of those that count."""

    gap_s: float
    one: Row
    other: Row

    @property
    def num_steps(self) -> int:
        return max(0, self.other.step - self.one.step)

    @property
    def is_of_one_attempt(self) -> bool:
        return self.one.attempt == self.other.attempt and self.num_steps > 0

    @property
    def step_s(self) -> float:
        return max(0.0, self.gap_s - sum(self.other.parts_s.get(part, 0.0) for part in _WAITS))
