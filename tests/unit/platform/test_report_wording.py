"""Figures in words, and the scales of charts."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eagleray.platform.report import wording
from eagleray.platform.report.scales import (
    ChoiceScale,
    LinearScale,
    LogScale,
    PercentScale,
    StepScale,
    TimeScale,
    fit_linear,
    fit_padded,
    thinned,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (0.25, "250 ms"), (25.52, "25.5 s"), (59.97, "1 min"), (102, "1 min 42 s"),
        (120, "2 min"), (7500, "2 h 5 min"), (7200.4, "2 h"), (273600, "3 d 4 h"), (None, "-"),
        (math.nan, "-"),
    ],
)  # fmt: skip
def test_durations_use_the_two_units_that_matter(seconds: float | None, text: str) -> None:
    assert wording.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(6.32172, "6.322"), (1234567, "1,234,567"), (2.5e-5, "2.5e-05"), (4558.6, "4,559"),
     (None, "-"), (math.inf, "inf")],
)  # fmt: skip
def test_numbers_keep_four_digits(value: float | None, text: str) -> None:
    assert wording.number(value) == text


def test_other_words() -> None:
    assert wording.compact(816_000) == "816k"
    assert wording.compact(1_250_000_000) == "1.25B"
    assert wording.compact(12.3456) == "12.3"
    assert wording.percent(0.2857) == "29 %"
    assert wording.percent(0.0041) == "0.4 %"
    assert wording.percent(None) == "-"
    assert wording.size(12_272_794) == "12.3 MB"
    assert wording.size(12) == "12 B"
    assert wording.moment(0) == "1970-01-01 00:00:00 UTC"
    assert wording.counted(1, "fault") == "1 fault"
    assert wording.counted(2, "fault") == "2 faults"
    assert wording.loss_text(6.38) == "6.380"
    assert wording.loss_text(None) == "-"
    shown = [wording.parameter(v) for v in (True, None, 0.1, 3, "a", ["x", 1])]
    assert shown == ["true", "null", "0.1", "3", "a", '["x", 1]']


def labels(scale: object, count: int = 5) -> list[str]:
    return [tick.label for tick in scale.ticks(count)]  # type: ignore[attr-defined]


def test_labels_are_round_and_no_longer_than_they_need_to_be() -> None:
    assert labels(fit_linear([6.31, 7.6])) == ["6.0", "6.5", "7.0", "7.5", "8.0"]
    assert labels(fit_linear([6.6, 7.6])) == ["6.6", "6.8", "7.0", "7.2", "7.4", "7.6"]
    assert labels(fit_linear([0.0, 1.2]), 2) == ["0", "0.5", "1.0"]
    assert labels(fit_linear([4800, 8044], from_zero=True)) == ["0", "2k", "4k", "6k", "8k", "10k"]
    assert labels(fit_linear([2e-4, 1e-3], from_zero=True)) == [
        "0", "2e-4", "4e-4", "6e-4", "8e-4", "1e-3"
    ]  # fmt: skip
    assert labels(PercentScale(0, 1)) == ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]
    assert labels(StepScale(0, 3)) == ["0", "1", "2", "3"]
    assert labels(StepScale(0, 12), 4) == ["0", "5", "10"]
    assert labels(TimeScale(0, 0.5), 2)[0] == "0 s"
    assert labels(TimeScale(64, 105), 4) == ["75 s", "90 s", "105 s"]
    assert labels(TimeScale(0, 3600), 4) == ["0 min", "15 min", "30 min", "45 min", "60 min"]
    assert labels(TimeScale(0, 9 * 86400), 5) == ["0 d", "2 d", "4 d", "6 d", "8 d"]
    assert labels(ChoiceScale(("a", "b", "c")), 2) == ["a", "c"]


def test_log_scales_label_powers_of_ten_and_fall_back_on_round_numbers() -> None:
    assert labels(LogScale(1e-4, 3e-2)) == ["1e-4", "1e-3", "1e-2"]
    assert labels(LogScale(1e-4, 3e-2), 6) == [
        "1e-4", "3e-4", "1e-3", "3e-3", "1e-2", "3e-2"
    ]  # fmt: skip
    assert labels(LogScale(1, 1e12), 5) == ["1", "1000", "1M", "1B", "1,000B"]
    assert len(labels(LogScale(6, 9))) > 1
    assert math.isclose(LogScale(1, 100).at(10), 0.5)


def test_scales_hold_what_they_are_fitted_to() -> None:
    assert fit_linear([]) == LinearScale(0, 1, 0.2)
    flat = fit_linear([3.0, 3.0])
    assert flat.low < 3 < flat.high
    single = fit_padded([2.0], is_log=True)
    assert single.low < 2 < single.high
    assert isinstance(fit_padded([0.0, 1.0], is_log=True), LinearScale)
    assert isinstance(fit_padded([1.0, 8.0], is_log=True), LogScale)


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=20))
@example([5e-324])
@example([0.0, 5e-324])
@example([1e-199, 3e-200])
def test_no_value_falls_off_a_fitted_scale(values: list[float]) -> None:
    assert all(0 <= fit_padded(values).at(value) <= 1 for value in values)
    scale = fit_linear(values)
    assert all(-1e-6 <= scale.at(value) <= 1 + 1e-6 for value in values)
    assert 1 <= len(scale.ticks(5)) <= 9


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=500), st.integers(4, 60))
def test_a_thinned_line_keeps_its_ends_and_extremes(values: list[float], limit: int) -> None:
    kept = thinned(values, limit)
    assert kept[0] == 0
    assert kept[-1] == len(values) - 1
    assert len(kept) <= limit + 2
    assert {min(values), max(values)} <= {values[index] for index in kept}
    assert kept == sorted(set(kept))
