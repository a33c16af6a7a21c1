"""Sweeps without Ray: what is suggested, pruned, remembered."""

import math
from pathlib import Path
from typing import Any

import pytest

from eagleray.platform.config import (
    AshaConfig,
    ChoiceSpace,
    ConfigError,
    FloatSpace,
    IntSpace,
    ProjectConfig,
    Space,
    with_overrides,
)
from eagleray.platform.errors import NotFoundError, UsageError
from eagleray.platform.runs import RunStatus, RunStore
from eagleray.platform.storage import Storage
from eagleray.tune.history import SweepHistory, TrialStatus, best_overrides, finished_sweep
from eagleray.tune.pruning import rungs, should_stop
from eagleray.tune.search import GpSearch
from eagleray.tune.space import check_space, trial_config

SPACE: dict[str, Space] = {
    "x": FloatSpace(kind="float", low=-1.0, high=1.0),
    "lr": FloatSpace(kind="float", low=1e-4, high=1e-1, log=True),
}


@pytest.fixture
def history(tmp_path: Path) -> SweepHistory:
    runs = RunStore(Storage(tmp_path))
    return SweepHistory(runs, runs.create("s", "sweep", {}))


def run(history: SweepHistory, params: dict[str, Any], values: dict[int, float]) -> int:
    trial = history.suggest("run", params)
    for steps, value in values.items():
        history.report(trial.number, steps, value)
    return trial.number


def test_the_projects_own_values_are_tried_first(history: SweepHistory) -> None:
    search = GpSearch(SPACE, 3, 0, [10], first={"x": 0.25, "lr": 0.01})
    assert search.suggest(history) == {"x": 0.25, "lr": 0.01}
    outside = GpSearch(SPACE, 3, 0, [10], first={"x": 7.0, "lr": 0.01})
    assert outside.suggest(history)["x"] != 7.0


def test_startup_points_differ_and_lie_in_the_space(history: SweepHistory) -> None:
    space: dict[str, Space] = {
        **SPACE,
        "n": IntSpace(kind="int", low=1, high=8, log=True),
        "c": ChoiceSpace(kind="choice", values=["a", "b", "c"]),
    }
    search = GpSearch(space, 16, 5, [10])
    seen = []
    for _ in range(16):
        params = search.suggest(history)
        seen.append(tuple(params.values()))
        assert -1 <= params["x"] <= 1
        assert 1e-4 <= params["lr"] <= 1e-1
        assert params["n"] in range(1, 9)
        assert params["c"] in ("a", "b", "c")
        history.suggest("run", params)
    assert len(set(seen)) == 16
    assert {params[3] for params in seen} == {"a", "b", "c"}
    assert len({params[2] for params in seen}) >= 4


def test_the_same_history_and_seed_give_the_same_suggestion(history: SweepHistory) -> None:
    search = GpSearch(SPACE, 2, 3, [10])
    for number in range(4):
        run(history, {"x": number / 4, "lr": 0.01}, {10: (number / 4 - 0.3) ** 2})
    again = SweepHistory(history._runs, history.sweep_id)
    assert search.suggest(history) == GpSearch(SPACE, 2, 3, [10]).suggest(again)


def test_the_model_finds_the_valley(history: SweepHistory) -> None:
    space: dict[str, Space] = {"x": SPACE["x"]}
    search = GpSearch(space, 4, 0, [10])
    for _ in range(10):
        params = search.suggest(history)
        number = run(history, params, {10: (params["x"] - 0.3) ** 2})
        history.end(number, TrialStatus.FINISHED)
    best = history.best()
    assert best is not None
    assert abs(best.params["x"] - 0.3) < 0.05


def test_values_of_different_rungs_never_mix(history: SweepHistory) -> None:
    search = GpSearch({"x": SPACE["x"]}, 1, 0, [2, 6])
    # Cut early at a high loss although next to the optimum; the far ones went on and look better.
    run(history, {"x": 0.3}, {2: 5.0})
    for x in (-0.9, -0.8, 0.9):
        run(history, {"x": x}, {2: 6.0, 6: 1.0 + abs(x)})
    assert search._modelled_level(history) == 6
    told: list[tuple[float, float]] = []

    class Study:
        def add_trial(self, trial: Any) -> None:
            told.append((trial.params["x"], trial.value))

    for trial in history.trials:
        history.end(trial.number, TrialStatus.FINISHED)
    search._tell(Study(), history)  # type: ignore[arg-type]
    assert told == [(-0.9, 1.9), (-0.8, 1.8), (0.9, 1.9)]


def test_running_trials_are_pending_points(history: SweepHistory) -> None:
    search = GpSearch({"x": SPACE["x"]}, 1, 0, [10])
    for x in (-1.0, 0.0, 1.0):
        history.end(run(history, {"x": x}, {10: x * x}), TrialStatus.FINISHED)
    seen = []
    for _ in range(3):
        params = search.suggest(history)
        seen.append(params["x"])
        history.suggest("run", params)
    assert len({round(x, 3) for x in seen}) == 3


