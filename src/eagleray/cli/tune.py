"""The verb of sweeps: tune."""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from eagleray.cli.console import (
    INTERRUPTIONS,
    ConfigOption,
    JsonOption,
    OverridesArgument,
    console,
    emit,
    exit_code,
    table,
    tell_stopped,
    told_stopping,
)
from eagleray.platform.config import CONFIG_NAME
from eagleray.project import Project

if TYPE_CHECKING:
    from eagleray.actors.data.recipe import BuildProgress
    from eagleray.tune.history import SweepHistory
    from eagleray.tune.sweep import SweepResult


_SHOWN = 4  # trials at once whose steps are shown


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command()(tune)


def tune(
    overrides: OverridesArgument = None,
    config: ConfigOption = Path(CONFIG_NAME),
    resume: Annotated[str | None, typer.Option(help="Go on with an interrupted sweep.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Search for better settings; every trial is a run.

    Example: eagleray tune tune.num_trials=20
    """
    project = Project.load(config, [*(overrides or []), "tune.best=null"])
    num_trials = project.config.tune.num_trials
    if resume is not None:
        num_trials = project.runs.config(resume)["tune"]["num_trials"]
    follower = SweepFollower(num_trials, quiet=as_json)
    with follower:
        try:
            result = project.tune(follower.show, follower.show_data, resume=resume)
        except INTERRUPTIONS as interruption:
            if sweep_id := resume or follower.sweep_id:
                tell_stopped(f"stopped; go on with: eagleray tune --resume {sweep_id}")
            raise typer.Exit(exit_code(interruption)) from None
    emit(_document(result), as_json, lambda: _show(result))


class SweepFollower:
    """Shows a sweep's progress: a live bar on a terminal, a line for each ended trial elsewhere.

    Args:
        num_trials: Trials of the sweep.
        quiet: Show nothing, for scripts.
    """

    def __init__(self, num_trials: int, *, quiet: bool = False) -> None:
        self.sweep_id = ""
        self._quiet, self._shown = quiet, 0
        self._bar = Progress(
            TextColumn("tune"),
            BarColumn(20),
            TextColumn("{task.completed:.0f}/{task.total:.0f} trials{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self._open = ExitStack()
        self._task = self._bar.add_task("tune", total=num_trials, figures="")

    def __enter__(self) -> "SweepFollower":
        self._open.enter_context(told_stopping("stopping"))
        self._open.enter_context(self._bar)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def show(self, history: "SweepHistory") -> None:
        """Take what the sweep reports."""
        if not self.sweep_id:
            self.sweep_id = history.sweep_id
            if not self._quiet:
                self._bar.console.print(f"sweep {history.sweep_id}", markup=False)
        ended = [trial for trial in history.trials if trial.status != "running"]
        best = history.best()
        text = f"  best {best.value:.3f}" if best else ""
        steps = "".join(f"  step {run.step}/{run.steps}" for run in history.running()[:_SHOWN])
        self._bar.update(self._task, completed=len(ended), figures=text + steps)
        if not self._quiet and not console.is_terminal and len(ended) > self._shown:
            self._shown = len(ended)
            console.print(f"{len(ended)} trials{text}", markup=False)

    def show_data(self, progress: "BuildProgress") -> None:
        """Take what the data build reports."""
        figures = f"  data: {progress.phase} {progress.fraction:.0%}"
        self._bar.update(self._task, figures=figures)


def _document(result: "SweepResult") -> dict[str, Any]:
    return asdict(result)


def _show(result: "SweepResult") -> None:
    names = sorted({name for trial in result.trials for name in trial.params})
    rows = [
        [
            trial.number, trial.status.value, trial.steps,
            "" if trial.value is None else f"{trial.value:.4f}",
            *(_short(trial.params[name]) for name in names),
            "best" if trial.number == result.best.number else "",
        ]
        for trial in result.trials
    ]  # fmt: skip
    columns = ["trial", "end", "steps", "held-out", *(n.rpartition(".")[2] for n in names), ""]
    console.print(table(f"sweep {result.sweep_id}", columns, rows))
    console.print("next: eagleray train tune.best=last", markup=False)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
