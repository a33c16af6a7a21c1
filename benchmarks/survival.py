"""Whole runs under schedules of kills and resizes: each ends, and each sample trained it once.

    python -m benchmarks.survival [--schedules 20] [--every-s 20] [--only KIND ...] [--quick]

A schedule is a run of the decoder of benchmarks.recovery that takes a minute and a half; its seed
says who is killed when. They take turns:

    calm-1, -2, -4 undisturbed, at 1, 2 and 4 workers: what the others must equal
    storm          2 workers; SIGKILL of what trains, holds a place, loads, stores, records, seats
    driver         the same, and of the driver too, after which `resume` goes on
    2-1-2          a node's raylet is killed, later another node joins; between them the storm
    4-2-4          the same, with two workers on the node

Of `storm` and `driver` the final weights must be those of the calm run, bit by bit. At changing
numbers of workers sums are rounded otherwise, and training amplifies that: the held-out loss must
agree within 0.01 nats, and what the undisturbed runs differ by among themselves is printed beside
it. Two minutes a schedule.
"""

import argparse
import contextlib
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.record import Figure, console, run
from benchmarks.recovery_common import write_project
from tools.ray_node import RayNode

from eagleray.actors.chaos import ChaosPlan, Injector
from eagleray.actors.trainer.progress import Progress
from eagleray.platform.cluster import session
from eagleray.project import Project

KINDS = ("storm", "driver", "2-1-2", "4-2-4")
_STEPS, _QUICK_STEPS = 300, 150
_ROLES = ["process", "worker", "loader", "store", "recorder", "gang"]
_LOSS_TOLERANCE = 0.01
"""Nats; a model that knows nothing of the text loses 6.2."""
_LIMIT_S = 900.0


@dataclass
class Result:
    """What became of one schedule."""

    kind: str
    seed: int
    attempts: int = 0
    faults: int = 0
    missing: int = -1
    doubled: int = -1
    steps: int = 0
    eval_loss: float | None = None
    artifact: str = ""
    sizes: tuple[int, ...] = ()
    """Numbers of workers of its attempts, without repetition."""


def measure(arguments: argparse.Namespace) -> list[Figure]:
    """All schedules, one after the other, each with a driver of its own."""
    steps = _QUICK_STEPS if arguments.quick else _STEPS
    with tempfile.TemporaryDirectory(prefix="bench-survival-") as name:
        folder = Path(name)
        write_project(folder)
        calm = {
            kind: _conducted(folder, kind, 0, steps, arguments.every_s)
            for kind in _calm_kinds(arguments.only)
        }
        found = []
        for number in range(arguments.schedules):
            kind = arguments.only[number % len(arguments.only)]
            found.append(_conducted(folder, kind, number + 1, steps, arguments.every_s))
    return _figures(found, calm, arguments.schedules, steps)


def _calm_kinds(kinds: list[str]) -> list[str]:
    """Undisturbed runs of the sizes that these go through."""
    more = [("calm-1", "2-1-2"), ("calm-4", "4-2-4")]
    return ["calm-2", *(calm for calm, kind in more if kind in kinds)]


def _figures(
    found: list[Result | None], calm: dict[str, Result | None], wanted: int, steps: int
) -> list[Figure]:
    ended = [result for result in found if result is not None and result.steps == steps]
    base = calm["calm-2"]
    losses = [result.eval_loss for result in calm.values() if result is not None]
    if base is None or len(losses) < len(calm) or None in losses:
        raise SystemExit("error: an undisturbed run did not end")
    fixed = [result for result in ended if result.kind in ("storm", "driver")]
    elastic = [result for result in ended if result.kind not in ("storm", "driver")]
    equal = sum(result.artifact == base.artifact for result in fixed)
    resized = sum(len(result.sizes) >= 3 for result in elastic)
    figures = [
        _must("schedules that ended", len(ended), wanted),
        Figure("faults in all", sum(result.faults for result in ended), ""),
        _must("samples missing", sum(result.missing for result in ended), 0),
        _must("samples doubled", sum(result.doubled for result in ended), 0),
        _must("fixed size: equal bits", equal, len(fixed)),
        _must("resized down and up", resized, len(elastic)),
    ]
    if elastic:
        spread = _width(losses)
        differ = max(_width([result.eval_loss, base.eval_loss]) for result in elastic)
        figures.append(
            Figure(
                "resized: loss differs, most", differ, "nats", "undisturbed, 1 to 4 workers",
                spread, f"below {_LOSS_TOLERANCE:g} nats", differ < _LOSS_TOLERANCE, must_hold=True,
            )
        )  # fmt: skip
    return figures


def _width(losses: list[float | None]) -> float:
    known = [math.inf if loss is None else loss for loss in losses]
    return max(known) - min(known)


def _must(name: str, value: int, wanted: int) -> Figure:
    return Figure(name, value, "", goal=f"{wanted}", holds=value == wanted, must_hold=True)


