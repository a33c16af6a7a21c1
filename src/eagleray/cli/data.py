"""Verbs of the data: build, inspect, verify."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    table,
    tell_stopped,
)
from eagleray.platform.config import CONFIG_NAME, load_config
from eagleray.platform.errors import IntegrityError, NotFoundError, UsageError
from eagleray.platform.storage import Storage

if TYPE_CHECKING:
    from eagleray.actors.data import BuildProgress, Dataset

_BAR_WIDTH = 40
_SAMPLE_CHARS = 300
_MIN_PREFIX = 6

DigestArgument = Annotated[
    str | None,
    typer.Argument(metavar="DIGEST", help="A dataset's digest or its start; default: the last."),
]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    group = typer.Typer(no_args_is_help=True, help="Raw text to verified token shards.")
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
    with _progress() as show:

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
    document = _summary(dataset) | {"seconds": round(took_s, 3), "built": not is_found}
    if not is_found:
        document["bytes_per_second"] = round(document["bytes"] / took_s)
        tokens = document["train"]["tokens"] + document["eval"]["tokens"]
        document["tokens_per_second"] = round(tokens / took_s)

    def people() -> None:
        console.print(
            f"{'found' if is_found else 'built'} dataset {dataset.digest}", soft_wrap=True
        )
        _print_counts(document)
        rates = (
            ""
            if is_found
            else f", {document['bytes_per_second'] / 1e6:.1f} MB/s, "
            f"{document['tokens_per_second']:,} tokens/s"
        )
        console.print(f"{took_s:.1f} s{rates}", soft_wrap=True)

    emit(document, as_json, people)


def inspect(
    digest: DigestArgument = None,
    config: ConfigOption = Path(CONFIG_NAME),
    as_json: JsonOption = False,
) -> None:
    """Show what is in a dataset: counts, lengths of documents, two samples.

    Example: eagleray data inspect
    """
    dataset = _open(digest, config)
    document = _summary(dataset)
    train = dataset.manifest["splits"]["train"]
    document["document_tokens"] = train["document_tokens"]
    document["domains"] = [
        {"name": name, **{split: _counts(dataset, split, name) for split in ("train", "eval")}}
        for name in dataset.domains
    ]
    document["examples"] = _samples(dataset)

    def people() -> None:
        console.print(f"dataset {dataset.digest}", soft_wrap=True)
        _print_counts(document)
        if len(document["domains"]) > 1:
            _print_domains(document["domains"])
        _print_lengths(document["document_tokens"])
        for number, text in enumerate(document["examples"]):
            console.print(f"\ntrain sample {number}:", soft_wrap=True)
            console.print(f"{text[:_SAMPLE_CHARS]!r}", markup=False, soft_wrap=True)

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


def _summary(dataset: "Dataset") -> dict[str, Any]:
    sources, splits = dataset.manifest["sources"], dataset.manifest["splits"]
    files = {(source["name"], source["sha256"]): source["bytes"] for source in sources}
    document: dict[str, Any] = {
        "digest": dataset.digest,
        "path": str(dataset.folder),
        "tokenizer": dataset.manifest["tokenizer"]["sha256"],
        "vocab_size": dataset.vocab_size,
        "seq_len": dataset.seq_len,
        # Several domains may read one file.
        "files": len(files),
        "bytes": sum(files.values()),
        "skipped_examples": [e for source in sources for e in source["skipped_examples"]],
    }
    for name in ("documents", "empty", "filtered", "skipped"):
        document[name] = sum(source[name] for source in sources)
    for split, found in splits.items():
        document[split] = {
            name: found[name] for name in ("documents", "tokens", "samples", "dropped_tokens")
        }
    return document


def _counts(dataset: "Dataset", split: str, domain: str) -> dict[str, int]:
    described = dataset.manifest["splits"][split]
    found = described.get("domains", {}).get(domain, described)
    return {name: found[name] for name in ("documents", "tokens", "samples")}


def _print_domains(domains: list[dict[str, Any]]) -> None:
    total = sum(domain["train"]["samples"] for domain in domains)
    rows = [
        [
            domain["name"],
            *(f"{domain['train'][name]:,}" for name in ("documents", "tokens", "samples")),
            f"{domain['train']['samples'] / total:.1%}",
            f"{domain['eval']['samples']:,}",
        ]
        for domain in domains
    ]
    names = ["domain", "documents", "tokens", "samples", "share", "held-out samples"]
    console.print(table("", names, rows))


def _print_counts(document: dict[str, Any]) -> None:
    rows = [
        [split, *(f"{document[split][name]:,}" for name in ("documents", "tokens", "samples"))]
        for split in ("train", "eval")
    ]
    console.print(table("", ["split", "documents", "tokens", "samples"], rows))
    left_out = ", ".join(
        f"{document[name]:,} {name}" for name in ("empty", "filtered", "skipped") if document[name]
    )
    console.print(
        f"{document['bytes']:,} bytes in {document['files']:,} files"
        + (f"; left out: {left_out}" if left_out else ""),
        soft_wrap=True,
    )
    for example in document["skipped_examples"]:
        console.print(f"  skipped {example}", markup=False, soft_wrap=True)
    console.print(
        f"tokenizer {document['tokenizer']} ({document['vocab_size']:,} tokens)", soft_wrap=True
    )


def _print_lengths(document_tokens: list[list[int]]) -> None:
    console.print("\ntokens per document (train)", soft_wrap=True)
    most = max(count for _, count in document_tokens)
    for upper, count in document_tokens:
        bar = "#" * max(1, round(_BAR_WIDTH * count / most))
        console.print(f"  <= {upper:>9,} {bar} {count:,}", soft_wrap=True)


def _samples(dataset: "Dataset") -> list[str]:
    import numpy as np

    from eagleray.actors.data.tokenizer import TextTokenizer

    tokenizer = TextTokenizer(dataset.tokenizer_json)
    count = min(2, dataset.num_samples("train"))
    tokens = dataset.read("train", np.arange(count, dtype=np.int64))
    return [tokenizer.decode(row.tolist()) for row in tokens]


@contextmanager
def _progress() -> Iterator[Callable[["BuildProgress"], None]]:
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
                    "tokens": progress.tokens - first.tokens,
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
