"""Units of a build: a part of a file encoded to token files, alone, in any process, only once.

    <build>/units/00007/train.ids, eval.ids     little-endian token ids, each document ended
    <build>/units/00007/result.json             counts, checksums, what was read

Laws:
    * A unit's files follow from its part, the tokenizer and the split rule, not from who encodes it
      or when.
    * A unit's folder appears whole, so what a killed build finished is used by the next one.
"""

import hashlib
import json
import shutil
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eagleray.actors.data.dataset import SPLITS, Split
from eagleray.actors.data.records import SourceFile
from eagleray.actors.data.sources import BadRecord, Part, PartReader, Tally
from eagleray.actors.data.tokenizer import TextTokenizer
from eagleray.platform.errors import DataError, IntegrityError
from eagleray.platform.storage import canonical_json, sync_tree

_BATCH_CHARS = 1_000_000
_READ_TOKENS = 1 << 20
_RESULT = "result.json"
TOKENIZER = "tokenizer.json"
"""The build's tokenizer, in its folder."""

IdArray = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Unit:
    """A part of a file, with its place in the whole build."""

    index: int
    file_index: int
    file: SourceFile
    part: Part


@dataclass(frozen=True)
class SplitPart:
    """What a unit holds of one split; `lengths` counts documents by the bits of their tokens."""

    documents: int
    tokens: int
    lengths: dict[int, int]
    crc32: int


@dataclass(frozen=True)
class UnitResult:
    """What a finished unit says of itself."""

    tally: Tally
    splits: dict[Split, SplitPart]


@dataclass(frozen=True)
class Encoder:
    """Encodes units into a build's folder.

    Args:
        folder: The build's; on storage that every node sees.
        eval_fraction: Share of the documents held out.
        on_bad_record: What to do about a record that cannot be used.
    """

    folder: Path
    eval_fraction: float
    on_bad_record: BadRecord

    def encode(
        self,
        unit: Unit,
        tokenizer: TextTokenizer,
        advance: Callable[[int, int, int], None] = lambda documents, num_bytes, tokens: None,
    ) -> UnitResult:
        """Encode a unit, whether or not it is there already.

        Args:
            unit: What to encode.
            tokenizer: The build's.
            advance: Told of documents, bytes and tokens since it was told before.

        Raises:
            DataError: The file cannot be read, holds a bad record, or has changed.
            OSError: The folder cannot be written.
        """
        place = self._place(unit)
        staging = place.with_name(f".tmp-{uuid.uuid4().hex}")
        staging.mkdir(parents=True)
        try:
            result = self._write(unit, tokenizer, staging, advance)
            document = canonical_json(
                {
                    "tally": asdict(result.tally),
                    "splits": {name: asdict(part) for name, part in result.splits.items()},
                }
            )
            (staging / _RESULT).write_bytes(document)
            sync_tree(staging)
            try:
                staging.rename(place)
            except OSError:
                # Another process was quicker, and wrote the same.
                if not place.exists():
                    raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return result

    def found(self, unit: Unit) -> UnitResult | None:
        """What an earlier process finished of this build."""
        try:
            document = json.loads((self._place(unit) / _RESULT).read_bytes())
        except FileNotFoundError:
            return None
        splits: dict[Split, SplitPart] = {}
        for split in SPLITS:
            fields = document["splits"][split]
            lengths = {int(bits): count for bits, count in fields["lengths"].items()}
            splits[split] = SplitPart(**{**fields, "lengths": lengths})
        return UnitResult(Tally(**document["tally"]), splits)

    def ids(self, unit: Unit, split: Split, part: SplitPart, dtype: Any) -> Iterator[IdArray]:
        """The ids of a finished unit, piece by piece.

        Raises:
            IntegrityError: They are not what was written; the unit is removed, to be done anew.
        """
        path, crc, tokens = self._place(unit) / f"{split}.ids", 0, 0
        with path.open("rb") as file:
            while data := file.read(_READ_TOKENS * np.dtype(dtype).itemsize):
                crc = zlib.crc32(data, crc)
                tokens += len(data) // np.dtype(dtype).itemsize
                yield np.frombuffer(data, dtype=dtype)
        if (tokens, crc) != (part.tokens, part.crc32):
            shutil.rmtree(self._place(unit), ignore_errors=True)
            raise IntegrityError(
                f"{path} is not what the build wrote there", "build again: the rest is kept"
            )

    def _place(self, unit: Unit) -> Path:
        return self.folder / "units" / f"{unit.index:05d}"

    def _write(
        self,
        unit: Unit,
        tokenizer: TextTokenizer,
        folder: Path,
        advance: Callable[[int, int, int], None],
    ) -> UnitResult:
        read = 0

        def count(num_bytes: int) -> None:
            nonlocal read
            read += num_bytes

        reader = PartReader(unit.file, self.on_bad_record, count)
        writers = {split: _IdWriter(folder / f"{split}.ids", tokenizer) for split in SPLITS}
        try:
            for batch in _batches(reader.texts(unit.part)):
                encoded = tokenizer.encode_batch(batch)
                for text, ids in zip(batch, encoded, strict=True):
                    writers[split_of(text, self.eval_fraction)].append(ids)
                advance(len(batch), read, sum(map(len, encoded)) + len(batch))
                read = 0
            advance(0, read, 0)
        finally:
            for writer in writers.values():
                writer.close()
        expected = unit.part.sha256
        if expected and reader.tally.sha256 != expected:
            raise changed(unit.file)
        return UnitResult(reader.tally, {split: writers[split].describe() for split in SPLITS})


def split_of(text: str, eval_fraction: float) -> Split:
    """The split of a document, from its text alone."""
    digest = hashlib.sha256(text.encode()).digest()
    return "eval" if int.from_bytes(digest[:8]) < int(eval_fraction * 2**64) else "train"


def changed(file: SourceFile) -> DataError:
    """What is wrong with a file that is no longer the one that was hashed."""
    return DataError(
        f"{file.path} was changed while the dataset was built", "build again when it is still"
    )


def total(tallies: list[Tally], sha256: str, num_examples: int) -> Tally:
    """The tally of a file from those of its parts."""
    whole = Tally(sha256=sha256)
    for tally in tallies:
        for name in ("bytes", "documents", "empty", "filtered", "skipped"):
            setattr(whole, name, getattr(whole, name) + getattr(tally, name))
        whole.examples = [*whole.examples, *tally.examples][:num_examples]
    return whole


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
        return SplitPart(self._documents, self._tokens, dict(self._lengths), self._crc)


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
