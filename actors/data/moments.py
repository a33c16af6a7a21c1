"""Count, mean, standard deviation and extremes of columns of float32, without any rounding error.

Sums are kept as whole numbers: a float32 is one of 24 bits times a power of two, its square one of
48 bits. So the order of the rows, how they were cut, and how many are added at a time cannot matter
to the digest of a dataset, and no cancellation can spoil a variance. Rounding comes last, once for
the mean, and for the variance and its root.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eagleray.actors.data.features import FloatArray

# 64 MB wait to be summed up, since each time costs something for each column.
_VALUES = 1 << 24
_COLUMNS = 256
# Values at a time. Far from 2**29: so many numbers of 24 bits a float64 adds exactly.
_PART = 1 << 20
_BITS = 24
# numpy.frexp of what float32 can hold gives exponents from -148 to 128.
_LEAST = -148
_EXPONENTS = 128 - _LEAST + 1


@dataclass(frozen=True)
class Moment:
    """Figures of one column's numbers, of which there is one at least."""

    count: int
    mean: float
    std: float
    min: float
    max: float


class Moments:
    """Figures of all columns of some rows; NaN is left out."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._waiting: list[FloatArray] = []
        self._waiting_values = 0
        self._count = np.zeros(width, np.int64)
        self._min, self._max = (np.full(width, np.nan, np.float32) for _ in range(2))
        # In units of 2**(_LEAST - _BITS), and of its square.
        self._sum, self._square_sum = [0] * width, [0] * width

    def add(self, rows: FloatArray) -> None:
        """Count rows [n, width] in."""
        size = max(1, _VALUES // self._width)
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            self._waiting.append(part)
            self._waiting_values += part.size
            if self._waiting_values >= _VALUES:
                self._flush()

    def of_column(self, place: int) -> Moment | None:
        """Figures of one column; None if it has no number."""
        self._flush()
        count, total = int(self._count[place]), self._sum[place]
        if not count:
            return None
        unit = 2 ** (_BITS - _LEAST)
        variance = (count * self._square_sum[place] - total**2) / (count * unit) ** 2
        return Moment(
            count,
            total / (count * unit),
            math.sqrt(variance),
            float(self._min[place]),
            float(self._max[place]),
        )

    def _flush(self) -> None:
        if not self._waiting:
            return
        rows = np.concatenate(self._waiting)
        self._waiting, self._waiting_values = [], 0
        self._count += np.count_nonzero(~np.isnan(rows), axis=0)
        self._min = np.fmin(self._min, np.fmin.reduce(rows, axis=0))
        self._max = np.fmax(self._max, np.fmax.reduce(rows, axis=0))
        for first in range(0, self._width, _COLUMNS):
            columns = rows[:, first : first + _COLUMNS]
            step = _PART // columns.shape[1]
            for start in range(0, len(columns), step):
                self._sum_up(columns[start : start + step].astype(np.float64), first)

    def _sum_up(self, rows: npt.NDArray[np.float64], first: int) -> None:
        columns = rows.shape[1]
        mantissa, exponent = np.frexp(np.nan_to_num(rows, nan=0.0))
        whole = np.ldexp(mantissa, _BITS)
        high, low = np.divmod(whole * whole, 2.0**_BITS)
        index = (np.arange(columns) * _EXPONENTS + (exponent - _LEAST)).ravel()

        def by_exponent(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
            sums = np.bincount(index, values.ravel(), columns * _EXPONENTS)
            return sums.astype(np.float64).reshape(columns, _EXPONENTS)

        sums, highs, lows = by_exponent(whole), by_exponent(high), by_exponent(low)
        # What adds up to nothing has squares all the same.
        for column, shift in zip(*np.nonzero(highs + lows), strict=True):
            square = (int(highs[column, shift]) << _BITS) + int(lows[column, shift])
            self._sum[first + column] += int(sums[column, shift]) << int(shift)
            self._square_sum[first + column] += square << (2 * int(shift))
