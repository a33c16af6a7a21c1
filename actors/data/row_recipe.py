"""How records become a dataset of features: rows of float32, row shards, figures of columns."""

import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eagleray.actors.data.dataset import FEATURES_FORMAT, SPLITS
from eagleray.actors.data.features import Column, Features, FloatArray
from eagleray.actors.data.moments import Moment, Moments
from eagleray.actors.data.recipe import Task
from eagleray.actors.data.records import MAX_RECORD_BYTES
from eagleray.actors.data.row_schema import (
    MAX_ROW_VALUES,
    RowColumn,
    RowSchema,
    check_records,
    find_schema,
)
from eagleray.actors.data.row_units import RowEncoder
from eagleray.actors.data.rows import BLOCK_BYTES, ROW_DTYPE, RowWriter, rows_per_block
from eagleray.actors.data.sources import Tally
from eagleray.actors.data.split_writer import SplitWriter, joined
from eagleray.actors.data.units import Encoder, Unit, UnitResult
from eagleray.platform.errors import DataError

MAX_CATEGORIES = 1_000_000
"""Names of a column; float32 has a code for each of 16 times as many."""

# Python refuses to convert thousands of digits.
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,18}", re.ASCII)


class RowRecipe:
    """Records to samples of one row each."""

    format = FEATURES_FORMAT

    def __init__(self, task: Task) -> None:
        self._task, self._data = task, task.data

    def identity(self) -> dict[str, Any]:
        """What the dataset follows from, beside its sources and its format."""
        assert self._data.features is not None, "a dataset of features has their section"
        return {
            "features": self._data.features.model_dump(),
            "limits": [BLOCK_BYTES, MAX_RECORD_BYTES, MAX_ROW_VALUES, MAX_CATEGORIES],
            "data": self._data.model_dump(
                include={"eval_fraction", "shard_bytes", "on_bad_record"}
            ),
        }

    def encoder(self, folder: Path, digests: Sequence[str]) -> Encoder:
        """One that knows the columns."""
        return RowEncoder(
            folder, self._data.eval_fraction, self._data.on_bad_record, find_schema(self._task)
        )

    def write(
        self, folder: Path, encoder: Encoder, units: Sequence[Unit], results: Sequence[UnitResult]
    ) -> dict[str, Any]:
        """Cut the units' rows into shards, in the order of the units, with the dataset's codes."""
        assert isinstance(encoder, RowEncoder), "what `encoder` gave"
        check_records(self._task, [result.tally for result in results])
        schema = encoder.schema
        names = _all_names(schema, results)
        # Figures come last, and are not part of what the values mean.
        meaning = _features(schema, names, None).digest
        figures = _Figures(schema, names)
        described: dict[str, dict[str, dict[str, Any]]] = {split: {} for split in SPLITS}
        for domain in self._data.domains:
            for split in SPLITS:
                shape = (schema.row_values, meaning, self._data.shard_bytes)
                with RowSplitWriter(folder, domain, split, *shape) as writer:
                    for unit, result in zip(units, results, strict=True):
                        if unit.file.domain != domain:
                            continue
                        recode = _Recode(schema, names, result.words)
                        for items in encoder.items(unit, split, result.splits[split]):
                            rows = recode(items.reshape(-1, schema.row_values))
                            writer.append(rows)
                            if split == "train":
                                figures.add(rows)
                described[split][domain] = writer.describe()
        splits = {split: joined(domains) for split, domains in described.items()}
        features = _features(schema, names, figures if splits["train"]["samples"] else None)
        return {
            "block_rows": rows_per_block(schema.row_values),
            "features": {**features.describe(), "missing": schema.missing},
            "splits": splits,
        }

    def check(self, tallies: Sequence[Tally], splits: dict[str, Any]) -> None:
        """Refuse what has too few samples.

        Raises:
            DataError: A split, or a domain's training split, has none.
        """
        for domain, found in splits["train"]["domains"].items():
            if not found["samples"]:
                raise self._no_sample(tallies, "train", domain)
        if not splits["eval"]["samples"]:
            raise self._no_sample(tallies, "eval")

    def _no_sample(self, tallies: Sequence[Tally], split: str, domain: str = "") -> DataError:
        of_all = sum(tally.documents for tally in tallies)
        of_domain = f" of domain {domain}" if len(self._data.domains) > 1 and domain else ""
        return DataError(
            f"the {split} split{of_domain} has no sample: 0 of {of_all} records "
            f"(data.eval_fraction={self._data.eval_fraction:g})",
            f"add records{of_domain}, or {'raise' if split == 'eval' else 'lower'} "
            "data.eval_fraction",
        )


