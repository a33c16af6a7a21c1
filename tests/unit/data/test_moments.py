"""Figures of columns: exact, whatever the order of the rows and however they come."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagleray.actors.data import moments as module
from eagleray.actors.data.moments import Moment, Moments

FLOAT32 = st.floats(width=32, allow_infinity=False)


def exactly(values: list[float]) -> Moment | None:
    """By rational numbers."""
    numbers = [Fraction(value) for value in values if value == value]
    if not numbers:
        return None
    mean = sum(numbers, Fraction()) / len(numbers)
    variance = sum(((x - mean) ** 2 for x in numbers), Fraction()) / len(numbers)
    return Moment(
        len(numbers),
        float(mean),
        math.sqrt(float(variance)),
        float(min(numbers)),
        float(max(numbers)),
    )


def figures(rows: np.ndarray, cuts: list[int]) -> list[Moment | None]:  # type: ignore[type-arg]
    found = Moments(rows.shape[1])
    for part in np.split(rows, sorted(min(cut, len(rows)) for cut in cuts)):
        found.add(part)
    return [found.of_column(place) for place in range(rows.shape[1])]


@given(
    rows=st.lists(st.tuples(FLOAT32, FLOAT32), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    seed=st.integers(0, 9),
)
def test_they_are_exact_however_the_rows_are_cut_and_ordered(
    rows: list[tuple[float, float]], cuts: list[int], seed: int
) -> None:
    array = np.array(rows, dtype=np.float32)
    expected = [exactly(column.tolist()) for column in array.T.astype(np.float64)]
    assert figures(array, cuts) == expected
    shuffled = np.random.default_rng(seed).permutation(array)
    assert figures(shuffled, cuts) == expected


@pytest.mark.parametrize("least", [1, 100, 1 << 24])
def test_many_rows_of_many_columns_are_summed_in_parts(
    monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    monkeypatch.setattr(module, "_COLUMNS", 3)
    monkeypatch.setattr(module, "_PART", 100)
    monkeypatch.setattr(module, "_VALUES", least)
    rows = np.random.default_rng(0).normal(1e6, 1e-2, (1000, 7)).astype(np.float32)
    assert figures(rows, [1, 1, 900]) == [exactly(c.tolist()) for c in rows.T.astype(np.float64)]


def test_the_largest_sum_that_is_kept_at_once_is_exact() -> None:
    largest = np.full((module._PART, 1), np.finfo(np.float32).max)
    (found,) = figures(largest, [])
    assert found == Moment(module._PART, float(largest[0, 0]), 0.0, *[float(largest[0, 0])] * 2)


def test_a_column_of_empty_cells_has_no_figures() -> None:
    assert figures(np.array([[np.nan, 1], [np.nan, np.nan]], dtype=np.float32), []) == [
        None,
        Moment(1, 1.0, 0.0, 1.0, 1.0),
    ]
