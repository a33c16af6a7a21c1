"""The trials that a report reads are those of the sweep itself."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from eagleray.platform.report.trials import best_trial, ranked, read_trials
from eagleray.platform.runs import RunStore
from eagleray.platform.storage import Storage
from eagleray.tune.history import SweepHistory, TrialStatus

TRIAL = st.tuples(
    st.lists(st.floats(1, 9) | st.just(float("nan")), max_size=3),
    st.sampled_from(list(TrialStatus)),
)


@given(trials=st.lists(TRIAL, max_size=6))
def test_the_best_trial_of_a_report_is_that_of_the_sweep(
    trials: list[tuple[list[float], TrialStatus]], tmp_path_factory: object
) -> None:
    folder: Path = tmp_path_factory.mktemp("sweep")  # type: ignore[attr-defined]
    runs = RunStore(Storage(folder))
    sweep = runs.create("s", "sweep", {})
    history = SweepHistory(runs, sweep)
    for values, status in trials:
        trial = history.suggest("run", {"a": 1})
        for steps, value in enumerate(values, 1):
            history.report(trial.number, steps, value)
        if status is not TrialStatus.RUNNING:
            history.end(trial.number, status)
    read = read_trials(runs.events(sweep))
    assert [(t.number, t.status, t.values) for t in read] == [
        (t.number, t.status.value, t.values) for t in history.trials
    ]
    ours, theirs = best_trial(read), history.best()
    assert (ours and ours.number) == (theirs and theirs.number)


def test_trials_are_ranked_by_how_far_they_got_then_by_value() -> None:
    events = []
    for number, (steps, value, status) in enumerate(
        [(4, 1.0, "pruned"), (8, 3.0, "finished"), (8, 2.0, "finished"), (8, 0.5, "diverged")]
    ):
        events += [
            {"event": "trial", "number": number, "run": "r", "params": {}, "time_s": 1.0},
            {"event": "value", "number": number, "steps": steps, "value": value, "time_s": 2.0},
            {"event": "trial_end", "number": number, "status": status, "time_s": 4.0},
        ]
    events += [
        {"event": "trial", "number": 4, "run": "r", "params": {}, "time_s": 5.0},
        {"event": "value", "number": 9, "steps": 1, "value": 0.1, "time_s": 6.0},
        {"event": "attempt", "time_s": 1.0},
    ]
    trials = read_trials(events)
    assert [trial.number for trial in ranked(trials)] == [2, 1, 0, 3, 4]
    assert trials[0].seconds == 3.0
    assert trials[4].seconds is None
    assert trials[4].value is None
