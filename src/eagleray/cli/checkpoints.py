"""Verbs of a run's checkpoints: checkpoints list, verify, export, prune."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eagleray.cli.console import (
    ConfigOption,
    DryRunOption,
    JsonOption,
    console,
    emit,
    errors,
    print_lines,
)
from eagleray.platform.config import CONFIG_NAME, CheckpointConfig, ModelConfig
from eagleray.platform.errors import IntegrityError, NotFoundError, RunFailedError
from eagleray.project import Project

if TYPE_CHECKING:
    from eagleray.actors.checkpoint.manifest import CheckpointFolder

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run's id: see `eagleray ps`.")]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    group = typer.Typer(no_args_is_help=True, help="Checkpoints of a run.")
    group.command("list")(list_checkpoints)
    for verb in (verify, export, prune):
        group.command()(verb)
    app.add_typer(group, name="checkpoints")


def list_checkpoints(
    run: RunArgument, config: ConfigOption = Path(CONFIG_NAME), as_json: JsonOption = False
) -> None:
    """List a run's checkpoints: step, time, size, held-out loss, kept for ever.

    Whether one is intact is unknown until `eagleray checkpoints verify` has read its bytes.

    Example: eagleray checkpoints list my-project-7f3k
    """
    from eagleray.actors.checkpoint.inventory import entries

    _, folder = _opened(run, config)
    found = entries(folder)

    def people() -> None:
        if not found:
            console.print(f"run {run} has no checkpoints", markup=False)
            return
        rows = [
            [
                str(entry.step),
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.written_s)),
                _size(entry.bytes),
                "" if entry.eval_loss is None else f"{entry.eval_loss:.4f}",
                "yes" if entry.kept_forever else "",
                "unknown" if entry.intact is None else "no: its manifest is damaged",
            ]
            for entry in found
        ]
        print_lines(["step", "written", "size", "held-out", "kept for ever", "intact"], rows)

    emit([asdict(entry) for entry in found], as_json, people)


def verify(
    run: RunArgument,
    step: Annotated[
        int | None, typer.Argument(metavar="[STEP]", help="One step; default: all.")
    ] = None,
    config: ConfigOption = Path(CONFIG_NAME),
    as_json: JsonOption = False,
) -> None:
    """Read every byte of a run's checkpoints, and name each file that differs (exit code 1).

    Example: eagleray checkpoints verify my-project-7f3k 200
    """
    from eagleray.actors.checkpoint.inventory import damages, entries

    _, folder = _opened(run, config)
    steps = folder.all_steps() if step is None else [_known(folder, run, step)]
    if not steps:
        raise NotFoundError(f"run {run} has no checkpoints", f"see `eagleray show {run}`")
    sizes = {entry.step: entry.bytes for entry in entries(folder)}
    documents: list[dict[str, Any]] = []
    with _reading(sum(sizes.get(number, 0) for number in steps)) as on_bytes:
        for number in steps:
            try:
                found = damages(folder, number, on_bytes)
            except NotFoundError:
                if step is not None:
                    raise
                continue  # the run that goes on needed it no more
            documents.append(
                {
                    "step": number, "ok": not found, "bytes": sizes.get(number, 0),
                    "damage": [{"file": str(d.path), "reason": d.reason} for d in found],
                }
            )  # fmt: skip
    damaged = [document for document in documents if not document["ok"]]

    def people() -> None:
        for document in documents:
            told = "intact" if document["ok"] else "damaged"
            console.print(f"checkpoint {document['step']}: {told}, {_size(document['bytes'])}")

    emit(documents, as_json, people)
    if damaged:
        listed = "".join(
            f"\n  - {place['file']} {place['reason']}"
            for document in damaged
            for place in document["damage"]
        )
        raise IntegrityError(
            f"{len(damaged)} of {len(documents)} checkpoints of run {run} are damaged:{listed}",
            f"restore these from a copy; `eagleray resume {run}` uses the newest intact one",
        )


def export(
    run: RunArgument,
    step: Annotated[int, typer.Argument(metavar="STEP", help="The checkpoint's step.")],
    to: Annotated[Path, typer.Option("--to", help="New folder.")],
    config: ConfigOption = Path(CONFIG_NAME),
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint's weights in the layout that transformers and vLLM load.

    Example: eagleray checkpoints export my-project-7f3k 200 --to ./step-200
    """
    from eagleray.actors.checkpoint.export import export_checkpoint
    from eagleray.actors.checkpoint.inventory import entries
    from eagleray.actors.data.dataset import Dataset
    from eagleray.platform.model.config import DecoderConfig

    project, folder = _opened(run, config)
    _known(folder, run, step)
    saved = project.runs.config(run)
    dataset = Dataset.open(project.storage, _dataset_digest(project, run))
    model = DecoderConfig.from_section(
        ModelConfig.model_validate(saved["model"]), dataset.vocab_size
    )
    size = sum(entry.bytes for entry in entries(folder) if entry.step == step)
    with _reading(size) as on_bytes:
        export_checkpoint(
            folder, step, to, model, dataset.tokenizer_json,
            dataset.manifest["tokenizer"]["eod_token"], on_bytes,
        )  # fmt: skip
    document = {"run": run, "step": step, "folder": str(to)}
    emit(document, as_json, lambda: console.print(f"wrote {to}", markup=False, soft_wrap=True))


