"""Training while processes are killed: the same bits, each sample once, or one clear failure."""

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from tests.chaos.runs import assert_same
from tools.redis_cluster import RedisCluster

from eagleray.actors.cache.frame import digest_key
from eagleray.actors.trainer.progress import Progress
from eagleray.actors.trainer.trainer import FatalRunError
from eagleray.platform.errors import InfeasibleError, RunFailedError
from eagleray.platform.runs import RunStatus
from eagleray.project import Project, TrainedRun

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400), pytest.mark.usefixtures("ray_cluster")]
MakeProject = Callable[..., Project]


class KillOnce:
    """Ends a process by SIGKILL at the first row at or after a step."""

    def __init__(
        self, step: int, find: Callable[[str, Progress], int | None], attempt: int = 1
    ) -> None:
        self._step, self._find, self._attempt = step, find, attempt
        self.pid: int | None = None

    def __call__(self, run_id: str, progress: Progress) -> None:
        is_due = any(
            row.step >= self._step and row.attempt >= self._attempt for row in progress.rows
        )
        if self.pid is None and is_due:
            self.pid = self._find(run_id, progress)
            if self.pid is not None:
                os.kill(self.pid, signal.SIGKILL)


class KillWhileMeeting:
    """Ends a training process by SIGKILL before those of the first attempt have met."""

    pid: int | None = None

    def __call__(self, _: str, progress: Progress) -> None:
        if self.pid is None and not progress.workers:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "_TrainProcess" in " ".join(process.cmdline()):
                        process.kill()
                        self.pid = process.pid
                        return


def all_of(kills: Sequence[Callable[[str, Progress], None]]) -> Callable[[str, Progress], None]:
    def follow(run_id: str, progress: Progress) -> None:
        for kill in kills:
            kill(run_id, progress)

    return follow


def worker(rank: int) -> Callable[[str, Progress], int | None]:
    def find(_: str, progress: Progress) -> int | None:
        pids = {info.rank: info.pid for info in progress.workers}
        return pids.get(rank)

    return find


def named_actor(prefix: str) -> Callable[[str, Progress], int | None]:
    def find(run_id: str, _: Progress) -> int | None:
        handle = ray.get_actor(f"{prefix}:{run_id}")
        pid: int = ray.get(handle.__ray_call__.remote(lambda _: os.getpid()), timeout=30)
        return pid

    return find


def child(title: str) -> Callable[[str, Progress], int | None]:
    def find(_: str, __: Progress) -> int | None:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.cmdline()[:1] and process.cmdline()[0].startswith(title):
                    return process.pid
        return None

    return find


def test_nothing_of_a_run_listens_beyond_loopback(watched: Any) -> None:
    assert {address.removeprefix("::ffff:") for address in watched.addresses} == {"127.0.0.1"}


def test_the_weights_of_the_domains_follow_the_losses(watched: Any) -> None:
    # The runs below must decide alike after each kill, or they would end with other weights.
    assert len(watched.weights) == 200 // 8
    assert len({weights["long"] for weights in watched.weights}) > 5


def test_killed_workers_cost_neither_bits_nor_samples(
    make_project: MakeProject, undisturbed: TrainedRun
) -> None:
    # The first before the workers have met. Each worker reads for itself.
    project = make_project("train.max_failures=3", "data.loaders=0")
    first = KillWhileMeeting()
    kills = [KillOnce(24, worker(1)), KillOnce(74, worker(0), attempt=2)]
    run = project.train(all_of([first, *kills]))
    assert all(kill.pid is not None for kill in (first, *kills))
    assert_same(run, undisturbed)
    events = [event["event"] for event in project.runs.events(run.run_id)]
    # An attempt of those that did not all meet may have been begun as well.
    assert events.count("attempt") == run.attempts
    assert run.attempts in (3, 4)
    # No snapshot was taken up: each goes on from the step that the survivor had done.
    rows = project.runs.metrics(run.run_id)
    trained = sorted({row["attempt"] for row in rows})
    assert len(trained) == 3
    for before, after in itertools.pairwise(trained):
        last = max(row["step"] for row in rows if row["attempt"] == before)
        first = min(row["step"] for row in rows if row["attempt"] == after)
        assert last <= first <= last + 2


