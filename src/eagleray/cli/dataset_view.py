"""What the verbs of the data show of a dataset: counts, domains, lengths or columns, samples."""

from typing import TYPE_CHECKING, Any

from eagleray.cli.console import console, table

if TYPE_CHECKING:
    from eagleray.actors.data import Dataset
    from eagleray.actors.data.features import Column

_BAR_WIDTH = 40
_SAMPLE_CHARS = 300
_NUM_SAMPLES = 2
_MOST_CLASSES = 30
_MOST_NAMES = 5


def summary(dataset: "Dataset") -> dict[str, Any]:
    """What a build tells of its dataset, as plain values."""
    sources, splits = dataset.manifest["sources"], dataset.manifest["splits"]
    files = {(source["name"], source["sha256"]): source["bytes"] for source in sources}
    counts: tuple[str, ...]
    document: dict[str, Any] = {
        "digest": dataset.digest,
        "path": str(dataset.folder),
        # Several domains may read one file.
        "files": len(files),
        "bytes": sum(files.values()),
        "skipped_examples": [e for source in sources for e in source["skipped_examples"]],
    }
    for name in ("documents", "empty", "filtered", "skipped"):
        document[name] = sum(source[name] for source in sources)
    if dataset.features is None:
        document |= {
            "tokenizer": dataset.manifest["tokenizer"]["sha256"],
            "vocab_size": dataset.vocab_size,
            "seq_len": dataset.seq_len,
        }
        counts = ("documents", "tokens", "samples", "dropped_tokens")
    else:
        document |= {
            "num_features": dataset.features.layout.num_features,
            "features": dataset.manifest["features"],
        }
        counts = ("samples",)
    for split, found in splits.items():
        document[split] = {name: found[name] for name in counts}
    return document


def contents(dataset: "Dataset") -> dict[str, Any]:
    """What `inspect` tells beyond that: lengths of documents, domains, samples."""
    document: dict[str, Any] = {
        "domains": [
            {"name": name, **{split: _counts(dataset, split, name) for split in ("train", "eval")}}
            for name in dataset.domains
        ],
    }
    if dataset.features is None:
        train = dataset.manifest["splits"]["train"]
        return document | {
            "document_tokens": train["document_tokens"],
            "examples": _texts(dataset),
        }
    return document | {"examples": _rows(dataset)}


def print_summary(document: dict[str, Any]) -> None:
    """Show a summary to people."""
    is_text = "features" not in document
    counts = ("documents", "tokens", "samples") if is_text else ("samples",)
    rows = [
        [split, *(f"{document[split][name]:,}" for name in counts)] for split in ("train", "eval")
    ]
    console.print(table("", ["split", *(counts if is_text else ("rows",))], rows))
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
    if is_text:
        tokenizer = f"tokenizer {document['tokenizer']} ({document['vocab_size']:,} tokens)"
        console.print(tokenizer, soft_wrap=True)
        return
    features = document["features"]
    columns, label = features["columns"], features["label"]
    meant = "no label"
    if label is not None:
        names = label.get("categories")
        meant = f"label {label['name']}: " + (f"{len(names):,} classes" if names else "a number")
    console.print(
        f"{document['num_features']:,} features of {len(columns):,} columns, {meant}",
        markup=False,
        soft_wrap=True,
    )


def print_contents(document: dict[str, Any], dataset: "Dataset") -> None:
    """Show to people what `inspect` tells beyond the summary."""
    is_text = dataset.features is None
    if len(document["domains"]) > 1:
        _print_domains(document["domains"], is_text=is_text)
    if dataset.features is None:
        _print_lengths(document["document_tokens"])
        shown = [repr(text[:_SAMPLE_CHARS]) for text in document["examples"]]
    else:
        rows = document["train"]["samples"]
        _print_columns([*dataset.features.all_columns], rows)
        shown = [_row_text(row)[:_SAMPLE_CHARS] for row in document["examples"]]
    for number, text in enumerate(shown):
        console.print(f"\ntrain sample {number}:", soft_wrap=True)
        console.print(text, markup=False, soft_wrap=True)


def _counts(dataset: "Dataset", split: str, domain: str) -> dict[str, int]:
    described = dataset.manifest["splits"][split]
    found = described.get("domains", {}).get(domain, described)
    return {name: found[name] for name in ("documents", "tokens", "samples") if name in found}


