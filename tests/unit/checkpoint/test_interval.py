"""How often snapshots are taken."""

import pytest

from eagleray.actors.checkpoint.interval import SnapshotPace, interval_steps
from eagleray.platform.config import CheckpointConfig, ConfigError, ProjectConfig, with_overrides


@pytest.mark.parametrize(
    ("cost_s", "step_s", "mtbf_s", "budget", "steps"),
    [
        (2.0, 1.0, 10_000, 0.5, 200),  # Young's optimum: sqrt(2 * 2 * 10,000)
        (2.0, 0.5, 10_000, 0.5, 400),
        (2.0, 1.0, 10_000, 0.005, 400),  # the budget asks for less than the optimum does
        (0.5, 1.5, 100, 0.5, 7),
        (0.0, 1.0, 100, 0.005, 1),
        (1e-9, 10.0, 1.0, 0.005, 1),
        (1.0, 0.0, 50.0, 0.5, 9_999_000_000),
    ],
)
def test_the_interval_is_the_optimum_within_the_budget(
    cost_s: float, step_s: float, mtbf_s: float, budget: float, steps: int
) -> None:
    assert interval_steps(cost_s, step_s, mtbf_s, budget) == pytest.approx(steps, rel=1e-9)


def test_an_interval_never_costs_more_than_the_budget() -> None:
    for cost_s in (0.001, 0.1, 3.0):
        for step_s in (0.01, 1.0):
            steps = interval_steps(cost_s, step_s, 1e-6, 0.005)
            assert cost_s / (steps * step_s) <= 0.005 * 1.0002


def due(pace: SnapshotPace, steps: range) -> list[int]:
    return [done for done in steps if pace.is_due(done)]


def test_a_number_means_multiples_of_it_wherever_a_run_begins() -> None:
    pace = SnapshotPace(CheckpointConfig(every_steps=4), start=6)
    assert not pace.is_auto
    assert due(pace, range(7, 20)) == [8, 12, 16]


def test_auto_follows_cost_and_duration_of_steps() -> None:
    now = [100.0]
    config = CheckpointConfig(every_steps="auto", mtbf_s=10_000, overhead_budget=0.5)
    pace = SnapshotPace(config, start=30, clock=lambda: now[0])
    assert pace.is_auto
    assert due(pace, range(31, 45)) == [40]
    now[0] += 20.0  # two seconds a step
    assert pace.propose(40, cost_s=0.0) == 10  # nothing is known yet
    pace.follow(40, 10)
    assert due(pace, range(41, 55)) == [50]
    now[0] += 20.0
    assert pace.propose(50, cost_s=2.0) == 100  # 200 s at two seconds a step
    pace.follow(50, 100)
    assert due(pace, range(51, 200)) == [150]


def test_ranks_that_follow_the_same_numbers_agree_whatever_they_measure() -> None:
    config = CheckpointConfig(every_steps="auto")
    first, second = (
        SnapshotPace(config, 0, clock=iter(times).__next__) for times in ((0.0, 1.0), (5.0, 900.0))
    )
    for pace in (first, second):
        pace.follow(10, 17)
    assert due(first, range(11, 60)) == due(second, range(11, 60)) == [27, 44]


@pytest.mark.parametrize("every", [0, "often", 1.5])
def test_an_interval_that_is_none_is_refused_once(every: object) -> None:
    with pytest.raises(ConfigError) as refused:
        with_overrides(ProjectConfig(name="t"), {"train.checkpoint.every_steps": every})
    assert str(refused.value).count("every_steps") == 1
    assert "must be a number of steps, at least 1, or auto" in str(refused.value)


@pytest.mark.parametrize(("every", "read"), [("auto", "auto"), ("7", 7), (30, 30)])
def test_an_interval_is_a_number_or_auto(every: object, read: object) -> None:
    changed = with_overrides(ProjectConfig(name="t"), {"train.checkpoint.every_steps": every})
    assert changed.train.checkpoint.every_steps == read
