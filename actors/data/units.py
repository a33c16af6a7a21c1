"""Units of a build: a part of a file encoded to item files, alone, in any process, only once.

    <build>/units/00007/train.items, eval.items     little-endian token ids, or values of rows
    <build>/units/00007/result.json                 counts, checksums, what was read

Laws:
    * A unit's files follow from its part, the build's settings and the split rule, not from who
      encodes it or when.
    * A unit's folder appears whole, so what a killed build finished is used by the next one.
"""

import hashlib
import json
import shutil
import uuid
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eagleray.actors.data.blocks import ItemArray
from eagleray.actors.data.dataset import SPLITS, Split
from eagleray.actors.data.records import SourceFile
from eagleray.actors.data.sources import BadRecord, Part, Tally
from eagleray.platform.errors import DataError, IntegrityError
from eagleray.platform.storage import canonical_json, sync_tree

LAYOUT = 2
"""Of the files of a unit; a build does not go on from one that had another."""
_READ_ITEMS = 1 << 20
_RESULT = "result.json"

Advance = Callable[[int, int, int], None]
"""Told of documents, bytes and tokens since it was told before."""


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
    items: int
    crc32: int
    lengths: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class UnitResult:
    """What a finished unit says of itself; `words` are those that its codes stand for."""

    tally: Tally
    splits: dict[Split, SplitPart]
    words: list[list[str]] = field(default_factory=list)


@dataclass(frozen=True)
class Encoder(ABC):
    """Encodes units into a build's folder; a kind of dataset says how.

    Args:
        folder: The build's; on storage that every node sees.
        eval_fraction: Share of the documents held out.
        on_bad_record: What to do about a record that cannot be used.
    """

    folder: Path
    eval_fraction: float
    on_bad_record: BadRecord

    @property
    @abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """Type of an item."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Items that belong together."""

    def encode(
        self, unit: Unit, advance: Advance = lambda documents, num_bytes, tokens: None
    ) -> UnitResult:
        """Encode a unit, whether or not it is there already.

        Args:
            unit: What to encode.
            advance: Told how far it is.

        Raises:
            DataError: The file cannot be read, holds a bad record, or has changed.
            OSError: The folder cannot be written.
        """
        place = self._place(unit)
        staging = place.with_name(f".tmp-{uuid.uuid4().hex}")
        staging.mkdir(parents=True)
        try:
            result = self._write(unit, staging, advance)
            expected = unit.part.sha256
            if expected and result.tally.sha256 != expected:
                raise changed(unit.file)
            (staging / _RESULT).write_bytes(canonical_json(asdict(result)))
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
        return UnitResult(Tally(**document["tally"]), splits, document["words"])

    def items(self, unit: Unit, split: Split, part: SplitPart) -> Iterator[ItemArray]:
        """The items of a finished unit, piece by piece; a piece holds whole rows.

        Raises:
            IntegrityError: They are not what was written; the unit is removed, to be done anew.
        """
        path = self._place(unit) / item_file(split)
        piece_bytes = max(1, _READ_ITEMS // self.width) * self.width * self.dtype.itemsize
        with path.open("rb") as file:
            # All of it before any of it: what was damaged must not be taken for codes of words.
            size = crc = 0
            while data := file.read(piece_bytes):
                size, crc = size + len(data), zlib.crc32(data, crc)
            if (size, crc) != (part.items * self.dtype.itemsize, part.crc32):
                shutil.rmtree(self._place(unit), ignore_errors=True)
                raise IntegrityError(
                    f"{path} is not what the build wrote there", "build again: the rest is kept"
                )
            file.seek(0)
            while data := file.read(piece_bytes):
                yield np.frombuffer(data, dtype=self.dtype)

    def _place(self, unit: Unit) -> Path:
        return self.folder / "units" / f"{unit.index:05d}"

    @abstractmethod
    def _write(self, unit: Unit, folder: Path, advance: Advance) -> UnitResult:
        """Fill the folder with the items of each split."""


def split_of(content: bytes, eval_fraction: float) -> Split:
    """The split of a document or a row, from its content alone."""
    digest = hashlib.sha256(content).digest()
    return "eval" if int.from_bytes(digest[:8]) < int(eval_fraction * 2**64) else "train"


def item_file(split: Split) -> str:
    """The name of a unit's file of one split."""
    return f"{split}.items"


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
