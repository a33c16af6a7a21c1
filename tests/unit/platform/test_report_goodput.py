"""Goodput: what of a run's wall time went into steps that count."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.platform.test_report_history import attempt, checkpoint, event, fault, life, row

from eagleray.platform.report import goodput


def start(number: int, time_s: float, step: int) -> list[dict[str, object]]:
    return [attempt(number, time_s), event("start", time_s, attempt=number, step=step)]


def test_a_run_without_faults_loses_what_it_waits() -> None:
    waits = {"data_s": 0.5, "checkpoint_s": 0.25, "eval_s": 0.25}
    made = goodput(life([row(1, step, 10.0 * step, **waits) for step in (1, 2, 3)], start(1, 1, 0)))
    assert made is not None
    assert (made.wall_s, made.useful_s, made.waited_s, made.lost_s) == (20, 18, 2, 0)
    assert made.share == 0.9
    # With no faults there is nothing that rarer ones would save.
    assert made.at(0, 300) == 0.9


def test_steps_that_are_redone_and_the_silence_before_them_are_lost() -> None:
    made = goodput(
        life(
            [row(1, 5, 10), row(1, 10, 20), row(1, 15, 30), row(2, 15, 60), row(2, 20, 70)],
            [*start(1, 1, 0), checkpoint(10, 21), fault(1, 33), *start(2, 50, 10)],
        )
    )
    assert made is not None
    # Steps 6 to 10 and 16 to 20 as they were, 11 to 15 at the pace of those; 0.1 s of data each.
    assert made.useful_s == pytest.approx(3 * 9.9)
    assert made.waited_s == pytest.approx(0.2)
    assert made.lost_s == pytest.approx(60 - 3 * 9.9 - 0.2)


def test_the_cost_of_a_fault_is_spread_over_the_time_to_the_next() -> None:
    rows = [row(1 + step // 6, step, 10.0 * step + 30 * (step > 5), data_s=0) for step in range(11)]
    made = goodput(life(rows, [*start(1, 0, 0), fault(1, 55), *start(2, 80, 5)]))
    assert made is not None
    assert (made.wall_s, made.useful_s, made.lost_s) == (130, 100, 30)
    assert made.at(1, 300) == pytest.approx(0.9)
    assert made.at(1, 20) == 0


def test_the_night_between_a_stop_and_a_resume_is_no_wall_time() -> None:
    rows = [row(1, 1, 10, data_s=0), row(1, 2, 20, data_s=0)]
    rows += [row(2, 3, 40_030, data_s=0), row(2, 4, 40_040, data_s=0)]
    made = goodput(life(rows, [*start(1, 1, 0), *start(2, 40_020, 2)]))
    assert made is not None
    assert (made.wall_s, made.share) == (30, 1)


def test_a_run_with_one_row_has_none() -> None:
    assert goodput(life([row(1, 5, 10)], start(1, 1, 0))) is None
    assert goodput(life([], [])) is None


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40), st.floats(0, 500)), max_size=30),
    st.dictionaries(st.integers(0, 500), st.integers(0, 40), min_size=1, max_size=4),
)
def test_the_share_is_one_whatever_a_run_left_behind(
    rows: list[tuple[int, int, float]], attempts: dict[int, int]
) -> None:
    begun = [e for n, at in enumerate(sorted(attempts), 1) for e in start(n, at, attempts[at])]
    made = goodput(life([row(*each) for each in rows], begun))
    if made is not None:
        assert 0 <= made.share <= 1
        assert made.lost_s >= 0
        assert 0 <= made.at(3, 300) <= 1
