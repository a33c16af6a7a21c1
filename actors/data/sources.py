"""Raw documents: every file that the sources name, streamed in a fixed order.

Laws:
    * Files come in the order of `data.sources`, and sorted by name within each; documents in file
      order.
    * Each record is counted once: documents + empty + filtered + skipped = records.
    * The bytes that were read are the bytes that were hashed: each pass hashes what it reads, in
      Parquet files right after it.
    * The documents of a file's parts, one part after the other, are those of the file.
"""

import glob
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar, cast

from eagleray.actors.data.records import (
    PACKED,
    Bad,
    Records,
    SourceFile,
    field_text,
    parquet_groups,
    read_parquet,
    read_records,
    unpacked,
)
from eagleray.platform.config import SourceConfig
from eagleray.platform.errors import DataError
from eagleray.platform.storage import digest_file

_SUFFIXES = {
    "jsonl": (".jsonl", ".ndjson"),
    "text": (".txt", ".text", ".md", ".rst"),
    "csv": (".csv",),
    "parquet": (".parquet", ".pq"),
}
_BUFFER_BYTES = 1 << 20
NUM_EXAMPLES = 5

BadRecord = Literal["fail", "skip"]
T = TypeVar("T")


@dataclass(frozen=True)
class Document:
    """A text that is not blank, and the index of the file it came from."""

    text: str
    file: int


@dataclass
class Tally:
    """What one pass found in one file. `sha256` is of the file as stored, and set at its end."""

    sha256: str = ""
    bytes: int = 0
    documents: int = 0
    empty: int = 0
    filtered: int = 0
    skipped: int = 0
    examples: list[str] = field(default_factory=list)
    """The first few bad records, as `file:line: reason`."""


def find_files(sources: Sequence[SourceConfig], resolve: Callable[[str], Path]) -> list[SourceFile]:
    """Every file that the sources name, in reading order.

    Hidden files and folders inside a folder or a glob are left out.

    Raises:
        DataError: There are no sources, a path is not there, nothing matches, or a file is named
            twice.
    """
    if not sources:
        raise DataError("data.sources is empty", "name at least one file, folder or glob of text")
    files: list[SourceFile] = []
    for source in sources:
        if source.kind == "text" and source.where:
            raise DataError(
                f"data.sources: {source.path} has kind text, which has no fields for `where`",
                "remove `where`, or use a kind that has fields",
            )
        files += [
            SourceFile(name, path, source.kind, source.text_field, source.where, source.domain)
            for name, path in _matches(source, resolve(source.path))
        ]
    seen: set[str] = set()
    for file in files:
        identity = json.dumps([str(file.path), file.text_field, described(file.where)])
        if identity in seen:
            raise DataError(
                f"data.sources names {file.path} twice with the same filter: "
                "what it holds would count double",
                "narrow one of the two paths",
            )
        seen.add(identity)
    return files


@dataclass(frozen=True)
class Part:
    """A stretch of a file that can be read alone.

    Of a JSON Lines file that is not packed: bytes [start, stop), from the start of a line to the
    end of one. Of a Parquet file: row groups [start, stop). Of any other: all of it.
    """

    start: int
    stop: int
    num_bytes: int
    """Bytes as stored; of row groups about."""
    first_line: int = 0
    """Lines before it."""
    sha256: str = ""
    """Of its bytes; empty for row groups, which only their whole file is checked for."""


def parts_of(
    file: SourceFile, target_bytes: int, advance: Callable[[int], None]
) -> tuple[str, list[Part]]:
    """Read a file once: its SHA-256, and parts of about `target_bytes` that make it up.

    Args:
        file: What to read.
        target_bytes: A part ends with the first record that reaches it.
        advance: Told of bytes that were read.

    Raises:
        DataError: It cannot be read.
    """
    with _named_failure(file.path):
        if file.kind == "parquet":
            digest = digest_file(file.path)
            advance(file.path.stat().st_size)
            return digest, [
                Part(groups.start, groups.stop, size)
                for groups, size in parquet_groups(file, target_bytes)
            ]
        cut = _Cut(target_bytes if is_cuttable(file) else None)
        with file.path.open("rb", buffering=0) as raw:
            while chunk := raw.read(_BUFFER_BYTES):
                cut.add(chunk)
                advance(len(chunk))
        return cut.whole.hexdigest(), cut.end()