def _print_domains(domains: list[dict[str, Any]], *, is_text: bool) -> None:
    total = sum(domain["train"]["samples"] for domain in domains)
    counts = ("documents", "tokens", "samples") if is_text else ("samples",)
    rows = [
        [
            domain["name"],
            *(f"{domain['train'][name]:,}" for name in counts),
            f"{domain['train']['samples'] / total:.1%}",
            f"{domain['eval']['samples']:,}",
        ]
        for domain in domains
    ]
    names = counts if is_text else ("rows",)
    held_out = f"held-out {'samples' if is_text else 'rows'}"
    console.print(table("", ["domain", *names, "share", held_out], rows))


def _print_lengths(document_tokens: list[list[int]]) -> None:
    console.print("\ntokens per document (train)", soft_wrap=True)
    _print_bars([(f"<= {upper:>9,}", count) for upper, count in document_tokens])


def _print_bars(counts: list[tuple[str, int]]) -> None:
    most = max(1, *(count for _, count in counts))
    for name, count in counts:
        bar = "#" * max(1, round(_BAR_WIDTH * count / most))
        console.print(f"  {name} {bar} {count:,}", markup=False, soft_wrap=True)


def _print_columns(columns: list["Column"], num_rows: int) -> None:
    """Figures of the training rows; `columns` has the label last, if there is one."""
    numbers = [column for column in columns if column.categories is None]
    rows = [
        [
            column.name + (f" x {column.width}" if column.width > 1 else ""),
            *(_span(getattr(column, name)) for name in ("mean", "std", "min", "max")),
            _span([num_rows - count for count in column.count]),
        ]
        for column in numbers
    ]
    if rows:
        console.print(table("", ["number (train)", "mean", "std", "min", "max", "empty"], rows))
    for column in columns:
        if column.categories is None:
            continue
        counted = sorted(zip(column.categories, column.count, strict=True), key=lambda x: -x[1])
        if column is columns[-1] and len(counted) <= _MOST_CLASSES:
            console.print(f"\n{column.name} (train)", markup=False, soft_wrap=True)
            width = max(map(len, column.categories))
            _print_bars(
                [
                    (name.ljust(width), count)
                    for name, count in zip(column.categories, column.count, strict=True)
                ]
            )
        else:
            most = ", ".join(f"{name!r} {count:,}" for name, count in counted[:_MOST_NAMES])
            more = ", ..." if len(counted) > _MOST_NAMES else ""
            console.print(
                f"{column.name}: {len(counted):,} names: {most}{more}", markup=False, soft_wrap=True
            )


def _span(values: Any) -> str:
    low, high = min(values), max(values)
    return f"{low:.4g}" if low == high else f"{low:.4g}..{high:.4g}"


def _row_text(row: dict[str, Any]) -> str:
    return " ".join(f"{name}={_cell_text(value)}" for name, value in row.items())


def _cell_text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_cell_text, value))}]"
    if isinstance(value, str):
        return value
    return "empty" if value is None else f"{value:g}"


def _texts(dataset: "Dataset") -> list[str]:
    from eagleray.actors.data.tokenizer import TextTokenizer

    tokenizer = TextTokenizer(dataset.tokenizer_json)
    return [tokenizer.decode(row) for row in _first_samples(dataset)]


def _rows(dataset: "Dataset") -> list[dict[str, Any]]:
    """Values by column, names in the place of their codes, None for an empty cell."""
    assert dataset.features is not None, "it is a dataset of features"
    found = []
    for values in _first_samples(dataset):
        row: dict[str, Any] = {}
        place = 0
        for column in dataset.features.all_columns:
            cells: list[Any] = [
                None if value != value else value for value in values[place : place + column.width]
            ]
            if column.categories is not None:
                cells = [column.categories[int(cells[0])]]
            row[column.name] = cells if column.width > 1 else cells[0]
            place += column.width
        found.append(row)
    return found


def _first_samples(dataset: "Dataset") -> list[list[Any]]:
    import numpy as np

    count = min(_NUM_SAMPLES, dataset.num_samples("train"))
    samples: list[list[Any]] = dataset.read("train", np.arange(count, dtype=np.int64)).tolist()
    return samples
