"""Scales of a chart's axes: where a value lies, and which round values get a label.

A position is 0 at the axis' low end and 1 at its high end.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
_SECONDS = (
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400,
)  # fmt: skip
_TIME_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
_NICE_TICKS, _SPARE_TICKS = 5, 2
_PAD = 0.04
# Differences below it are none: a step of a fraction of them would be 0.
_TINY = 1e-200


@dataclass(frozen=True)
class Tick:
    """A labelled place on an axis."""

    value: float
    label: str


class Scale(Protocol):
    """Maps values of an axis to positions."""

    def at(self, value: float) -> float:
        """The position of a value."""
        ...

    def ticks(self, count: int) -> list[Tick]:
        """About `count` round values, ascending."""
        ...


@dataclass(frozen=True)
class LinearScale:
    """Equal distances for equal differences.

    Labels stand at multiples of `step`, if it is given: both ends then get one.
    """

    low: float
    high: float
    step: float = 0.0

    def at(self, value: float) -> float:
        """The position of a value."""
        return (value - self.low) / (self.high - self.low)

    def ticks(self, count: int) -> list[Tick]:
        """About `count` round values, ascending."""
        step = self._step(count)
        return [Tick(v, tick_label(v, step)) for v in _multiples(self.low, self.high, step)]

    def _step(self, count: int) -> float:
        span = self.high - self.low
        if not self.step:
            return _round_step(span / max(1, count))
        widths = (factor * self.step for factor in (1, 2, 5, 10, 20, 50))
        return next((width for width in widths if span / width <= count + _SPARE_TICKS), span)


@dataclass(frozen=True)
class StepScale(LinearScale):
    """Whole numbers, such as optimizer steps."""

    def ticks(self, count: int) -> list[Tick]:
        """About `count` round whole values, ascending."""
        step = max(1.0, _round_step((self.high - self.low) / max(1, count)))
        step = step if step == int(step) else 2 * step
        return [Tick(v, tick_label(v, step)) for v in _multiples(self.low, self.high, step)]


@dataclass(frozen=True)
class TimeScale(LinearScale):
    """Seconds since a start, labelled in the unit that fits."""

    def ticks(self, count: int) -> list[Tick]:
        """About `count` round times, ascending."""
        wish = (self.high - self.low) / max(1, count)
        step = next((float(s) for s in _SECONDS if s >= wish), 86400 * math.ceil(wish / 86400))
        if wish < 1:
            step = _round_step(wish)
        unit, name = next((u, n) for u, n in _TIME_UNITS if self.high >= 2 * u or u == 1.0)
        values = _multiples(self.low, self.high, step)
        return [Tick(v, f"{tick_label(v / unit, step / unit)} {name}") for v in values]


@dataclass(frozen=True)
class PercentScale(LinearScale):
    """Shares between 0 and 1."""

    def ticks(self, count: int) -> list[Tick]:
        """About `count` round shares, ascending."""
        return [
            Tick(tick.value / 100, f"{tick.label} %")
            for tick in LinearScale(100 * self.low, 100 * self.high, 100 * self.step).ticks(count)
        ]


@dataclass(frozen=True)
class LogScale:
    """Equal distances for equal ratios; all values must be above 0."""

    low: float
    high: float

    def at(self, value: float) -> float:
        """The position of a value."""
        return math.log(value / self.low) / math.log(self.high / self.low)

    def ticks(self, count: int) -> list[Tick]:
        """Powers of ten, with 2 and 5 between them where there are few."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        decades = range(first, last + 1)
        for factors in ((1, 2, 5), (1, 3), (1,)):
            found = [f * 10.0**d for d in decades for f in factors]
            inside = [v for v in found if self.low <= v * (1 + 1e-9) and v <= self.high]
            if len(inside) <= count:
                break
        if len(inside) < 2:  # less than an octave
            return LinearScale(self.low, self.high).ticks(count)
        every = -(-len(inside) // max(1, count))
        return [Tick(v, _exponent(v) if v < 0.1 else short_number(v)) for v in inside[::every]]


@dataclass(frozen=True)
class ChoiceScale:
    """One place for each of a few values, by their index."""

    labels: tuple[str, ...]

    def at(self, value: float) -> float:
        """The position of an index."""
        return (value + 0.5) / len(self.labels)

    def ticks(self, count: int) -> list[Tick]:
        """Every value, or every k-th when there is no room."""
        every = -(-len(self.labels) // max(1, count))
        return [Tick(i, text) for i, text in enumerate(self.labels) if i % every == 0]


def fit_linear(values: Iterable[float], *, from_zero: bool = False) -> LinearScale:
    """A scale that holds all values and ends at round ones."""
    low, high = _span(values)
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    if low == high or high - low < _TINY:
        room = _room_around(low, high)
        low, high = low - room, high + room
    step = _round_step((high - low) / _NICE_TICKS)
    return LinearScale(
        math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, step
    )


def fit_padded(values: Iterable[float], *, is_log: bool = False) -> LinearScale | LogScale:
    """A scale that holds all values with a little room at both ends."""
    low, high = _span(values)
    if is_log and low > 0:
        if low == high:
            return LogScale(low / 2, high * 2)
        room = (high / low) ** _PAD
        return LogScale(low / room, high * room)
    room = (high - low) * _PAD if high - low >= _TINY else _room_around(low, high)
    return LinearScale(low - room, high + room)


def _room_around(low: float, high: float) -> float:
    """What a scale gets on both sides of a value that stands alone."""
    size = max(abs(low), abs(high))
    return 0.1 * (size if size >= _TINY else 1.0)


def tick_label(value: float, step: float) -> str:
    """A value with as many digits as the distance to its neighbour needs."""
    if abs(value) < step * 1e-6:
        return "0"
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size and step >= size / 10:
            return f"{_trimmed(value / size, step / size)}{letter}"
    if step < 1e-3:
        return _exponent(value)
    return _trimmed(value, step)


def short_number(value: float) -> str:
    """`0.003`, `2e-5`, `20k`."""
    if value and abs(value) < 1e-3:
        return _exponent(value)
    return tick_label(value, abs(value)) if abs(value) >= 1e4 else f"{value:.4g}"


def thinned(values: Sequence[float], limit: int) -> list[int]:
    """Indices of at most about `limit` values that keep the shape of a line.

    Of each stretch the lowest and the highest value stay, and the ends.
    """
    if len(values) <= limit:
        return list(range(len(values)))
    stretches = max(1, limit // 2)
    kept = {0, len(values) - 1}
    for number in range(stretches):
        part = range(number * len(values) // stretches, (number + 1) * len(values) // stretches)
        kept.add(min(part, key=values.__getitem__))
        kept.add(max(part, key=values.__getitem__))
    return sorted(kept)


def _exponent(value: float) -> str:
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _trimmed(value: float, step: float) -> str:
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if round(step * 10**decimals, 6) % 1:
        decimals += 1  # steps such as 0.25
    return f"{value:,.{decimals}f}"


def _round_step(wish: float) -> float:
    if wish <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(wish))
    return next(r * size for r in _ROUND if r * size >= wish * (1 - 1e-9))


def _multiples(low: float, high: float, step: float) -> list[float]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def _span(values: Iterable[float]) -> tuple[float, float]:
    found = [value for value in values if math.isfinite(value)]
    return (min(found), max(found)) if found else (0.0, 1.0)