def is_cuttable(file: SourceFile) -> bool:
    """Whether each line is a record: in CSV a cell may hold several, a packed file has none."""
    return file.kind == "jsonl" and file.path.suffix not in PACKED


class _Cut:
    """Cuts the bytes of a file after lines, hashing whole and parts."""

    def __init__(self, target_bytes: int | None) -> None:
        self.whole, self._part = hashlib.sha256(), hashlib.sha256()
        self._target = target_bytes
        self._parts: list[Part] = []
        self._start = self._stop = self._first_line = self._line = 0

    def add(self, chunk: bytes) -> None:
        """More bytes."""
        self.whole.update(chunk)
        while chunk and self._target is not None:
            missing = max(0, self._target - (self._stop - self._start) - 1)
            end = chunk.find(b"\n", missing) + 1
            if not end:
                break
            self._take(chunk[:end])
            self._close()
            chunk = chunk[end:]
        self._take(chunk)

    def end(self) -> list[Part]:
        """All parts; one at least."""
        if self._stop > self._start or not self._parts:
            self._close()
        return self._parts

    def _take(self, data: bytes) -> None:
        self._part.update(data)
        self._stop += len(data)
        self._line += data.count(b"\n")

    def _close(self) -> None:
        self._parts.append(
            Part(
                self._start,
                self._stop,
                self._stop - self._start,
                self._first_line,
                self._part.hexdigest(),
            )
        )
        self._start, self._first_line, self._part = self._stop, self._line, hashlib.sha256()


class PartReader:
    """Reads the records of one file, or of a part of it.

    Args:
        file: What to read.
        on_bad_record: What to do about a record that cannot be used.
        advance: Told of bytes as stored that were read.
    """

    def __init__(
        self, file: SourceFile, on_bad_record: BadRecord, advance: Callable[[int], None]
    ) -> None:
        self._file, self._on_bad_record, self._advance = file, on_bad_record, advance
        self.tally = Tally()

    def texts(self, part: Part | None = None) -> Iterator[str]:
        """Each text that is wanted and not blank; as `values` otherwise."""
        return self.values(lambda record: _text(record, self._file.text_field), part)

    def values(
        self, take: Callable[[dict[str, Any]], T | Bad | None], part: Part | None = None
    ) -> Iterator[T]:
        """What `take` makes of each record that is wanted; `tally` counts them, whole at the end.

        Args:
            take: Gives a record's value, why it has none, or None for one that is empty.
            part: What of the file; None: all of it.

        Raises:
            DataError: The file cannot be read or unpacked, or a record is bad and those count as
                failures.
        """
        file, tally = self._file, self.tally
        with _named_failure(file.path):
            if file.kind == "parquet":
                yield from self._from_parquet(take, part)
                return
            with file.path.open("rb", buffering=0) as raw:
                if part is not None:
                    raw.seek(part.start)
                hashed = _Hashed(raw, self._advance, part.num_bytes if part else None)
                stream = cast(BinaryIO, BufferedReader(hashed, _BUFFER_BYTES))
                content = unpacked(file.path, stream)
                records = read_records(file, content, part.first_line if part else 0)
                yield from self._wanted(records, take)
                # What a reader left behind belongs to the digest too.
                while stream.read(_BUFFER_BYTES):
                    pass
                tally.sha256, tally.bytes = hashed.digest.hexdigest(), hashed.num_bytes

    def _from_parquet(
        self, take: Callable[[dict[str, Any]], T | Bad | None], part: Part | None
    ) -> Iterator[T]:
        size = part.num_bytes if part else self._file.path.stat().st_size
        told = 0
        for share, records in read_parquet(
            self._file, range(part.start, part.stop) if part else None
        ):
            self._advance(int(share * size) - told)
            told = int(share * size)
            yield from self._wanted(records, take)
        self._advance(size - told)
        self.tally.bytes = size
        if part is None:
            self.tally.sha256 = digest_file(self._file.path)

    def _wanted(
        self, records: Records, take: Callable[[dict[str, Any]], T | Bad | None]
    ) -> Iterator[T]:
        """The values of the records that are neither filtered out, nor empty, nor skipped."""
        file, tally = self._file, self.tally
        for place, record in records:
            if not isinstance(record, Bad) and not file.fits(record):
                tally.filtered += 1
                continue
            value = record if isinstance(record, Bad) else take(record)
            if isinstance(value, Bad):
                self._refuse(place, value)
            elif value is None:
                tally.empty += 1
            else:
                tally.documents += 1
                yield value

    def _refuse(self, place: int, bad: Bad) -> None:
        if self._on_bad_record == "fail":
            ways = f"{bad.fix}, or" if bad.fix else "or"
            raise DataError(
                f"{self._file.path}:{place} {bad.reason}",
                f"correct that record, {ways} set data.on_bad_record=skip to leave such records "
                "out",
            )
        self.tally.skipped += 1
        if len(self.tally.examples) < NUM_EXAMPLES:
            self.tally.examples.append(f"{self._file.name}:{place}: {bad.reason}")