def _conducted(folder: Path, kind: str, seed: int, steps: int, every_s: float) -> Result | None:
    """Run one schedule to its end; kill its driver, where that is due, and start another."""
    begun, draw = time.monotonic(), random.Random(seed)
    out = folder / f"{kind}-{seed}"
    out.mkdir()
    kills = 0
    while time.monotonic() - begun < _LIMIT_S:
        with (out / "log").open("ab") as log:
            driver = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.survival", "--drive", str(folder), kind,
                 str(seed), str(steps), str(every_s)],
                stdout=log, stderr=log,
            )  # fmt: skip
        try:
            # A run has begun by then, and has not ended.
            is_next = kind == "driver" and kills < 2
            driver.wait(every_s * draw.uniform(1.5, 2.5) if is_next else _LIMIT_S)
        except subprocess.TimeoutExpired:
            kills += 1
            continue
        finally:
            driver.kill()
            driver.wait()
        if driver.returncode == 0:
            break
        console.print((out / "log").read_text(errors="replace")[-2000:], style="red")
        return None
    else:
        return None
    result = Result(**json.loads((out / "result.json").read_text()))
    result.faults += kills
    seconds = time.monotonic() - begun
    console.print(
        f"{kind} {seed}: {seconds:.0f} s, {result.faults} faults, {result.attempts} attempts, "
        f"workers {'-'.join(map(str, result.sizes))}, {result.missing}/{result.doubled}, "
        f"loss {result.eval_loss:.5f}, {result.artifact[:12]}",
        style="dim",
    )
    return result


class _Life:
    """Disturbs one run.

    Args:
        kind: Of schedule.
        seed: Of its storm.
        steps: Of the run.
        every_s: Between two kills, on average.
        address: Of the cluster.
    """

    def __init__(self, kind: str, seed: int, steps: int, every_s: float, address: str) -> None:
        self._steps, self._address = steps, address
        self._per_node = {"2-1-2": 1, "4-2-4": 2}.get(kind, 0)
        self.nodes: list[RayNode] = []
        storm = {"roles": _ROLES, "every_s": every_s, "count": 1000}
        self._storm = Injector(ChaosPlan.model_validate({"seed": seed, "storm": storm}))
        fault = {"role": "node", "step": steps // 4}
        self._loss = Injector(ChaosPlan.model_validate({"seed": seed, "faults": [fault]}))
        self._is_calm = kind.startswith("calm")
        self.run_id = ""

    @property
    def faults(self) -> int:
        """How many have happened."""
        return len(self._storm.fired) + len(self._loss.fired)

    def add_node(self) -> None:
        """Let one more node join."""
        self.nodes.append(RayNode(self._address, self._per_node))

    def __call__(self, run_id: str, progress: Progress) -> None:
        self.run_id = run_id
        step = progress.rows[-1].step if progress.rows else 0
        if self._per_node:
            self._loss(run_id, progress)
            # It takes longer to join than the run takes to shrink.
            if self._loss.fired and len(self.nodes) == 1:
                self.add_node()
        # Towards the end nothing is struck that the last checkpoint needs.
        if not self._is_calm and step < self._steps - 50:
            self._storm(run_id, progress)


def drive(folder: Path, kind: str, seed: int, steps: int, every_s: float) -> None:
    """What a driver does: one run, or the rest of it."""
    out = folder / f"{kind}-{seed}"
    workers = {"2-1-2": "[1, 2]", "4-2-4": "[2, 4]", "calm-1": "1", "calm-4": "4"}.get(kind, "2")
    cpus = {"2-1-2": 1, "calm-4": 4}.get(kind, 2)
    project = Project.load(
        folder,
        [
            f"train.num_workers={workers}", f"train.steps={steps}", "train.log_every_steps=5",
            f"storage.uri={out / 'store'}", "train.resize_after_s=2", "data.loaders=1",
            f"cluster.num_cpus={cpus}", "train.eval.num_batches=8",
        ],
    )  # fmt: skip
    with _nodes(project, kind, seed, steps, every_s) as life:
        begun = [state.run_id for state in project.runs.all()]
        trained = project.resume(begun[0], life) if begun else project.train(life)
        events = project.runs.events(trained.run_id)
    sizes = [int(e["world_size"]) for e in events if e["event"] == "attempt"]
    distinct = [size for at, size in enumerate(sizes) if not at or sizes[at - 1] != size]
    assert trained.model is not None, "a run that reached its end has a model"
    result = Result(
        kind, seed, len(sizes), life.faults, trained.missing, trained.doubled, trained.steps,
        trained.eval_loss, trained.model.artifact, tuple(distinct),
    )  # fmt: skip
    (out / "result.json").write_text(json.dumps(asdict(result)))


@contextlib.contextmanager
def _nodes(project: Project, kind: str, seed: int, steps: int, every_s: float) -> Iterator[_Life]:
    with session(project.loaded) as cluster:
        life = _Life(kind, seed, steps, every_s, cluster.address)
        try:
            if kind in ("2-1-2", "4-2-4"):
                life.add_node()
                life.nodes[0].wait_joined()
            yield life
        finally:
            for node in life.nodes:
                node.close()


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schedules", type=int, default=20, help="how many (%(default)s)")
    parser.add_argument("--every-s", type=float, default=20.0, help="between kills (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--drive"]:
        place, which, number, count, pause = sys.argv[2:]
        drive(Path(place), which, int(number), int(count), float(pause))
    else:
        run(__doc__.partition("\n")[0], measure, _add_options)
