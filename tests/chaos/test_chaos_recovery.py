"""What faults cost: a dead process no step, a dead place nothing, a hung process its deadline."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from eagleray.actors.chaos import ChaosPlan, Injector
from eagleray.project import Project, TrainedRun

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400), pytest.mark.usefixtures("ray_cluster")]
MakeProject = Callable[..., Project]
STEPS = 200


def train(project: Project, *faults: dict[str, Any]) -> tuple[TrainedRun, Injector]:
    """Train through faults, each of which must happen."""
    injector = Injector(ChaosPlan.model_validate({"faults": faults}))
    run = project.train(injector)
    assert injector.waiting == 0
    assert len(injector.fired) == len(faults)
    return run, injector


def assert_same(run: TrainedRun, undisturbed: TrainedRun) -> None:
    """The same weights from the same samples, each exactly once."""
    assert (run.steps, run.samples, run.missing, run.doubled) == (STEPS, STEPS * 8, 0, 0)
    assert run.model is not None
    assert undisturbed.model is not None
    assert run.model.artifact == undisturbed.model.artifact
    assert run.eval_loss == undisturbed.eval_loss


def trained(project: Project, run: TrainedRun) -> list[tuple[int, int]]:
    """First and last step of each attempt that trained."""
    rows = project.runs.metrics(run.run_id)
    attempts = sorted({row["attempt"] for row in rows})
    steps = [[row["step"] for row in rows if row["attempt"] == attempt] for attempt in attempts]
    return [(min(of_one), max(of_one)) for of_one in steps]


def test_stopped_and_killed_processes_are_replaced_and_cost_no_step(
    make_project: MakeProject, undisturbed: TrainedRun
) -> None:
    project = make_project("train.max_failures=4", "train.spares=1")
    run, _ = train(
        project,
        {"kind": "stop", "rank": 0, "step": 30},
        {"kind": "kill", "rank": 1, "step": 90},
        {"kind": "kill", "rank": 0, "step": 150},
    )
    assert_same(run, undisturbed)
    assert run.attempts == 4
    parts = trained(project, run)
    for (_, last), (first, _) in itertools.pairwise(parts):
        # No snapshot was taken up, though there was one each ten steps.
        assert last <= first <= last + 2
    events = [event["event"] for event in project.runs.events(run.run_id)]
    assert events.count("recovery") == events.count("fault") == 3


def test_workers_of_ray_train_that_die_cost_nothing(
    make_project: MakeProject, undisturbed: TrainedRun
) -> None:
    project = make_project()
    run, _ = train(project, {"role": "worker", "rank": 1, "step": 20})
    assert_same(run, undisturbed)
    assert run.attempts == 1


def test_without_its_gang_a_run_goes_on_from_a_snapshot(
    make_project: MakeProject, undisturbed: TrainedRun
) -> None:
    project = make_project("data.loaders=2")
    run, _ = train(project, {"role": "gang", "step": 40}, {"role": "loader", "step": 120})
    assert_same(run, undisturbed)
    assert run.attempts == 2
