"""The network between two nodes is cut while they train: the run goes on once it is mended."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.chaos.two_nodes import HEAD, PORT, TwoNodes, why_not

from eagleray.project import Project, TrainedRun

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
EAGLERAY = str(Path(sys.executable).with_name("eagleray"))
Until = Callable[..., None]


@pytest.fixture
def nodes(tmp_path: Path, until: Until) -> Iterator[TwoNodes]:
    if reason := why_not():
        pytest.skip(reason)
    temp = Path(tempfile.mkdtemp(prefix="er"))
    try:
        with TwoNodes(tmp_path, temp) as made:
            until(made.are_up, "two nodes", 300)
            yield made
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def test_a_link_that_is_cut_and_mended_costs_neither_bits_nor_samples(
    nodes: TwoNodes,
    make_project: Callable[..., Project],
    undisturbed: TrainedRun,
    until: Until,
    tmp_path: Path,
) -> None:
    project = make_project()

    def steps() -> list[tuple[int, int]]:
        runs = project.runs.all()
        rows = project.runs.metrics(runs[0].run_id) if runs else []
        return [(row["attempt"], row["step"]) for row in rows]

    # One CPU on each node: the ranks cannot sit on one.
    command = nodes.command(
        HEAD, EAGLERAY, "train", "--json", f"cluster.address={HEAD}:{PORT}", "train.max_failures=9"
    )
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        training = subprocess.Popen(
            command, cwd=project.loaded.root, env=nodes.environment, stdout=out, stderr=err
        )
        try:
            until(lambda: steps()[-1:] >= [(1, 40)], "step 40", 300)
            nodes.set_link("down")
            until(nodes.is_given_up, "the end of the head's patience", 60)
            before = len(steps())
            nodes.set_link("up")
            until(lambda: training.poll() is not None, "the end of the run", 300)
        finally:
            training.kill()
            training.wait()
    assert training.returncode == 0, (tmp_path / "err").read_text()
    found = json.loads((tmp_path / "out").read_text())
    assert (found["steps"], found["samples"]) == (200, 1600)
    assert (found["missing"], found["doubled"]) == (0, 0)
    assert undisturbed.model is not None
    assert found["model"]["artifact"] == undisturbed.model.artifact
    # Alone, neither side has gone on; and nobody of an attempt that was over wrote beside the next.
    seen = steps()
    assert seen[before - 1][1] < 200
    assert len(set(seen)) == len(seen)
    assert seen == sorted(seen, key=lambda row: row[0])
    assert seen[-1][0] > 1