class DocumentReader:
    """Reads files document by document.

    `tallies` describe the latest pass, file by file; `bytes_read` is how far it is.
    """

    def __init__(self, files: Sequence[SourceFile], on_bad_record: BadRecord) -> None:
        self.files = files
        self.on_bad_record = on_bad_record
        self.tallies = [Tally() for _ in files]
        self.bytes_read = 0

    def documents(self) -> Iterator[Document]:
        """All documents from the start.

        Raises:
            DataError: As `PartReader.texts`.
        """
        self.tallies = [Tally() for _ in self.files]
        self.bytes_read = 0
        for index, file in enumerate(self.files):
            reader = PartReader(file, self.on_bad_record, self._advance)
            self.tallies[index] = reader.tally
            for text in reader.texts():
                yield Document(text, index)

    def _advance(self, num_bytes: int) -> None:
        self.bytes_read += num_bytes


def _text(record: dict[str, Any], name: str) -> str | Bad | None:
    """A record's text; None if it is blank."""
    text = field_text(record, name)
    return text if isinstance(text, Bad) or text.strip() else None


def described(where: dict[str, Any]) -> dict[str, Any]:
    """Conditions as plain values, in an order that depends on nothing but them."""
    return {
        name: rule if isinstance(rule, list) else rule.model_dump(exclude_none=True)
        for name, rule in sorted(where.items())
    }


def _matches(source: SourceConfig, path: Path) -> list[tuple[str, Path]]:
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        base, suffixes = path, _SUFFIXES[source.kind]
        packed = "" if source.kind == "parquet" else f" ({' or '.join(PACKED)} allowed)"
        rule = f"no {' or '.join(suffixes)} file{packed}"
        found = [p for p in path.rglob("*") if _unpacked_name(p).endswith(suffixes)]
    elif glob.has_magic(str(path)):
        base, rule = _fixed_part(path), "nothing"
        found = list(base.glob(str(path.relative_to(base)))) if base.is_dir() else []
    else:
        raise DataError(
            f"data.sources: there is no {path}",
            f"correct `path: {source.path}`, or put the file there",
        )
    named = sorted(
        (p.relative_to(base).as_posix(), p)
        for p in found
        if p.is_file() and not any(part.startswith(".") for part in p.relative_to(base).parts)
    )
    if not named:
        raise DataError(f"data.sources: {rule} found at {path}", f"correct `path: {source.path}`")
    return named


def _unpacked_name(path: Path) -> str:
    return path.stem if path.suffix in PACKED else path.name


def _fixed_part(pattern: Path) -> Path:
    base = pattern
    while glob.has_magic(str(base)):
        base = base.parent
    return base


class _Hashed(RawIOBase):
    """A raw file that hashes and counts what is read from it, up to a limit."""

    def __init__(
        self, raw: RawIOBase, advance: Callable[[int], None], limit: int | None = None
    ) -> None:
        self._raw, self._advance, self._limit = raw, advance, limit
        self.digest, self.num_bytes = hashlib.sha256(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        if self._limit is not None:
            view = view[: self._limit - self.num_bytes]
        count = self._raw.readinto(view) or 0
        self.digest.update(view[:count])
        self.num_bytes += count
        self._advance(count)
        return count


@contextmanager
def _named_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked: {error}", "fetch or pack it again") from error
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}",
            "check the file and its permissions",
        ) from error
