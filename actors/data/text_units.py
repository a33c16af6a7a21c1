"""Units of text: documents to token ids, each document ended."""

import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eagleray.actors.data.dataset import SPLITS, Split
from eagleray.actors.data.sources import PartReader
from eagleray.actors.data.tokenizer import TextTokenizer
from eagleray.actors.data.units import (
    Advance,
    Encoder,
    SplitPart,
    Unit,
    UnitResult,
    item_file,
    split_of,
)

_BATCH_CHARS = 1_000_000
TOKENIZER = "tokenizer.json"
"""The build's tokenizer, in its folder."""

IdArray = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class TextEncoder(Encoder):
    """Encodes text by the tokenizer that lies in the build's folder."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the ids."""
        return kept_tokenizer(self.folder).dtype

    @property
    def width(self) -> int:
        """Ids stand alone."""
        return 1

    def _write(self, unit: Unit, folder: Path, advance: Advance) -> UnitResult:
        tokenizer, read = kept_tokenizer(self.folder), 0

        def count(num_bytes: int) -> None:
            nonlocal read
            read += num_bytes

        reader = PartReader(unit.file, self.on_bad_record, count)
        writers = {split: _IdWriter(folder / item_file(split), tokenizer) for split in SPLITS}
        try:
            for batch in _batches(reader.texts(unit.part)):
                encoded = tokenizer.encode_batch(batch)
                for text, ids in zip(batch, encoded, strict=True):
                    writers[split_of_text(text, self.eval_fraction)].append(ids)
                advance(len(batch), read, sum(map(len, encoded)) + len(batch))
                read = 0
            advance(0, read, 0)
        finally:
            for writer in writers.values():
                writer.close()
        return UnitResult(reader.tally, {split: writers[split].describe() for split in SPLITS})


@lru_cache(maxsize=1)
def kept_tokenizer(folder: Path) -> TextTokenizer:
    """The tokenizer of a build; a process keeps it, with the pieces that it has met."""
    return TextTokenizer((folder / TOKENIZER).read_bytes())


def split_of_text(text: str, eval_fraction: float) -> Split:
    """The split of a document."""
    return split_of(text.encode(), eval_fraction)


class _IdWriter:
    def __init__(self, path: Path, tokenizer: TextTokenizer) -> None:
        self._file = path.open("wb")
        self._dtype = tokenizer.dtype
        self._eod = np.array([tokenizer.eod_id], dtype=tokenizer.dtype).tobytes()
        self._documents = self._tokens = self._crc = 0
        self._lengths: Counter[int] = Counter()

    def append(self, ids: IdArray) -> None:
        data = ids.astype(self._dtype, copy=False).tobytes() + self._eod
        self._file.write(data)
        self._crc = zlib.crc32(data, self._crc)
        self._documents += 1
        self._tokens += len(ids) + 1
        self._lengths[len(ids).bit_length()] += 1

    def close(self) -> None:
        self._file.close()

    def describe(self) -> SplitPart:
        return SplitPart(self._documents, self._tokens, self._crc, dict(self._lengths))


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    num_chars = 0
    for text in texts:
        batch.append(text)
        num_chars += len(text)
        if num_chars >= _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch
