"""Raw documents: JSON Lines and plain text, streamed in a fixed order and in bounded memory.

Laws:
    * Files come in the order of `data.sources`, and sorted by name within each; documents in file
      order.
    * Each record is counted once: documents + empty + filtered + skipped = records.
    * The bytes that were read are the bytes that were hashed: each pass hashes what it reads.
"""

import glob
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from gzip import GzipFile
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from eagleray.platform.config import SourceConfig
from eagleray.platform.errors import DataError

MAX_RECORD_BYTES = 256 * 2**20
"""Longest record or text file, uncompressed: a document is held in memory whole."""

_SUFFIXES = {"jsonl": (".jsonl", ".ndjson"), "text": (".txt", ".text", ".md", ".rst")}
_BUFFER_BYTES = 1 << 20
_NUM_EXAMPLES = 5
_BOM = b"\xef\xbb\xbf"

BadRecord = Literal["fail", "skip"]


@dataclass(frozen=True)
class SourceFile:
    """One file to read; `name` is the same wherever the data lies."""

    name: str
    path: Path
    kind: Literal["jsonl", "text"]
    text_field: str = "text"
    where: Mapping[str, Sequence[str | int | float]] = field(default_factory=dict)


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
                "remove `where`, or use kind jsonl",
            )
        files += [
            SourceFile(name, path, source.kind, source.text_field, source.where)
            for name, path in _matches(source, resolve(source.path))
        ]
    seen: set[str] = set()
    for file in files:
        identity = json.dumps([str(file.path), file.text_field, dict(file.where)], sort_keys=True)
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
        with _named_failure(file.path), file.path.open("rb", buffering=0) as raw:
            hashed = _Hashed(raw, self._advance)
            stream = cast(BinaryIO, BufferedReader(hashed, _BUFFER_BYTES))
            content = stream
            if file.path.suffix == ".gz":
                content = cast(BinaryIO, BufferedReader(GzipFile(fileobj=stream), _BUFFER_BYTES))
            for line, record in _records(file, content):
                text = self._text(file, line, record, tally)
                if text is None:
                    continue
                if not text.strip():
                    tally.empty += 1
                    continue
                tally.documents += 1
                yield text
            while stream.read(
                _BUFFER_BYTES
            ):  # What a reader left behind belongs to the digest too.
                pass
            tally.sha256, tally.bytes = hashed.digest.hexdigest(), hashed.num_bytes

    def _advance(self, num_bytes: int) -> None:
        self.bytes_read += num_bytes

    def _text(self, file: SourceFile, line: int, record: bytes, tally: Tally) -> str | None:
        """The record's text; None if it is filtered out or skipped."""
        try:
            if len(record) > MAX_RECORD_BYTES:
                raise ValueError(f"is longer than {MAX_RECORD_BYTES} bytes")
            if file.kind == "text":
                return record.decode("utf-8-sig")
            parsed = _json_object(record)
            if any(parsed.get(name) not in allowed for name, allowed in file.where.items()):
                tally.filtered += 1
                return None
            return _field_text(parsed, file.text_field)
        except UnicodeDecodeError as error:
            reason = f"is not UTF-8: {error.reason} at byte {error.start}"
        except ValueError as error:
            reason = str(error)
        if self.on_bad_record == "fail":
            raise DataError(
                f"{file.path}:{line} {reason}",
                "correct that record, or set data.on_bad_record=skip to leave such records out",
            )
        tally.skipped += 1
        if len(tally.examples) < _NUM_EXAMPLES:
            tally.examples.append(f"{file.name}:{line}: {reason}")
        return None


def _records(file: SourceFile, content: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(line, bytes) of each record; one that is too long comes cut, just above the limit."""
    if file.kind == "text":
        yield 1, content.read(MAX_RECORD_BYTES + 1)
        return
    line = 0
    while record := content.readline(MAX_RECORD_BYTES + 1):
        line += 1
        rest = record
        while not rest.endswith(b"\n") and len(rest) > MAX_RECORD_BYTES:
            rest = content.readline(MAX_RECORD_BYTES + 1)
        if line == 1:
            record = record.removeprefix(_BOM)
        if record.strip():
            yield line, record


def _json_object(record: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(record.decode("utf-8"))
    except UnicodeDecodeError:
        raise
    except RecursionError:
        raise ValueError("is nested too deeply to be read as JSON") from None
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"is a JSON {type(parsed).__name__}, not an object")
    return parsed


def _field_text(parsed: dict[str, Any], name: str) -> str:
    if name not in parsed:
        raise ValueError(f"has no field {name!r} (it has {', '.join(map(repr, sorted(parsed)))})")
    text = parsed[name]
    if not isinstance(text, str):
        raise ValueError(f"has a {type(text).__name__} in field {name!r}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError:
        # JSON may spell half of a surrogate pair; no UTF-8 text can hold it.
        raise ValueError(f"has half a surrogate pair in field {name!r}") from None
    return text


def _matches(source: SourceConfig, path: Path) -> list[tuple[str, Path]]:
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        base, suffixes = path, _SUFFIXES[source.kind]
        rule = f"no {' or '.join(suffixes)} file (.gz allowed)"
        found = [p for p in path.rglob("*") if p.name.removesuffix(".gz").endswith(suffixes)]
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