def test_a_killed_store_and_a_killed_recorder_cost_neither_bits_nor_samples(
    make_project: MakeProject, undisturbed: TrainedRun
) -> None:
    # Between snapshots far apart: what the store alone has heard of is lost with it.
    kills = [KillOnce(84, named_actor("checkpoint-store")), KillOnce(14, named_actor("recorder"))]
    run = make_project("train.checkpoint.every_steps=60", "data.loaders=2").train(all_of(kills))
    assert all(kill.pid is not None for kill in kills)
    assert_same(run, undisturbed)


def test_a_run_that_dies_too_often_fails_and_is_resumed_past_a_damaged_checkpoint(
    make_project: MakeProject, undisturbed: TrainedRun
) -> None:
    project = make_project("train.max_failures=0")
    kill = KillOnce(34, worker(1))
    with pytest.raises(RunFailedError, match="resume"):
        project.train(kill)
    assert kill.pid is not None
    (state,) = project.runs.all()
    assert state.status is RunStatus.FAILED
    assert "1 failure, more than train.max_failures = 0; the last: rank 1:" in state.message
    steps = sorted(project.storage.path("runs", state.run_id, "checkpoints").glob("0*"))
    damaged = next(steps[-1].glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    run = project.resume(state.run_id)
    assert_same(run, undisturbed)
    events = [event["event"] for event in project.runs.events(state.run_id)]
    assert events.count("checkpoint_damaged") == 1
    assert project.runs.state(state.run_id).status is RunStatus.FINISHED


def test_a_master_of_the_cache_cluster_killed_in_training_costs_neither_bits_nor_samples(
    make_project: MakeProject, undisturbed: TrainedRun, fragile_redis_cluster: RedisCluster
) -> None:
    cluster = fragile_redis_cluster
    project = make_project(f"redis.url={cluster.url}")
    block = f"{project.build_data().digest}:train:0".encode()
    # Of the three masters the one that keeps the first block, which every few batches need.
    victim = cluster.owner(digest_key(block))
    sizes: list[int] = []

    def kill(_: str, progress: Progress) -> None:
        if not sizes and any(row.step >= 40 for row in progress.rows):
            sizes.append(cluster.ask(victim, "DBSIZE"))
            cluster.processes[victim].kill()

    run = project.train(kill)
    assert sizes
    assert sizes[0] > 0
    assert run.attempts == 1
    assert_same(run, undisturbed)


def test_a_killed_controller_ends_the_run_and_gives_its_places_back(
    make_project: MakeProject,
) -> None:
    project = make_project()
    kill = KillOnce(4, child("ray::Controller"))
    with pytest.raises(RunFailedError, match="resume"):
        project.train(kill)
    assert kill.pid is not None
    # This process is still the job that they belong to: nobody else would free them.
    groups = ray.util.placement_group_table().values()
    assert groups
    assert {group["state"] for group in groups} == {"REMOVED"}


def test_a_damaged_shard_ends_the_run_with_its_name(make_project: MakeProject) -> None:
    project = make_project()
    dataset = project.build_data()
    shard = next(iter(sorted(Path(dataset.folder).glob("*.train-*.bin"))))
    data = bytearray(shard.read_bytes())
    data[-9] ^= 1
    shard.write_bytes(data)
    with pytest.raises(FatalRunError, match=shard.name):
        project.train()
    (state,) = project.runs.all()
    events = [event["event"] for event in project.runs.events(state.run_id)]
    assert "fatal" in events
    assert events.count("attempt") == 1


def test_more_workers_than_the_cluster_holds_is_refused_at_once(make_project: MakeProject) -> None:
    project = make_project("train.num_workers=8", "train.cpus_per_worker=4")
    with pytest.raises(InfeasibleError, match="8 training workers of 4 CPU each") as caught:
        project.train()
    assert caught.value.exit_code == 3
    assert project.runs.all()[0].status is RunStatus.FAILED
