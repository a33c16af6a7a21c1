"""Which domain each sample of a run is drawn from: a pure function of position and weights.

A mixture is a list of segments, each with constant weights written as quotas q_d out of P = sum q
samples. Inside a segment the domains follow one pattern of P positions, over and over, so any
position costs the same and nothing but the segments needs to be saved.

Laws:
    * After every sample of a segment each domain's count is less than one sample away from its
      share, q_d / P of the samples drawn in the segment so far.
    * After each whole period the counts are exact, so segments of whole periods carry nothing over.
    * What a segment draws depends on nothing that comes after it.

The pattern solves the chairman assignment problem (Tijdeman 1980, "The chairman assignment
problem", Discrete Math. 32): the bound is 1 - 1 / (2D - 2), which no order of drawing can better.
    D = domains, P = samples of a period, B = samples asked for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd, lcm
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

MAX_PERIOD = 65_536
"""Weights are exact if that many parts suffice (0.7 needs 10); else they are rounded to it."""


@dataclass(frozen=True)
class Segment:
    """Constant quotas from sample `first` of the run on, until the next segment.

    `drawn` counts what was drawn of each domain before.
    """

    first: int
    drawn: tuple[int, ...]
    quotas: tuple[int, ...]

    def drawn_at(self, position: int) -> tuple[int, ...]:
        """What was drawn of each domain before a position of this segment."""
        pattern = _pattern(self.quotas)
        periods, rest = divmod(position - self.first, sum(self.quotas))
        inside = np.bincount(pattern.domain_P[:rest], minlength=len(self.quotas)).tolist()
        return tuple(
            before + periods * quota + count
            for before, quota, count in zip(self.drawn, self.quotas, inside, strict=True)
        )


class Mixture:
    """Segments in the order of their positions. Immutable; `then` makes a longer one.

    Args:
        segments: At least one.
        end: First position whose domain is not decided yet; None: all are.
    """

    def __init__(self, segments: Sequence[Segment], end: int | None = None) -> None:
        self.segments, self.end = tuple(segments), end
        self._firsts = np.array([segment.first for segment in segments], dtype=np.int64)

    @property
    def first(self) -> int:
        """First position that it says something about."""
        return self.segments[0].first

    @classmethod
    def constant(cls, weights: Sequence[Fraction]) -> "Mixture":
        """The same weights for the whole run."""
        return cls([Segment(0, (0,) * len(weights), quotas_of(weights))])

    def then(self, first: int, weights: Sequence[Fraction], num_samples: int | None) -> "Mixture":
        """This mixture up to position `first`, then other weights.

        Args:
            first: Where they begin; not before the last segment does.
            weights: Any nonnegative numbers with a positive sum.
            num_samples: How long they will hold; quotas are chosen so that the counts are exact
                there, or, where weights do not divide evenly, as near as can be. None: unknown.
        """
        last = self.segments[-1]
        if first < last.first:
            raise ValueError(f"position {first} must not be before {last.first}")
        kept = self.segments[:-1] if first == last.first else self.segments
        drawn = last.drawn_at(first)
        added = []
        for quotas, repeats in _runs_of_periods(weights, num_samples):
            added.append(Segment(first, drawn, quotas))
            if repeats is not None:
                first += repeats * sum(quotas)
                drawn = added[-1].drawn_at(first)
        return Mixture([*kept, *added], self.end)

    def until(self, end: int) -> "Mixture":
        """The same, decided up to a position."""
        return Mixture(self.segments, end)

    def since(self, position: int) -> "Mixture":
        """What is needed from a position on."""
        return Mixture(self.segments[self._at(position) :], self.end)

    def agrees_with(self, other: "Mixture") -> bool:
        """Whether both draw the same wherever both have decided."""
        start = max(self.segments[0].first, other.segments[0].first)
        ends = [end for end in (self.end, other.end) if end is not None]
        if ends and start >= min(ends):
            return True
        mine, others = (
            [s for s in m.since(start).segments if not ends or s.first < min(ends)]
            for m in (self, other)
        )
        return mine == others

    def draw(self, first: int, count: int) -> tuple[IntArray, IntArray]:
        """(domain, how many of that domain were drawn before) of each position, int64 [B] each.

        Raises:
            ValueError: The positions begin before the first segment, or are not decided yet.
        """
        if first < self.segments[0].first:
            raise ValueError(f"position {first} is before {self.segments[0].first}")
        if self.end is not None and first + count > self.end:
            raise ValueError(f"positions up to {first + count} are decided up to {self.end} only")
        domain_B = np.empty(count, dtype=np.int64)
        index_B = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            at = self._at(first + done)
            is_last = at + 1 == len(self.segments)
            stop = count if is_last else min(count, int(self._firsts[at + 1]) - first)
            domain_B[done:stop], index_B[done:stop] = _draw(
                self.segments[at], first + done, stop - done
            )
            done = stop
        return domain_B, index_B

    def drawn_at(self, position: int) -> tuple[int, ...]:
        """How many samples of each domain come before a position."""
        return self.segments[self._at(position)].drawn_at(position)

    def state(self) -> dict[str, Any]:
        """Plain values from which `from_state` makes an equal mixture."""
        segments = [[s.first, list(s.drawn), list(s.quotas)] for s in self.segments]
        return {"segments": segments, "end": self.end}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Mixture":
        """The mixture that `state` described."""
        segments = [
            Segment(first, tuple(drawn), tuple(quotas))
            for first, drawn, quotas in state["segments"]
        ]
        return cls(segments, state["end"])

    def _at(self, position: int) -> int:
        return max(0, int(np.searchsorted(self._firsts, position, side="right")) - 1)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Mixture) and self.segments == other.segments and self.end == other.end
        )

    def __hash__(self) -> int:
        return hash((self.segments, self.end))

    def __repr__(self) -> str:
        return f"Mixture({list(self.segments)!r}, end={self.end})"


def exact(weight: float) -> Fraction:
    """A weight as it was written: 0.7 is seven tenths, not the nearest binary fraction."""
    return Fraction(repr(float(weight)))


def quotas_of(weights: Sequence[Fraction], period: int | None = None) -> tuple[int, ...]:
    """Whole parts in the ratio of the weights.

    Without `period` as few as are exact, or MAX_PERIOD; rounding is by largest remainder.

    Raises:
        ValueError: A weight is negative, or all are zero.
    """
    total = sum(weights)
    if not weights or min(weights) < 0 or not total:
        raise ValueError(f"weights {[float(w) for w in weights]} must be at least 0, one above it")
    shares = [Fraction(weight) / total for weight in weights]
    if period is None:
        period = min(lcm(*(share.denominator for share in shares)), MAX_PERIOD)
    floors = [int(share * period) for share in shares]
    by_remainder = sorted(
        range(len(shares)), key=lambda d: (floors[d] - shares[d] * period, d)
    )  # largest remainder first, then the lower number
    for domain in by_remainder[: period - sum(floors)]:
        floors[domain] += 1
    return tuple(floors)


def named_weights(weights: Mapping[str, float], domains: Sequence[str]) -> list[Fraction]:
    """Weights in the order of the domains; one that is not named has none."""
    return [exact(weights.get(name, 0.0)) for name in domains]


def _runs_of_periods(
    weights: Sequence[Fraction], num_samples: int | None
) -> list[tuple[tuple[int, ...], int | None]]:
    """(quotas, how often) that fill `num_samples`: whole periods, then what is left over."""
    quotas = quotas_of(weights)
    if num_samples is None:
        return [(quotas, None)]
    period = sum(quotas)
    if period == MAX_PERIOD and num_samples <= MAX_PERIOD:
        period = num_samples
        quotas = quotas_of(weights, period)
    whole, rest = divmod(num_samples, period)
    runs: list[tuple[tuple[int, ...], int | None]] = [(quotas, whole)] if whole else []
    if rest:
        runs.append((quotas_of(weights, rest), 1))
    # The last one is open: whatever follows says itself where it begins.
    return [*runs[:-1], (runs[-1][0], None)]


@dataclass(frozen=True)
class _Pattern:
    """One period: the domain of each position, and how many of it come earlier in the period."""

    domain_P: npt.NDArray[np.uint8]
    earlier_P: npt.NDArray[np.int32]


def _draw(segment: Segment, first: int, count: int) -> tuple[IntArray, IntArray]:
    pattern = _pattern(segment.quotas)
    position_B = np.arange(first - segment.first, first - segment.first + count, dtype=np.int64)
    period_B, offset_B = np.divmod(position_B, sum(segment.quotas))
    domain_B = pattern.domain_P[offset_B].astype(np.int64)
    drawn_D = np.array(segment.drawn, dtype=np.int64)
    quota_D = np.array(segment.quotas, dtype=np.int64)
    index_B = drawn_D[domain_B] + period_B * quota_D[domain_B] + pattern.earlier_P[offset_B]
    return domain_B, index_B.astype(np.int64, copy=False)


@lru_cache(maxsize=64)
def _pattern(quotas: tuple[int, ...]) -> _Pattern:
    divisor = gcd(*quotas)
    base = _tijdeman(tuple(quota // divisor for quota in quotas))
    domain_P = np.tile(base, divisor)
    earlier_P = np.empty(len(domain_P), dtype=np.int32)
    for domain, quota in enumerate(quotas):
        earlier_P[domain_P == domain] = np.arange(quota, dtype=np.int32)
    return _Pattern(domain_P, earlier_P)


def _tijdeman(quotas: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """One period by Tijdeman's rule: of the domains that may be drawn, the most urgent one.

    In units of 1 / (mP), with m = 2D - 2: a domain may be drawn once it is at least P behind its
    share, and it must be drawn before it is more than (m - 1)P behind.
    """
    domains = [domain for domain, quota in enumerate(quotas) if quota]
    period = sum(quotas)
    if len(domains) == 1:
        return np.full(period, domains[0], dtype=np.uint8)
    m = 2 * len(domains) - 2
    behind = [0] * len(quotas)
    drawn = bytearray(period)
    latest = (m - 1) * period
    for position in range(period):
        chosen, least = -1, 0.0
        for domain in domains:
            behind[domain] += m * quotas[domain]
            if behind[domain] >= period:
                slack = (latest - behind[domain]) / quotas[domain]
                if chosen < 0 or slack < least:
                    chosen, least = domain, slack
        behind[chosen] -= m * period
        drawn[position] = chosen
    return np.frombuffer(bytes(drawn), dtype=np.uint8)
