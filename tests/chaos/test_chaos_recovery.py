"""What faults cost: a dead process no step, a dead place nothing, a hung process its deadline."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import ray
from tests.chaos.runs import assert_same

from eagleray.actors.chaos import ChaosPlan, Injector
from eagleray.actors.trainer.progress import Progress
from eagleray.platform.errors import RunFailedError
from eagleray.project import Project, TrainedRun

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400), pytest.mark.usefixtures("ray_cluster")]
MakeProject = Callable[..., Project]


class Notice:
    """At a step, gives the gang notice that a node is being taken away; once."""

    def __init__(self, step: int) -> None:
        self._step, self.is_given = step, False

    def __call__(self, run_id: str, progress: Progress) -> None:
        if not self.is_given and progress.rows and progress.rows[-1].step >= self._step:
            gang: Any = ray.get_actor(f"gang:{run_id}")
            ray.get(gang.save.remote("a node is being taken away"), timeout=30)
            self.is_given = True


def train(
    project: Project, *faults: dict[str, Any], notice: Notice | None = None
) -> tuple[TrainedRun, Injector]:
    """Train through faults, each of which must happen."""
    injector = Injector(ChaosPlan.model_validate({"faults": faults}))

    def follow(run_id: str, progress: Progress) -> None:
        injector(run_id, progress)
        if notice is not None:
            notice(run_id, progress)

    run = project.train(follow)
    assert injector.waiting == 0
    assert len(injector.fired) == len(faults)
    return run, injector


def test_a_stopped_process_counts_as_a_hang_and_not_as_a_death(make_project: MakeProject) -> None:
    project = make_project("train.max_failures=0", "train.max_hangs=1", "train.spares=0")
    stops = [{"kind": "stop", "role": "process", "rank": rank, "step": 20} for rank in (1, 0)]
    injector = Injector(ChaosPlan.model_validate({"faults": stops}))
    with pytest.raises(RunFailedError, match=r"2 hangs, more than train\.max_hangs = 1") as caught:
        project.train(injector)
    assert "resume" in caught.value.fix
    (state,) = project.runs.all()
    messages = [e["message"] for e in project.runs.events(state.run_id) if e["event"] == "fault"]
    told = "its process was stopped and was killed"
    assert messages[:2] == [f"rank 1: {told}", f"rank 0: {told}"]


def trained(project: Project, run: TrainedRun) -> list[tuple[int, int]]:
    """First and last step of each attempt that trained."""
    rows = project.runs.metrics(run.run_id)
    attempts = sorted({row["attempt"] for row in rows})
    steps = [[row["step"] for row in rows if row["attempt"] == attempt] for attempt in attempts]
    return [(min(of_one), max(of_one)) for of_one in steps]


def test_processes_places_gang_and_loader_fail_in_one_run_and_the_bits_stay(
    make_project: MakeProject, undisturbed: TrainedRun
) -> None:
    # One run for all, as the start of each takes a third of a minute.
    project = make_project("train.max_failures=5", "train.spares=1", "data.loaders=2")
    notice = Notice(165)
    run, _ = train(
        project,
        {"kind": "stop", "role": "process", "rank": 0, "step": 20},
        {"kind": "kill", "role": "process", "rank": 1, "step": 60},
        {"kind": "kill", "role": "worker", "rank": 1, "step": 90},
        {"kind": "kill", "role": "loader", "step": 110},
        {"kind": "kill", "role": "gang", "step": 140},
        notice=notice,
    )
    assert_same(run, undisturbed)
    assert notice.is_given
    # Neither a worker of Ray Train nor a loader is missed.
    assert run.attempts == 5
    parts = trained(project, run)
    for before, after in itertools.pairwise(parts[:3]):
        # No snapshot was taken up, though there was one each ten steps.
        assert before[1] <= after[0] <= before[1] + 2
    # Nothing of the gang's processes is left; the store has the newest snapshot.
    assert parts[2][1] - 30 < parts[3][0] <= parts[2][1] + 2
    # At the notice all pause after one step, with a snapshot of it, and go on.
    events = project.runs.events(run.run_id)
    (begun,) = [e["step"] for e in events if e["event"] == "start" and e["attempt"] == 5]
    assert parts[3][1] <= begun < parts[3][1] + 2
    names = [event["event"] for event in events]
    assert names.count("recovery") == 2
    assert (names.count("preemption"), names.count("resized"), names.count("resize")) == (1, 1, 0)


def test_a_rank_that_hangs_in_a_call_is_noticed_with_all_stacks_and_the_bits_stay(
    make_project: MakeProject, undisturbed: TrainedRun
) -> None:
    timeout_s = 10
    project = make_project(
        "train.max_failures=3", "train.spares=1", f"train.step_timeout_s={timeout_s}"
    )
    run, injector = train(project, {"kind": "hang", "role": "process", "rank": 1, "step": 60})
    assert_same(run, undisturbed)
    [struck], events = injector.fired, project.runs.events(run.run_id)
    hangs = {event["rank"]: event for event in events if event["event"] == "hang"}
    assert hangs[1]["pid"] == struck.pid
    assert hangs[1]["message"].startswith("it hangs: killed")
    silent_s = hangs[1]["time_s"] - struck.time_s
    assert timeout_s - 1 < silent_s < 3 * timeout_s
    # All ranks' stacks; that of the one that hangs shows where.
    assert set(hangs) == {0, 1}
    folder = project.storage.path("runs", run.run_id)
    stacks = {rank: (folder / hang["stacks"]).read_text() for rank, hang in hangs.items()}
    assert all("actors/trainer/loop.py" in text for text in stacks.values())
    [fault] = [event["ranks"] for event in events if event["event"] == "fault"]
    # Both, if it hangs where it had only to wait for the other as well: then nobody can tell.
    assert fault in ([1], [0, 1])
