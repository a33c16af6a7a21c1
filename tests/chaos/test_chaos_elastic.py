"""Nodes join, die and are drained under a run: no step lost that need not be, no sample twice."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tools.ray_node import RayNode

from eagleray.actors.chaos import ChaosPlan, Injector
from eagleray.actors.checkpoint.manifest import CheckpointFolder, newest_intact
from eagleray.actors.checkpoint.samples import SampleLog, audit
from eagleray.actors.trainer.progress import Progress
from eagleray.platform.cluster import session
from eagleray.platform.config import load_config
from eagleray.project import Project

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(500)]
MakeProject = Callable[..., Project]


class EnoughError(Exception):
    """All has been seen."""


class Scenario:
    """Adds and takes away nodes, each when the run has come to train as it is to."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._nodes = [RayNode(address, 1)]
        self._nodes[0].wait_joined()
        self._injector = Injector(ChaosPlan.model_validate({"faults": [{"role": "node"}]}))
        self._stages = iter(self._life())
        self._wanted = next(self._stages)
        self._step = 0
        self.run_id = ""

    def __call__(self, run_id: str, progress: Progress) -> None:
        self.run_id, self._progress = run_id, progress
        rows = [row for row in progress.rows if row.attempt == progress.attempt]
        if len(progress.workers) == self._wanted and rows and rows[-1].step > self._step:
            wanted = next(self._stages, None)
            if wanted is None:
                raise EnoughError
            self._wanted = wanted

    def _life(self) -> Iterator[int]:
        """Numbers of workers that are waited for; what is done about it between them."""
        yield 2
        self._nodes[0].drain(60)
        yield 1
        self._nodes.append(RayNode(self._address, 1))
        yield 2
        while not self._injector.fired:
            self._injector(self.run_id, self._progress)
            yield 2
        yield 1

    def close(self) -> None:
        """End all nodes."""
        for node in self._nodes:
            node.close()


@pytest.fixture
def head(tmp_path: Path) -> Iterator[str]:
    """Address of a private cluster of one CPU."""
    (tmp_path / "eagleray.yaml").write_text(
        "name: test\ncluster: {num_cpus: 1, object_store_bytes: 200MB, start_timeout_s: 120}\n"
    )
    with session(load_config(tmp_path)) as info:
        yield info.address


def test_a_run_follows_the_nodes_that_come_and_go(make_project: MakeProject, head: str) -> None:
    project = make_project(
        "train.num_workers=[1, 2]", "train.steps=1000000", "train.resize_after_s=0.5",
        "train.max_failures=5", "train.eval.every_steps=1000000", "train.log_every_steps=5",
    )  # fmt: skip
    scenario = Scenario(head)
    try:
        with pytest.raises(EnoughError):
            project.train(scenario)
    finally:
        scenario.close()
    run_id = scenario.run_id
    events = project.runs.events(run_id)
    assert [e["world_size"] for e in events if e["event"] == "attempt"] == [2, 1, 2, 1]
    resizes = [(e["from"], e["to"]) for e in events if e["event"] == "resize"]
    assert resizes == [(2, 1), (1, 2)]
    # All but the killed node were planned for: the next attempt begins where the one before ended.
    rows = project.runs.metrics(run_id)
    last = {row["attempt"]: row["step"] for row in rows}
    starts = {e["attempt"]: e["step"] for e in events if e["event"] == "start"}
    for attempt in (2, 3):
        assert last[attempt - 1] <= starts[attempt] < last[attempt - 1] + 5
    assert last[3] - 20 < starts[4] <= last[3] + 5
    # What has trained the newest checkpoint is each sample of the order, once.
    found, damaged = newest_intact(CheckpointFolder(project.storage, run_id))
    assert found is not None
    assert not damaged
    assert found.step >= starts[4]
    log = SampleLog(project.storage, run_id).chain(found.samples)
    result = audit(log, project.build_data().sizes("train"))
    assert (result.steps, result.samples) == (found.step, found.step * 8)
    assert result.is_exact
