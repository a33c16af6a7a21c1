"""Verbs of the data: build, inspect, verify."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagleray.cli.console import (
    INTERRUPTIONS,
    ConfigOption,
    JsonOption,
    OverridesArgument,
    console,
    emit,
    errors,
    exit_code,
    tell_stopped,
)
from eagleray.cli.dataset_view import contents, print_contents, print_summary, summary
from eagleray.platform.config import CONFIG_NAME, load_config
from eagleray.platform.errors import IntegrityError, NotFoundError, UsageError
from eagleray.platform.storage import Storage

if TYPE_CHECKING:
    from eagleray.actors.data import BuildProgress, Dataset

_MIN_PREFIX = 6

DigestArgument = Annotated[
    str | None,
    typer.Argument(metavar="DIGEST", help="A dataset's digest or its start; default: the last."),
]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    group = typer.Typer(no_args_is_help=True, help="Raw data to verified shards.")
    group.command()(build)
    group.command()(inspect)
    group.command()(verify)
    app.add_typer(group, name="data")


def build(
    overrides: OverridesArgument = None,
    config: ConfigOption = Path(CONFIG_NAME),
    as_json: JsonOption = False,
) -> None:
    """Build the dataset of eagleray.yaml, or find it if it was built before.

    One that was interrupted goes on where it stopped. A large corpus is encoded by all cores of the
    cluster, or of this machine.

    Example: eagleray data build data.seq_len=256
    """
    from eagleray.actors.data import build_dataset
    from eagleray.platform.cluster import session

    loaded = load_config(config, overrides or [])
    started = time.perf_counter()
    seen: list[BuildProgress] = []
    items = "tokens" if loaded.config.data.features is None else "values"
    with _progress(items) as show:

        def on_progress(progress: "BuildProgress") -> None:
            seen[:] = [progress]
            show(progress)

        try:
            dataset = build_dataset(
                loaded.config.data,
                loaded.resolve,
                Storage(loaded.storage_path),
                on_progress,
                lambda: session(loaded),
            )
        except INTERRUPTIONS as interruption:
            tell_stopped("stopped; the same command goes on where it stopped")
            raise typer.Exit(exit_code(interruption)) from None
    took_s = time.perf_counter() - started
    is_found = bool(seen) and seen[-1].phase == "found"
    document = summary(dataset) | {"seconds": round(took_s, 3), "built": not is_found}
    unit, counted = ("tokens", "tokens") if dataset.features is None else ("rows", "samples")
    if not is_found:
        document["bytes_per_second"] = round(document["bytes"] / took_s)
        count = document["train"][counted] + document["eval"][counted]
        document[f"{unit}_per_second"] = round(count / took_s)

    def people() -> None:
        console.print(
            f"{'found' if is_found else 'built'} dataset {dataset.digest}", soft_wrap=True
        )
        print_summary(document)
        rates = (
            ""
            if is_found
            else f", {document['bytes_per_second'] / 1e6:.1f} MB/s, "
            f"{document[f'{unit}_per_second']:,} {unit}/s"
        )
        console.print(f"{took_s:.1f} s{rates}", soft_wrap=True)

    emit(document, as_json, people)


def inspect(
    digest: DigestArgument = None,
    config: ConfigOption = Path(CONFIG_NAME),
    as_json: JsonOption = False,
) -> None:
    """Show what is in a dataset: counts, lengths of documents or figures of columns, two samples.

    Example: eagleray data inspect
    """
    dataset = _open(digest, config)
    document = summary(dataset) | contents(dataset)

    def people() -> None:
        console.print(f"dataset {dataset.digest}", soft_wrap=True)
        print_summary(document)
        print_contents(document, dataset)

    emit(document, as_json, people)


def verify(
    digest: DigestArgument = None,
    config: ConfigOption = Path(CONFIG_NAME),
    as_json: JsonOption = False,
) -> None:
    """Check every byte of a dataset against its checksums.

    Example: eagleray data verify
    """
    dataset = _open(digest, config)
    found = dataset.verify()
    document = {
        "digest": dataset.digest,
        "ok": not found,
        "bytes": dataset.num_bytes,
        "damage": [{"file": d.file, "block": d.block, "reason": d.reason} for d in found],
    }
    emit(
        document,
        as_json,
        lambda: console.print(
            f"dataset {dataset.digest}: {document['bytes']:,} bytes read, {len(found)} damaged",
            soft_wrap=True,
        ),
    )
    if found:
        listed = "".join(
            f"\n  - {d.file}"
            + (f" block {d.block}" if d.block is not None else "")
            + f": {d.reason}"
            for d in found
        )
        raise IntegrityError(
            f"dataset {dataset.digest} is damaged:{listed}",
            f"restore these from a copy, or remove {dataset.folder} and build it again",
        )


def _open(digest: str | None, config: Path) -> "Dataset":
    from eagleray.actors.data import Dataset, last_digest

    storage = Storage(load_config(config).storage_path)
    return Dataset.open(storage, _full(storage, digest) if digest else last_digest(storage))


def _full(storage: Storage, start: str) -> str:
    """The digest that starts like this."""
    matching = [name for name in storage.names("datasets") if name.startswith(start)]
    if len(start) < _MIN_PREFIX or not matching:
        raise NotFoundError(
            f"there is no dataset {start} in {storage.root}",
            f"give its digest, or at least {_MIN_PREFIX} characters of its start",
        )
    if len(matching) > 1:
        raise UsageError(f"{start} is the start of {len(matching)} digests", "give more of it")
    return matching[0]


@contextmanager
def _progress(items: str) -> Iterator[Callable[["BuildProgress"], None]]:
    """A bar on a terminal; elsewhere a line when a phase begins."""
    if errors.is_terminal:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        with Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}% {task.fields[rates]}"),
            TimeRemainingColumn(),
            console=errors,
            transient=True,
        ) as bar:
            task = bar.add_task("", total=1.0, rates="")
            first: BuildProgress | None = None
            began_at = 0.0

            def move(progress: "BuildProgress") -> None:
                nonlocal first, began_at
                if first is None or first.phase != progress.phase:
                    first, began_at = progress, time.perf_counter()
                    bar.reset(task, total=1.0)
                took_s = max(time.perf_counter() - began_at, 1e-3)
                rates = {
                    "MB": (progress.bytes - first.bytes) / 1e6,
                    "documents": progress.documents - first.documents,
                    items: progress.tokens - first.tokens,
                }
                bar.update(
                    task,
                    description=progress.phase,
                    completed=progress.fraction,
                    rates=" ".join(
                        f"{count / took_s:,.{0 if count > took_s * 10 else 1}f} {name}/s"
                        for name, count in rates.items()
                        if count
                    ),
                )

            yield move
    else:
        phases: list[str] = []

        def note(progress: "BuildProgress") -> None:
            if progress.phase not in phases:
                phases.append(progress.phase)
                errors.print(f"data build: {progress.phase}")

        yield note