class RowSplitWriter(SplitWriter):
    """Rows with the dataset's codes.

    Args:
        folder: Where the shards go.
        domain: First part of their names.
        split: Second part of their names.
        row_values: Values of a row.
        meaning_sha256: Digest of what they mean.
        shard_bytes: Size of a shard, rounded down to whole blocks, at least one.
    """

    def __init__(
        self, folder: Path, domain: str, split: str, row_values: int, meaning_sha256: bytes,
        shard_bytes: int,
    ) -> None:  # fmt: skip
        block_rows = rows_per_block(row_values)
        num_blocks = shard_bytes // (block_rows * row_values * ROW_DTYPE.itemsize)
        super().__init__(folder, domain, split, max(1, num_blocks) * block_rows)
        self._row_values, self._meaning_sha256 = row_values, meaning_sha256

    def describe(self) -> dict[str, Any]:
        """The domain's part of the manifest."""
        return {"samples": self.num_entries, "shards": self._files}

    def _open(self, path: Path) -> RowWriter:
        return RowWriter(
            path,
            row_values=self._row_values,
            meaning_sha256=self._meaning_sha256,
            first_row=self.num_entries,
        )

    def _counts(self, first: int, count: int) -> dict[str, int]:
        return {"rows": count, "first_row": first}


class _Recode:
    """Turns a unit's codes into the dataset's."""

    def __init__(
        self, schema: RowSchema, names: Sequence[Sequence[str]], words: Sequence[Sequence[str]]
    ) -> None:
        self._tables = []
        for (place, _), all_names, own in zip(schema.category_places, names, words, strict=True):
            code = {name: number for number, name in enumerate(all_names)}
            self._tables.append((place, np.array([code[word] for word in own], dtype=ROW_DTYPE)))

    def __call__(self, rows: FloatArray) -> FloatArray:
        rows = rows.copy()
        for place, table in self._tables:
            rows[:, place] = table[rows[:, place].astype(np.int64)]
        return rows


class _Figures:
    """What the manifest says of the training rows' columns."""

    def __init__(self, schema: RowSchema, names: Sequence[Sequence[str]]) -> None:
        self._moments = Moments(schema.row_values)
        self._num_rows = 0
        self._counts: dict[int, npt.NDArray[np.int64]] = {
            place: np.zeros(len(of_column), np.int64)
            for (place, _), of_column in zip(schema.category_places, names, strict=True)
        }

    def add(self, rows: FloatArray) -> None:
        """Count rows in."""
        self._num_rows += len(rows)
        self._moments.add(rows)
        for place, counts in self._counts.items():
            counts += np.bincount(rows[:, place].astype(np.int64), minlength=len(counts))

    def of_category(self, place: int) -> dict[str, Any]:
        """How often each name occurs."""
        return {"count": tuple(self._counts[place].tolist())}

    def of_numbers(self, column: RowColumn, place: int) -> dict[str, Any]:
        """Figures of each number of a column.

        Raises:
            DataError: There is none.
        """
        moments: list[Moment] = []
        for at in range(column.width):
            moment = self._moments.of_column(place + at)
            if moment is None:
                raise DataError(
                    f"column {column.name!r} has no value in any of the {self._num_rows} rows of "
                    "the training split"
                    + (f" at place {at} of its list" if column.width > 1 else ""),
                    "leave it out of data.features.columns, or correct its name",
                )
            moments.append(moment)
        return {
            field.name: tuple(getattr(moment, field.name) for moment in moments)
            for field in fields(Moment)
        }


def _features(
    schema: RowSchema, names: Sequence[Sequence[str]], figures: _Figures | None
) -> Features:
    """The columns as the dataset has them; figures may come later."""
    columns, place, left = [], 0, list(names)
    for column in schema.columns:
        categories = tuple(left.pop(0)) if column.is_category else None
        of_column: dict[str, Any] = {"count": ()}
        if figures is not None and column.is_category:
            of_column = figures.of_category(place)
        elif figures is not None:
            of_column = figures.of_numbers(column, place)
        columns.append(Column(column.name, column.width, categories, **of_column))
        place += column.width
    has_label = schema.columns[-1].is_label
    return Features(
        tuple(columns[:-1] if has_label else columns), columns[-1] if has_label else None
    )


def _all_names(schema: RowSchema, results: Sequence[UnitResult]) -> list[list[str]]:
    """The names of each category in the whole corpus, in the order of their codes."""
    found = []
    for number, (_, column) in enumerate(schema.category_places):
        names: set[str] = set()
        for result in results:
            names.update(result.words[number])
            if len(names) > MAX_CATEGORIES:
                raise DataError(
                    f"column {column.name!r} has more than {MAX_CATEGORIES:,} different values: "
                    "too many for a category",
                    "leave it out of data.features.categories and columns",
                )
        found.append(_sorted_names(names))
    return found


def _sorted_names(names: set[str]) -> list[str]:
    """By number if all are whole numbers, else by code points; the empty name first."""
    if all(_WHOLE_NUMBER.fullmatch(name) for name in names if name):
        return sorted(names, key=lambda name: (name != "", int(name or 0), name))
    return sorted(names)
