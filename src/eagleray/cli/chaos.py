"""Verbs that break things on purpose: chaos run."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from eagleray.cli.console import (
    ConfigOption,
    JsonOption,
    OverridesArgument,
    console,
    emit,
    table,
)
from eagleray.cli.train import RunFollower
from eagleray.platform.config import CONFIG_NAME
from eagleray.project import Project

_PHASES = ("gathered", "seated", "met", "restored", "stepped")


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    group = typer.Typer(no_args_is_help=True, help="Break a run on purpose, and see it recover.")
    group.command()(run)
    app.add_typer(group, name="chaos")


def run(
    plan: Annotated[Path, typer.Argument(help="A YAML file: seed, faults, storm.")],
    overrides: OverridesArgument = None,
    config: ConfigOption = Path(CONFIG_NAME),
    as_json: JsonOption = False,
) -> None:
    """Train while a plan of faults is carried out; tell what each cost.

    A plan has `faults`, each with kind (kill, stop, hang), role (process, worker, node, gang,
    store, recorder, loader, evictor, controller), rank and step, and a `storm` with roles, every_s
    and count; `seed` makes it the same each time. Only processes of this run are struck. Deaths
    count against train.max_failures, stopped and hung processes against train.max_hangs.

    Example: eagleray chaos run faults.yaml train.max_failures=20
    """
    from eagleray.actors.chaos import Injector, load_plan
    from eagleray.platform.report import goodput, read_facts

    project = Project.load(config, overrides or [])
    injector = Injector(load_plan(plan))
    with RunFollower(project.config.train.steps, quiet=as_json) as follower:

        def follow(run_id: str, progress: Any) -> None:
            injector(run_id, progress)
            follower.show(run_id, progress)

        done = follower.guard(lambda: project.train(follow, follower.show_data))
    events = project.runs.events(done.run_id)
    recoveries = [event for event in events if event["event"] == "recovery"]
    struck = Counter(f"{fired.fault.kind} {fired.fault.role}" for fired in injector.fired)
    made = goodput(read_facts(project.storage, done.run_id).history)
    result = {
        "run": done.run_id, "steps": done.steps, "missing": done.missing, "doubled": done.doubled,
        "attempts": done.attempts, "goodput": made.share if made else None,
        "fired": dict(struck), "not_fired": injector.waiting,
        "recoveries": [{f"{p}_s": event.get(f"{p}_s") for p in _PHASES} for event in recoveries],
    }  # fmt: skip

    def show() -> None:
        rows: list[list[Any]] = [[name, count] for name, count in sorted(struck.items())]
        console.print(table("Faults", ["fault", "times"], rows))
        if recoveries:
            cells = [[f"{event.get(f'{p}_s', 0):.3f}" for p in _PHASES] for event in recoveries]
            console.print(table("Recoveries, seconds of each phase", list(_PHASES), cells))
        left = f"; {injector.waiting} faults did not come to it" if injector.waiting else ""
        useful = f", goodput {made.share:.1%}" if made else ""
        console.print(
            f"{done.run_id}: {done.steps} steps in {done.attempts} attempts, samples missing "
            f"{done.missing}, doubled {done.doubled}{useful}{left}"
        )

    emit(result, as_json, show)
