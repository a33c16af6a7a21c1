"""Verbs of training: train, resume."""

import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

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
from eagleray.project import Project, TrainedRun

if TYPE_CHECKING:
    from eagleray.actors.data.recipe import BuildProgress
    from eagleray.actors.trainer.progress import Progress as TrainProgress

_WIDE = 110
_PATIENCE_S = 60.0


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command()(train)
    app.command()(resume)


def train(
    overrides: OverridesArgument = None,
    config: ConfigOption = Path(CONFIG_NAME),
    as_json: JsonOption = False,
) -> None:
    """Train a model: build the data if need be, follow the run, register the result.

    Example: eagleray train train.steps=500 train.optimizer.lr=3e-4
    """
    project = Project.load(config, overrides or [])
    with RunFollower(project.config.train.steps, quiet=as_json) as follower:
        run = follower.guard(lambda: project.train(follower.show, follower.show_data))
    _summary(run, as_json)


def resume(
    run_id: Annotated[str, typer.Argument(help="A run that stopped or failed; see `eagleray ps`.")],
    config: ConfigOption = Path(CONFIG_NAME),
    as_json: JsonOption = False,
) -> None:
    """Go on with a run from its newest intact checkpoint.

    Example: eagleray resume my-project-7f3k
    """
    project = Project.load(config)
    project.check_resumable(run_id)
    with RunFollower(project.runs.state(run_id).steps, quiet=as_json) as follower:
        run = follower.guard(lambda: project.resume(run_id, follower.show))
    _summary(run, as_json)


class RunFollower:
    """Shows a run's progress: a live bar on a terminal, plain lines elsewhere.

    Args:
        steps: Steps of the run.
        quiet: Show nothing, for scripts.
    """

    def __init__(self, steps: int, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._run_id = ""
        self._attempt = 0
        self._phase = self._held_out = ""
        self._asked_s = time.monotonic()
        self._is_told = False
        self._is_narrow = console.width < _WIDE
        bar = [] if self._is_narrow else [BarColumn(20)]
        self._bar = Progress(
            TextColumn("{task.description}"),
            *bar,
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self._open = ExitStack()
        self._task = self._bar.add_task("train", total=steps, figures="starting")

    def __enter__(self) -> "RunFollower":
        self._open.enter_context(told_stopping("stopping, and saving the last step"))
        self._open.enter_context(self._bar)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def guard(self, work: Any) -> TrainedRun:
        """Run the work; Ctrl-C ends it with the line that says how to go on."""
        try:
            run: TrainedRun = work()
        except INTERRUPTIONS as interruption:
            self._bar.stop()
            if self._run_id:
                tell_stopped(f"stopped; go on with: eagleray resume {self._run_id}")
            raise typer.Exit(exit_code(interruption)) from None
        return run

    def show(self, run_id: str, progress: "TrainProgress") -> None:
        """Take what the trainer reports."""
        if run_id != self._run_id:
            self._run_id = run_id
            self._line(f"run {run_id}")
        if progress.workers and progress.attempt > self._attempt:
            if self._attempt:
                self._line(f"workers restarted (attempt {progress.attempt})")
            self._attempt = progress.attempt
        if not self._attempt:
            self._waiting(time.monotonic() - self._asked_s)
        for row in progress.rows:
            held_out = "" if row.eval_loss is None else f"  held-out {row.eval_loss:.3f}"
            self._held_out = held_out or self._held_out  # The bar keeps showing the newest.
            mfu = "" if self._is_narrow else f"  MFU {row.mfu:.0%}"
            loss = "-" if row.loss is None else f"{row.loss:.3f}"
            skipped = f"  {row.skipped_steps} skipped" if row.skipped_steps else ""
            figures = f"loss {loss}  {row.tokens_per_s:,.0f} tok/s{mfu}{skipped}"
            self._bar.update(self._task, completed=row.step, figures=figures + self._held_out)
            if not console.is_terminal:
                self._line(f"step {row.step}  {figures}{held_out}")

    def show_data(self, progress: "BuildProgress") -> None:
        """Take what the data build reports."""
        self._bar.update(self._task, figures=f"data: {progress.phase} {progress.fraction:.0%}")
        if progress.phase != self._phase and not console.is_terminal:
            self._line(f"data: {progress.phase}")
        self._phase = progress.phase
        self._asked_s = time.monotonic()

    def _waiting(self, waited_s: float) -> None:
        if waited_s < _PATIENCE_S:
            self._bar.update(self._task, figures="starting")
            return
        self._bar.update(self._task, figures=f"no worker yet after {waited_s:.0f} s")
        if not self._is_told and not console.is_terminal:
            self._line(f"no worker yet after {waited_s:.0f} s")
        self._is_told = True

    def _line(self, text: str) -> None:
        if not self._quiet:
            self._bar.console.print(text, markup=False)


def _summary(run: TrainedRun, as_json: bool) -> None:
    def show() -> None:
        rows: list[list[Any]] = [
            ["run", run.run_id],
            ["model", run.model.spec if run.model else ""],
            ["held-out loss", "" if run.eval_loss is None else f"{run.eval_loss:.4f} nats/token"],
            ["samples", f"{run.samples:,} (missing {run.missing}, doubled {run.doubled})"],
            *([["skipped steps", run.skipped_steps]] if run.skipped_steps else []),
            ["attempts", run.attempts],
            ["seconds", f"{run.seconds:.1f}"],
        ]
        console.print(table("trained", ["", ""], rows))
        if run.model:
            console.print(f"next: eagleray models promote {run.model.spec}", markup=False)

    emit(asdict(run), as_json, show)
