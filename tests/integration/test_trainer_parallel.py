"""Data-parallel training over real process groups: equal to one process, exact through a resize."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from eagleray.actors.checkpoint.manifest import CheckpointFolder
from eagleray.actors.checkpoint.samples import SampleLog, audit
from eagleray.actors.checkpoint.state import Checkpoint
from eagleray.platform.storage import Storage

pytestmark = pytest.mark.timeout(300)
PROGRAM = Path(__file__).with_name("parallel_rank.py")
NUM_RANKS = 3
# Three for the exact resume, since the sum of two floats does not depend on their order.
PHASES = (
    "alone:1:8", "two:2:8", "three:3:8", "stopped:3:3", "stopped:3:8",
    "resized:3:2", "resized:1:5", "resized:2:8",
)  # fmt: skip
Rows = dict[int, tuple[float, float, float | None]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all phases; the same three processes run them one after the other."""
    folder = tmp_path_factory.mktemp("parallel")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder), str(rank), *PHASES],
            stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(NUM_RANKS)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=280)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * NUM_RANKS, errors
    return folder


def rows(folder: Path) -> Rows:
    """Step -> loss, gradient norm, held-out loss; the last word on a step that was redone."""
    lines = (json.loads(line) for line in (folder / "rows").read_text().splitlines())
    return {step: (loss, norm, held_out) for step, loss, norm, held_out in lines}


def final(folder: Path) -> Checkpoint:
    checkpoints = CheckpointFolder(Storage(folder), "run")
    return checkpoints.load(checkpoints.steps()[-1])


def noise(folder: Path, rank: int) -> dict[int, list[float]]:
    """Step -> the random numbers that a rank drew in it."""
    lines = (folder / f"noise-{rank}").read_text().splitlines()
    return {step: drawn for step, drawn in map(json.loads, lines)}


def assert_exact(folder: Path) -> None:
    segments = SampleLog(Storage(folder), "run").chain(final(folder).samples)
    assert np.concatenate([s.ids_SG.ravel() for s in segments]).tolist() == list(range(48))
    assert audit(segments, [1000]).is_exact


@pytest.mark.parametrize("name", ["two", "three"])
def test_many_ranks_take_the_steps_of_one(trained: Path, name: str) -> None:
    alone = rows(trained / "alone")
    many = rows(trained / name)
    assert many.keys() == alone.keys()
    for step, (loss, norm, held_out) in many.items():
        assert loss == pytest.approx(alone[step][0], rel=1e-5)
        assert norm == pytest.approx(alone[step][1], rel=1e-4)
        expected = alone[step][2]
        assert held_out == (expected and pytest.approx(expected, rel=1e-5))
    ours, theirs = final(trained / name).arrays, final(trained / "alone").arrays
    for array_name, array in theirs.items():
        if not array_name.startswith("rng."):
            assert np.allclose(ours[array_name], array, atol=1e-5), array_name
    assert_exact(trained / name)


def test_three_ranks_that_stop_and_resume_end_with_the_same_bits(trained: Path) -> None:
    whole, parts = final(trained / "three"), final(trained / "stopped")
    assert whole.arrays.keys() == parts.arrays.keys()
    for name, array in whole.arrays.items():
        assert np.array_equal(array, parts.arrays[name]), name
    assert_exact(trained / "stopped")


def test_each_rank_draws_after_a_resume_what_it_would_have_drawn(trained: Path) -> None:
    for rank in range(NUM_RANKS):
        drawn = noise(trained / "stopped", rank)
        assert drawn == noise(trained / "three", rank)
        assert len({first for first, *_ in drawn.values()}) == len(drawn) == 8


def test_ranks_of_another_number_draw_streams_of_their_own(trained: Path) -> None:
    lone, pair = noise(trained / "resized", 0), noise(trained / "resized", 1)
    # Three ranks to step 2, one to step 5, two to the end.
    assert set(lone) == set(range(8))
    assert set(pair) == {0, 1, 5, 6, 7}
    firsts = [drawn[0] for drawn in (*lone.values(), *pair.values())]
    # No stream is another rank's, or begins again as it did at the start.
    assert len(set(firsts)) == len(firsts)


def test_a_resize_keeps_batch_and_order(trained: Path) -> None:
    assert_exact(trained / "resized")
    alone, resized = rows(trained / "alone"), rows(trained / "resized")
    assert resized[8][0] == pytest.approx(alone[8][0], rel=1e-4)
