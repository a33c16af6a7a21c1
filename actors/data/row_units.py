"""Units of rows: records to float32 values, with codes of the unit's own for categories.

A code is the place of a name among those that the unit has met, in their order; the codes of the
dataset are put in their place when units are joined. So a unit needs to know nothing of others.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagleray.actors.data.dataset import SPLITS, Split
from eagleray.actors.data.features import FloatArray
from eagleray.actors.data.row_schema import Row, RowSchema
from eagleray.actors.data.rows import ROW_DTYPE
from eagleray.actors.data.sources import PartReader
from eagleray.actors.data.units import (
    Advance,
    Encoder,
    SplitPart,
    Unit,
    UnitResult,
    item_file,
    split_of,
)

_BATCH_VALUES = 250_000


@dataclass(frozen=True)
class RowEncoder(Encoder):
    """Encodes records of numbers."""

    schema: RowSchema

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values."""
        return ROW_DTYPE

    @property
    def width(self) -> int:
        """Values of a row."""
        return self.schema.row_values

    def _write(self, unit: Unit, folder: Path, advance: Advance) -> UnitResult:
        read = 0

        def count(num_bytes: int) -> None:
            nonlocal read
            read += num_bytes

        schema = self.schema
        reader = PartReader(schema.read_from(unit.file), self.on_bad_record, count)
        writers = {split: _RowFile(folder / item_file(split), schema) for split in SPLITS}
        codes: list[dict[str, int]] = [{} for _ in schema.category_places]
        try:
            for batch in _batches(reader.values(schema.row, unit.part), schema.row_values):
                rows = np.array([row.values for row in batch], dtype=ROW_DTYPE)
                is_held_out = self._held_out(rows, batch)
                for number, (place, _) in enumerate(schema.category_places):
                    known = codes[number]
                    rows[:, place] = [
                        known.setdefault(row.words[number], len(known)) for row in batch
                    ]
                writers["eval"].append(rows[is_held_out])
                writers["train"].append(rows[~is_held_out])
                advance(len(batch), read, rows.size)
                read = 0
            advance(0, read, 0)
        finally:
            for writer in writers.values():
                writer.close()
        splits: dict[Split, SplitPart] = {split: writers[split].describe() for split in SPLITS}
        return UnitResult(reader.tally, splits, [list(known) for known in codes])

    def _held_out(self, rows: FloatArray, batch: list[Row]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which rows are: by their values and, instead of codes, their words."""
        content = rows.tobytes()
        size = rows.shape[1] * ROW_DTYPE.itemsize
        return np.array(
            [
                split_of(
                    content[at * size : at * size + size]
                    + b"".join(word.encode() + b"\0" for word in row.words),
                    self.eval_fraction,
                )
                == "eval"
                for at, row in enumerate(batch)
            ]
        )


class _RowFile:
    def __init__(self, path: Path, schema: RowSchema) -> None:
        self._file, self._width = path.open("wb"), schema.row_values
        self._rows = self._crc = 0

    def append(self, rows: FloatArray) -> None:
        data = rows.tobytes()
        self._file.write(data)
        self._crc = zlib.crc32(data, self._crc)
        self._rows += len(rows)

    def close(self) -> None:
        self._file.close()

    def describe(self) -> SplitPart:
        return SplitPart(self._rows, self._rows * self._width, self._crc)


def _batches(rows: Iterator[Row], row_values: int) -> Iterator[list[Row]]:
    most = max(1, _BATCH_VALUES // row_values)
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == most:
            yield batch
            batch = []
    if batch:
        yield batch