def prune(
    run: RunArgument,
    keep: Annotated[
        int | None, typer.Option("--keep", min=1, help="Newest ones to keep; default: as the run.")
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option("--keep-every", min=1, help="Keep multiples of this; default: as the run."),
    ] = None,
    keep_forever: Annotated[
        list[int] | None,
        typer.Option("--keep-forever", metavar="STEP", help="Never remove this one, now or later."),
    ] = None,
    dry_run: DryRunOption = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    config: ConfigOption = Path(CONFIG_NAME),
    as_json: JsonOption = False,
) -> None:
    """Remove old checkpoints; on a terminal it asks first.

    Stay: the newest, the best by held-out loss, the newest intact one, those that a registered
    model was made of, and those that are kept for ever.

    Example: eagleray checkpoints prune my-project-7f3k --keep 1 --keep-forever 200
    """
    from eagleray.actors.checkpoint import retention
    from eagleray.actors.checkpoint.inventory import entries, plan_prune

    project, folder = _opened(run, config)
    saved = project.runs.config(run).get("train", {}).get("checkpoint", {})
    rule = CheckpointConfig.model_validate(saved)
    for step in keep_forever or []:
        _known(folder, run, step)
        if not dry_run:
            retention.keep_forever(folder, step)
    sizes = {entry.step: entry.bytes for entry in entries(folder)}
    with _reading(max(sizes.values(), default=0)) as on_bytes:
        plan = plan_prune(
            project.storage, run,
            retention.Retention(keep or rule.keep, keep_every or rule.keep_every_steps), on_bytes,
        )  # fmt: skip
    stay = plan.stay | dict.fromkeys(keep_forever or [], "kept for ever")
    doomed = [step for step in plan.remove if step not in stay]
    size = _size(sum(sizes.get(step, 0) for step in doomed))
    if not as_json:
        told = {step: "removed" if step in doomed else stay[step] for step in {*stay, *doomed}}
        rows = [[str(step), _size(sizes.get(step, 0)), told[step]] for step in sorted(told)]
        print_lines(["step", "size", "stays as" if not doomed else "stays as, or is removed"], rows)
    if doomed and not (dry_run or yes or as_json) and _is_terminal():
        asked = f"remove {len(doomed)} checkpoints ({size})?"
        if not typer.confirm(asked):
            raise RunFailedError("nothing was removed", "say yes, or give --yes")
    removed = [] if dry_run else retention.remove(folder, doomed)
    document = {
        "run": run, "dry_run": dry_run, "stay": {str(s): why for s, why in sorted(stay.items())},
        "remove": doomed, "removed": removed,
    }  # fmt: skip
    verb = "would remove" if dry_run else "removed"
    emit(document, as_json, lambda: console.print(f"{verb} {len(doomed)} checkpoints, {size}"))


def _is_terminal() -> bool:
    return sys.stdin.isatty() and console.is_terminal


def _opened(run: str, config: Path) -> tuple[Project, "CheckpointFolder"]:
    from eagleray.actors.checkpoint.manifest import CheckpointFolder

    project = Project.load(config)
    project.runs.state(run)
    return project, CheckpointFolder(project.storage, run)


def _known(folder: "CheckpointFolder", run: str, step: int) -> int:
    steps = folder.all_steps()
    if step not in steps:
        has = ", ".join(map(str, steps)) or "none"
        raise NotFoundError(
            f"run {run} has no checkpoint of step {step} (it has: {has})",
            f"see `eagleray checkpoints list {run}`",
        )
    return step


def _dataset_digest(project: Project, run: str) -> str:
    """The data set that a run began with; a trial's is its sweep's."""
    runs = project.runs
    events = runs.events(run)
    if project.state(run).kind == "trial":
        for sweep in (state.run_id for state in runs.all() if state.kind == "sweep"):
            of_sweep = runs.events(sweep)
            if any(event.get("run") == run for event in of_sweep):
                events = of_sweep
    for event in events:
        if event["event"] == "dataset":
            return str(event["digest"])
    raise NotFoundError(
        f"the events of run {run} name no dataset, whose tokenizer goes with the weights",
        "export a checkpoint of a run that this eagleray trained",
    )


@contextmanager
def _reading(num_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, while so many bytes are read."""
    if not errors.is_terminal:
        yield lambda read: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("", total=num_bytes)
        yield lambda read: bar.advance(task, read)


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.2f} GB"
