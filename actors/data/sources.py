"""Raw documents: every file that the sources name, streamed in a fixed order.

Laws:
    * Files come in the order of `data.sources`, and sorted by name within each; documents in file
      order.
    * Each record is counted once: documents + empty + filtered + skipped = records.
    * The bytes that were read are the bytes that were hashed: each pass hashes what it reads, in
      Parquet files right after it.
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
from typing import Any, BinaryIO, Literal, cast

from eagleray.actors.data.records import (
    PACKED,
    Bad,
    Records,
    SourceFile,
    field_text,
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
_NUM_EXAMPLES = 5

BadRecord = Literal["fail", "skip"]


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
                "its text would count double",
                "narrow one of the two paths",
            )
        seen.add(identity)
    return files


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
            DataError: A file cannot be read or unpacked, or a record is bad and those count as
                failures.
        """
        self.tallies = [Tally() for _ in self.files]
        self.bytes_read = 0
        for index, file in enumerate(self.files):
            for text in self._texts(file, self.tallies[index]):
                yield Document(text, index)

    def _texts(self, file: SourceFile, tally: Tally) -> Iterator[str]:
        with _named_failure(file.path):
            if file.kind == "parquet":
                yield from self._from_parquet(file, tally)
                return
            with file.path.open("rb", buffering=0) as raw:
                hashed = _Hashed(raw, self._advance)
                stream = cast(BinaryIO, BufferedReader(hashed, _BUFFER_BYTES))
                yield from self._wanted(
                    file, read_records(file, unpacked(file.path, stream)), tally
                )
                # What a reader left behind belongs to the digest too.
                while stream.read(_BUFFER_BYTES):
                    pass
                tally.sha256, tally.bytes = hashed.digest.hexdigest(), hashed.num_bytes

    def _from_parquet(self, file: SourceFile, tally: Tally) -> Iterator[str]:
        before, size = self.bytes_read, file.path.stat().st_size
        for share, records in read_parquet(file):
            self.bytes_read = before + int(share * size)
            yield from self._wanted(file, records, tally)
        self.bytes_read = before + size
        tally.sha256, tally.bytes = digest_file(file.path), size

    def _advance(self, num_bytes: int) -> None:
        self.bytes_read += num_bytes

    def _wanted(self, file: SourceFile, records: Records, tally: Tally) -> Iterator[str]:
        """The texts of the records that are neither filtered out, nor blank, nor skipped."""
        for place, record in records:
            if not isinstance(record, Bad) and not file.fits(record):
                tally.filtered += 1
                continue
            text = record if isinstance(record, Bad) else field_text(record, file.text_field)
            if isinstance(text, Bad):
                self._refuse(file, place, text.reason, tally)
            elif not text.strip():
                tally.empty += 1
            else:
                tally.documents += 1
                yield text

    def _refuse(self, file: SourceFile, place: int, reason: str, tally: Tally) -> None:
        if self.on_bad_record == "fail":
            raise DataError(
                f"{file.path}:{place} {reason}",
                "correct that record, or set data.on_bad_record=skip to leave such records out",
            )
        tally.skipped += 1
        if len(tally.examples) < _NUM_EXAMPLES:
            tally.examples.append(f"{file.name}:{place}: {reason}")


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
    """A raw file that hashes and counts what is read from it."""

    def __init__(self, raw: RawIOBase, advance: Callable[[int], None]) -> None:
        self._raw, self._advance = raw, advance
        self.digest, self.num_bytes = hashlib.sha256(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._raw.readinto(buffer) or 0
        self.digest.update(memoryview(buffer)[:count])
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
