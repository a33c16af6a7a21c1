"""How far ahead is read, by how many: from the times of reads and steps."""

import pytest

from eagleray.actors.data.pace import HANDOVER_S, MAX_BYTES, MAX_DEPTH, MAX_FETCHERS, Pace


def settled(read_s: float, step_s: float, *, num_bytes: int = 1000, calls: int = 100) -> Pace:
    """A reader whose callers never wait."""
    pace = Pace()
    for _ in range(calls):
        pace.read(read_s, num_bytes)
        pace.asked(step_s, 0.0, was_ready=True)
    return pace


def test_what_was_set_is_kept() -> None:
    pace = Pace(3, 2)
    for _ in range(100):
        pace.read(1.0, 10**9)
        pace.asked(0.001, 1.0, was_ready=False)
    assert (pace.depth, pace.most, pace.fetchers) == (3, 3, 2)
    assert Pace(0).depth == 0


@pytest.mark.parametrize(
    ("read_s", "step_s", "fetchers"),
    [(0.01, 0.05, 1), (0.04, 0.05, 2), (0.08, 0.05, 3), (0.08, 0.02, 6), (5.0, 0.01, MAX_FETCHERS)],
)
def test_as_many_threads_as_reads_must_be_under_way(
    read_s: float, step_s: float, fetchers: int
) -> None:
    pace = settled(read_s, step_s)
    assert pace.fetchers == fetchers
    assert pace.depth >= 2 * fetchers


@pytest.mark.parametrize(("read_s", "step_s"), [(1e-4, 1.0), (1.0, 1e-5), (1e-4, 1e-5)])
def test_what_is_cheap_to_read_or_at_once_used_up_is_read_by_the_caller(
    read_s: float, step_s: float
) -> None:
    assert settled(read_s, step_s).depth == 0


def test_the_choice_between_threads_and_none_does_not_flutter() -> None:
    pace = settled(HANDOVER_S * 0.7, 1.0)
    assert pace.depth == 0
    changes = 0
    for turn in range(200):
        before = pace.depth
        pace.read(HANDOVER_S * (1.2 if turn % 2 else 0.8), 1000)
        changes += (pace.depth == 0) != (before == 0)
    assert changes == 0


def test_reads_that_become_slow_are_made_ahead_again() -> None:
    pace = settled(1e-4, 0.05)
    pace.read(0.04, 1000)
    assert pace.depth > 0


def test_waiting_deepens_and_calm_makes_shallow_again() -> None:
    pace = settled(0.01, 0.05)
    least = pace.depth
    for _ in range(3):
        pace.asked(0.05, 0.02, was_ready=False)
    assert pace.depth > 2 * least
    for _ in range(100):
        pace.asked(0.05, 0.02, was_ready=False)
    assert pace.depth == MAX_DEPTH
    for _ in range(3000):
        pace.asked(0.05, 0.0, was_ready=True)
    assert pace.depth == least


def test_what_is_held_ahead_stays_within_its_bytes() -> None:
    pace = settled(0.5, 0.01, num_bytes=MAX_BYTES // 3)
    assert pace.depth == pace.most == 3
    assert settled(0.5, 0.01, num_bytes=2 * MAX_BYTES).depth == 1
