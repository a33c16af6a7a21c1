"""Loss of a whole node: the part of benchmarks.recovery that needs a second one.

Two nodes of one CPU each, both on this machine, train with one to two workers. The raylet of the
second one gets SIGKILL, which ends all that runs there; then another node joins. Ray Train, elastic
as well, has the same cluster: its node is missed after 3 s there as well, not after Ray's 15 s.
"""

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.leftovers import end_family
from benchmarks.recovery_common import Step, steps_of, write_project
from tools.ray_node import RayNode

from eagleray.actors.trainer.progress import Progress
from eagleray.platform.cluster import session
from eagleray.platform.cluster.options import LOOPBACK_VARIABLES
from eagleray.project import Project

_SETTLE_S = 8.0
_LIMIT_S = 300.0


def lose_nodes(losses: int) -> tuple[list[float], list[float]]:
    """Seconds from the loss of a node to the next new optimizer step: ours, and Ray Train's."""
    found = []
    for measured in (_ours, _ray):
        with tempfile.TemporaryDirectory(prefix="bench-recovery-") as name:
            found.append(measured(Path(name), losses))
    ours, theirs = found
    return ours, theirs


def _ours(folder: Path, losses: int) -> list[float]:
    write_project(folder)
    overrides = ["train.num_workers=[1, 2]", "train.resize_after_s=2", "cluster.num_cpus=1"]
    project = Project.load(folder, overrides)
    with _nodes(project) as nodes:
        life = _Life(nodes, losses)
        with contextlib.suppress(_EnoughError):
            project.train(life)
        rows = project.runs.metrics(life.run_id)
    steps = [Step(row["time_s"], row["step"], 0, 0) for row in rows]
    return [_seconds(steps, *loss) for loss in life.losses]


def _ray(folder: Path, losses: int) -> list[float]:
    """Of a driver of its own, as `fit` does not return."""
    write_project(folder)
    project = Project.load(folder, ["cluster.num_cpus=1"])
    found: list[tuple[float, float]] = []
    with _nodes(project) as nodes, (folder / "log").open("wb") as log:
        driver = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.recovery_peers", "ray-elastic", str(folder)],
            env={
                **os.environ, **LOOPBACK_VARIABLES, "OMP_NUM_THREADS": "1",
                "RAY_ADDRESS": nodes.address,
            },
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            for _ in range(losses):
                _wait(folder, 0.0 if not found else found[-1][1], {0, 1}, 0)
                time.sleep(_SETTLE_S)
                lost_s, before = nodes.lose(), max(step.step for step in steps_of(folder))
                # Who is left is rank 0 from now on, and some steps were under way yet.
                _wait(folder, lost_s + 2, {0}, before + 5)
                nodes.add()
                found.append((lost_s, time.time()))
        finally:
            end_family(driver.pid)
            driver.wait()
    return [_seconds(steps_of(folder), *loss) for loss in found]


class _Nodes:
    """The second node, again and again."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._all: list[RayNode] = []

    def add(self) -> None:
        """One joins, in its own time."""
        self._all.append(RayNode(self.address, 1))

    def lose(self) -> float:
        """The newest one is lost; the time of it."""
        self._all[-1].kill()
        return time.time()

    def close(self) -> None:
        """End all."""
        for node in self._all:
            node.close()


@contextlib.contextmanager
def _nodes(project: Project) -> Iterator[_Nodes]:
    with session(project.loaded) as cluster:
        nodes = _Nodes(cluster.address)
        try:
            nodes.add()
            yield nodes
        finally:
            nodes.close()


class _EnoughError(Exception):
    """All losses have happened, and been recovered from."""


class _Life:
    """Loses a node when both workers have trained for a while, and lets another one join."""

    def __init__(self, nodes: _Nodes, losses: int) -> None:
        self._nodes, self._num_losses = nodes, losses
        self._both_since_s: float | None = None
        self._lost_s: float | None = None
        self._step = 0
        self.losses: list[tuple[float, float]] = []
        """When a node was lost, and another one added."""
        self.run_id = ""

    def __call__(self, run_id: str, progress: Progress) -> None:
        self.run_id = run_id
        rows = [row for row in progress.rows if row.attempt == progress.attempt]
        if not rows:
            return
        if len(progress.workers) < 2:
            self._both_since_s = None
            # The steps since the last snapshot come again first.
            if self._lost_s is not None and rows[-1].step > self._step + 5:
                self.losses.append((self._lost_s, time.time()))
                self._lost_s = None
                if len(self.losses) == self._num_losses:
                    raise _EnoughError
                self._nodes.add()
            return
        now_s = time.time()
        if self._both_since_s is None:
            self._both_since_s = now_s
        elif self._lost_s is None and now_s > self._both_since_s + _SETTLE_S:
            self._lost_s, self._step = self._nodes.lose(), rows[-1].step


def _seconds(steps: list[Step], lost_s: float, added_s: float) -> float:
    """From the loss to the first new step after the pause that it made: some go on a moment."""
    times = sorted(step.time_s for step in steps if lost_s - 1 <= step.time_s <= added_s)
    _, begun_s = max((b - a, a) for a, b in itertools.pairwise(times))
    before = max(step.step for step in steps if step.time_s <= begun_s)
    return min(s.time_s for s in steps if s.time_s > begun_s and s.step > before) - lost_s


def _wait(folder: Path, since_s: float, ranks: set[int], step: int) -> None:
    """Return when all these ranks have come past a step since then."""
    deadline = time.monotonic() + _LIMIT_S
    while not ranks <= {s.rank for s in steps_of(folder) if s.time_s > since_s and s.step > step}:
        if time.monotonic() > deadline:
            log = (folder / "log").read_text(errors="replace")
            raise TimeoutError(f"not back within {_LIMIT_S:g} s; last words: {log[-300:]}")
        time.sleep(0.05)
