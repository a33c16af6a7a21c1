"""Row shards: the on-disk form of numbers, a row of float32 after the other.

A shard is a file of blocks whose items are the values of whole rows. Layout and version:
docs/formats.md#row-shard.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagleray.actors.data.blocks import BlockFile, BlockHeader, BlockWriter
from eagleray.actors.data.features import FloatArray

ROW_DTYPE = np.dtype("<f4")
BLOCK_BYTES = 65_536
"""At most, unless a row is longer: one value of the feature cache."""


def rows_per_block(row_values: int) -> int:
    """How many rows share a checksum."""
    return max(1, BLOCK_BYTES // (row_values * ROW_DTYPE.itemsize))


@dataclass(frozen=True)
class RowHeader(BlockHeader):
    """What a shard says about itself; `first_row` is the position of its first row in the domain.

    `meaning_sha256` is the digest of what the values of a row mean.
    """

    MAGIC = b"EAGLROWS"
    VERSION = 1
    ENTRIES = "rows"

    itemsize: int
    num_rows: int
    first_row: int
    block_rows: int
    row_values: int
    meaning_sha256: bytes

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values on disk."""
        return ROW_DTYPE

    @property
    def num_entries(self) -> int:
        """Rows in the shard."""
        return self.num_rows

    @property
    def block_entries(self) -> int:
        """Rows in a block."""
        return self.block_rows

    @property
    def width(self) -> int:
        """Values of a row."""
        return self.row_values


class RowWriter(BlockWriter):
    """Writes one shard; as a context manager, a failed one is left without a header."""

    def __init__(
        self, path: Path, *, row_values: int, meaning_sha256: bytes, first_row: int,
        block_rows: int | None = None,
    ) -> None:  # fmt: skip
        self._row_values, self._meaning_sha256 = row_values, meaning_sha256
        self._first_row = first_row
        self._block_rows = block_rows or rows_per_block(row_values)
        super().__init__(path, self._block_rows * row_values * ROW_DTYPE.itemsize)

    def append(self, entries: FloatArray) -> None:
        """Add rows [n, row_values] at the end."""
        assert entries.shape[1] == self._row_values, "rows are as long as the shard says"
        self._add(entries.astype(ROW_DTYPE, copy=False).tobytes(), len(entries))

    def _header(self) -> RowHeader:
        return RowHeader(
            ROW_DTYPE.itemsize, self.num_entries, self._first_row, self._block_rows,
            self._row_values, self._meaning_sha256,
        )  # fmt: skip


class RowShard(BlockFile[RowHeader]):
    """An open row shard; its items are the values of one row after the other."""

    def __init__(self, path: Path, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(path, RowHeader, sleep)
