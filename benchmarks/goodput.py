"""Goodput under a storm of SIGKILLs, and whether the run ends as the one that nothing disturbs.

    python -m benchmarks.goodput [--minutes 30] [--every-s 120] [--quick] [--json FILE]

Two ranks on this machine train the decoder of benchmarks.recovery twice, with one configuration:
once undisturbed, once while the product's own injector kills processes that train, one each
`--every-s` seconds on average. The steps are those that fill `--minutes` by a short run before.

    goodput      wall time from the first step to the last that went into steps that count, each
                 once (platform/report/goodput.py)
    lost         to one kill: without a step, or in one that was redone
    slower       to one kill: wall time beyond that of the undisturbed run, all its causes; also
                 those that goodput does not see, as a spare that warms up beside the training

With --quick three minutes of a kill each 20 s. Takes twice the minutes, and two more.
"""

import argparse
import contextlib
import itertools
import math
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import Figure, console, run
from benchmarks.recovery_common import write_project

from eagleray.actors.chaos import ChaosPlan, Injector
from eagleray.platform.report import Goodput, goodput, read_facts
from eagleray.project import Project, TrainedRun

_QUICK_MINUTES, _QUICK_EVERY_S = 3.0, 20.0
_CALIBRATION_STEPS = 150
_GOAL_EVERY_S, _GOAL = 300.0, 0.95
_MOST_KILLS = 2
"""Times those of an undisturbed run's length."""


def measure(arguments: argparse.Namespace) -> list[Figure]:
    """Both runs, one after the other."""
    minutes = _QUICK_MINUTES if arguments.quick else arguments.minutes
    every_s = _QUICK_EVERY_S if arguments.quick else arguments.every_s
    with tempfile.TemporaryDirectory(prefix="bench-goodput-") as name:
        folder = Path(name)
        write_project(folder)
        step_s = _seconds_per_step(folder)
        steps = max(1, round(60 * minutes / step_s))
        console.print(f"{step_s:.3f} s per step: {steps} steps", style="dim")
        project = Project.load(folder, [f"train.steps={steps}"])
        calm = project.train()
        console.print(f"undisturbed: {calm.seconds:.0f} s", style="dim")
        # Where a storm is faster than recoveries are, it must end before the run can.
        count = math.ceil(_MOST_KILLS * 60 * minutes / every_s)
        storm = {"roles": ["process"], "every_s": every_s, "count": count}
        injector = Injector(ChaosPlan.model_validate({"storm": storm}))
        stormy = project.train(injector)
        console.print(f"disturbed: {stormy.seconds:.0f} s", style="dim")
        return _figures(project, calm, stormy, len(injector.fired))


def _figures(project: Project, calm: TrainedRun, stormy: TrainedRun, kills: int) -> list[Figure]:
    undisturbed, disturbed = _goodput(project, calm), _goodput(project, stormy)
    faults = read_facts(project.storage, stormy.run_id).history.faults
    redone = sum(fault.steps_redone for fault in faults)
    per_kill = max(1, kills)
    slower_s = (disturbed.wall_s - undisturbed.wall_s) / per_kill
    rare = disturbed.at(kills, _GOAL_EVERY_S)
    return [
        Figure("wall", disturbed.wall_s, "s", "undisturbed", undisturbed.wall_s),
        Figure("steps", stormy.steps, "", "undisturbed", calm.steps),
        Figure("kills", kills, ""),
        Figure("steps redone", redone, ""),
        Figure("lost per kill", disturbed.lost_s / per_kill, "s"),
        Figure("slower per kill", slower_s, "s"),
        Figure("goodput", 100 * disturbed.share, "%", "undisturbed", 100 * undisturbed.share),
        Figure(
            "goodput, one kill in 5 minutes", 100 * rare, "%", goal="at least 95 %",
            holds=rare >= _GOAL,
        ),
        Figure(
            "wall time kept, one kill in 5 minutes",
            100 * _GOAL_EVERY_S / (_GOAL_EVERY_S + max(0.0, slower_s)),
            "%",
        ),
        _must_equal("final loss", stormy.eval_loss, calm.eval_loss, "nats"),
        _must_equal(
            "artifacts that are equal", float(_artifact(stormy) == _artifact(calm)), 1.0, ""
        ),
        _must_equal("samples missing", stormy.missing, 0, ""),
        _must_equal("samples doubled", stormy.doubled, 0, ""),
    ]  # fmt: skip


def _must_equal(name: str, value: float | None, wanted: float | None, unit: str) -> Figure:
    if value is None or wanted is None:
        raise SystemExit(f"error: {name} is not known: a run ended without an evaluation")
    goal = f"{wanted:g}"
    return Figure(name, value, unit, goal=goal, holds=value == wanted, must_hold=True)


def _artifact(run: TrainedRun) -> str:
    assert run.model is not None, "a run that reached its end has a model"
    return run.model.artifact


def _goodput(project: Project, run: TrainedRun) -> Goodput:
    made = goodput(read_facts(project.storage, run.run_id).history)
    assert made is not None, "a run of many steps has rows"
    return made


class _EnoughError(Exception):
    """The steps of the calibration are done."""


def _seconds_per_step(folder: Path) -> float:
    """Of a run that nothing disturbs, once it is warm."""
    project = Project.load(folder)
    run_id = ""

    def follow(name: str, progress: Any) -> None:
        nonlocal run_id
        run_id = name
        if progress.rows and progress.rows[-1].step >= _CALIBRATION_STEPS:
            raise _EnoughError

    with contextlib.suppress(_EnoughError):
        project.train(follow)
    times = [row["time_s"] for row in project.runs.metrics(run_id)]
    half = times[len(times) // 2 :]
    return median(b - a for a, b in itertools.pairwise(half))


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=_positive, default=30.0, help="of each run (%(default)s)")
    parser.add_argument(
        "--every-s", type=_positive, default=120.0, help="between kills, on average (%(default)s)"
    )


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


if __name__ == "__main__":
    run(__doc__.partition("\n")[0], measure, _add_options)