def test_a_failing_region_is_left_alone(history: SweepHistory) -> None:
    search = GpSearch({"x": SPACE["x"]}, 4, 0, [10])
    inside = 0
    for _ in range(14):
        params = search.suggest(history)
        number = history.suggest("run", params).number
        if params["x"] > 0.2:
            history.report(number, 10, math.nan)
            inside += number >= 7
        else:
            history.report(number, 10, (params["x"] + 0.5) ** 2)
            history.end(number, TrialStatus.FINISHED)
    assert inside <= 2
    assert all(t.status is not TrialStatus.RUNNING for t in history.trials)


def test_a_value_that_is_no_number_ends_the_trial(history: SweepHistory) -> None:
    number = run(history, {"x": 0.0}, {5: math.nan})
    assert history.trials[number].status is TrialStatus.DIVERGED
    assert should_stop(history, number, AshaConfig(grace_steps=5), 100)
    assert history.best() is None


def test_the_worse_two_thirds_are_cut_at_a_rung(history: SweepHistory) -> None:
    asha = AshaConfig(grace_steps=5, reduction_factor=3)
    decisions = []
    for value in (3.0, 1.0, 2.0, 0.5, 0.7, 0.6):
        number = run(history, {"x": 0.0}, {5: value})
        decisions.append(should_stop(history, number, asha, 100))
    # The first two have too few to be compared with.
    assert decisions == [False, False, True, False, True, False]
    assert rungs(asha, 100) == [5, 15, 45]


def test_nothing_is_cut_between_rungs(history: SweepHistory) -> None:
    asha = AshaConfig(grace_steps=5)
    for value in (1.0, 1.0, 1.0):
        run(history, {"x": 0.0}, {4: value})
    assert not should_stop(history, run(history, {"x": 0.0}, {4: 9.0}), asha, 100)


def test_a_trial_is_judged_once_per_rung(history: SweepHistory) -> None:
    asha = AshaConfig(grace_steps=5, reduction_factor=3)
    number = run(history, {"x": 0.0}, {5: 2.0})
    assert not should_stop(history, number, asha, 100)
    for value in (1.0, 1.0, 1.0):
        run(history, {"x": 0.0}, {5: value})
    history.report(number, 10, 1.5)
    assert not should_stop(history, number, asha, 100)
    history.report(number, 15, 1.5)
    for value in (1.0, 1.0, 1.0):
        run(history, {"x": 0.0}, {15: value})
    assert should_stop(history, number, asha, 100)


def test_the_largest_seed_suggests(history: SweepHistory) -> None:
    search = GpSearch({"x": SPACE["x"]}, 1, 2**32 - 1, [10])
    run(history, {"x": 0.0}, {10: 1.0})
    assert -1 <= search.suggest(history)["x"] <= 1


def test_the_best_is_among_those_that_got_furthest(history: SweepHistory) -> None:
    run(history, {"x": 0.0}, {5: 0.1})
    run(history, {"x": 0.1}, {5: 0.9, 10: 0.5})
    run(history, {"x": 0.2}, {5: 0.9, 10: 0.5})
    best = history.best()
    assert best is not None
    assert best.number == 1


def test_a_history_is_rebuilt_from_its_events(history: SweepHistory) -> None:
    history.end(run(history, {"x": 0.1}, {5: 0.9}), TrialStatus.PRUNED)
    number = run(history, {"x": 0.2}, {5: 0.8})
    history.report(number, 5, 0.7)  # the same step again, after a restart
    again = SweepHistory(history._runs, history.sweep_id)
    assert again.trials == history.trials
    assert [trial.number for trial in again.unfinished()] == [1]
    assert again.trials[1].values == {5: 0.7}


def test_a_trial_is_evaluated_at_every_rung() -> None:
    base = with_overrides(
        ProjectConfig(name="a"),
        {"tune.overrides": {"train.steps": 60}, "tune.asha": {"grace_steps": 7},
         "train.num_workers": 4},
    )  # fmt: skip
    trial = trial_config(base, {"train.optimizer.lr": 0.5})
    assert (trial.train.steps, trial.train.optimizer.lr) == (60, 0.5)
    assert (trial.train.eval.every_steps, trial.train.num_workers) == (7, 1)


def test_a_space_is_checked_before_anything_starts() -> None:
    with pytest.raises(UsageError, match="empty"):
        check_space(ProjectConfig(name="a"))
    wrong = {"tune.space": {"train.optimizer.lrr": {"kind": "float", "low": 0.1, "high": 1}}}
    with pytest.raises(ConfigError, match=r"did you mean `train\.optimizer\.lr`"):
        check_space(with_overrides(ProjectConfig(name="a"), wrong))
    too_high = {"tune.space": {"train.optimizer.lr": {"kind": "float", "low": 0.1, "high": 100}}}
    with pytest.raises(ConfigError, match="less than or equal to 10"):
        check_space(with_overrides(ProjectConfig(name="a"), too_high))


def test_the_best_of_the_last_finished_sweep_is_found(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    clock = iter(range(100))
    runs = RunStore(storage, clock=lambda: next(clock))
    with pytest.raises(NotFoundError, match="no finished sweep"):
        best_overrides(storage, "last")
    for value in (1, 2):
        sweep = runs.create("s", "sweep", {})
        runs.update(sweep, status=RunStatus.FINISHED, results={"best": {"train.steps": value}})
    runs.create("s", "sweep", {})  # still going on
    assert best_overrides(storage, "last") == {"train.steps": 2}
    assert finished_sweep(storage, sweep).run_id == sweep
