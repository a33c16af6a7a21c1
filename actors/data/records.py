"""Records of one raw file: JSON Lines, CSV, Parquet or plain text, the first three with fields.

A format gives (place, record) for each record that is not blank: the line it begins on (in Parquet
the row), counted from 1, and its fields or why it has none. Memory is bounded by one record, for
Parquet by one batch of rows.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from gzip import GzipFile
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import pyarrow
import pyarrow.parquet

from eagleray.platform.config import Condition, RangeCondition
from eagleray.platform.errors import DataError

MAX_RECORD_BYTES = 256 * 2**20
"""Longest record or text file, uncompressed: a document is held in memory whole."""

PACKED = (".gz", ".zst")
_BUFFER_BYTES = 1 << 20
_PARQUET_ROWS = 256
_PARQUET_BYTES = 64 * 2**20
"""Of a table so many rows or bytes are decoded at a time, whichever is less; one row at least."""
_BOM = b"\xef\xbb\xbf"

Kind = Literal["jsonl", "text", "csv", "parquet"]


@dataclass(frozen=True)
class SourceFile:
    """One file to read; `name` is the same wherever the data lies.

    `columns` are what is read instead of text, beside what `where` needs; none: all there are.
    """

    name: str
    path: Path
    kind: Kind
    text_field: str = "text"
    where: dict[str, Condition] = field(default_factory=dict)
    domain: str = "main"
    columns: tuple[str, ...] | None = None

    @property
    def fields(self) -> list[str]:
        """What each record must have; empty: whatever it has is wanted."""
        if self.columns == ():
            return []
        return list(dict.fromkeys([*(self.columns or [self.text_field]), *self.where]))

    def fits(self, fields: dict[str, Any]) -> bool:
        """Whether a record is wanted."""
        where = self.where
        return not where or all(_fits(fields.get(name), rule) for name, rule in where.items())


@dataclass(frozen=True)
class Bad:
    """A record that cannot be used, why, and what would help besides correcting it."""

    reason: str
    fix: str = ""


Records = Iterator[tuple[int, dict[str, Any] | Bad]]


def unpacked(path: Path, stream: BinaryIO) -> BinaryIO:
    """The content of a file that may be packed, by its suffix."""
    if path.suffix == ".gz":
        return cast(BinaryIO, BufferedReader(GzipFile(fileobj=stream), _BUFFER_BYTES))
    if path.suffix == ".zst":
        packed = pyarrow.CompressedInputStream(pyarrow.PythonFile(_Lent(stream), mode="r"), "zstd")
        return cast(BinaryIO, BufferedReader(packed, _BUFFER_BYTES))
    return stream


def read_records(file: SourceFile, content: BinaryIO, first_line: int = 0) -> Records:
    """The records of a file of any kind but parquet.

    Args:
        file: What `content` belongs to.
        content: Its bytes, unpacked.
        first_line: Lines before `content` begins; only JSON Lines may begin inside.

    Raises:
        DataError: It is a CSV file without a usable header.
    """
    if file.kind == "text":
        yield 1, _text_file(file, content.read(MAX_RECORD_BYTES + 1))
    elif file.kind == "csv":
        yield from _rows(file, content)
    else:
        for line, record in _lines(content, first_line):
            yield line, _json_object(record)


def read_parquet(file: SourceFile, groups: range | None = None) -> Iterator[tuple[float, Records]]:
    """(share of the rows before, records) of each batch of rows; of some row groups or of all.

    Raises:
        DataError: It is no Parquet file, is damaged, or lacks a column.
    """
    with _parquet(file) as table:
        _check_columns(file, table.schema_arrow.names)
        sizes = [table.metadata.row_group(i).num_rows for i in range(table.metadata.num_row_groups)]
        groups = range(len(sizes)) if groups is None else groups
        before, here = sum(sizes[: groups.start]), sum(sizes[groups.start : groups.stop])
        done = 0
        columns = file.fields or None
        for group in groups:
            num_rows = _rows_at_a_time(table.metadata.row_group(group), columns)
            for batch in table.iter_batches(num_rows, row_groups=[group], columns=columns):
                values = batch.to_pydict()
                rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values())]  # noqa: B905 - columns are equally long
                first = before + done + 1
                yield done / max(1, here), iter([(first + i, row) for i, row in enumerate(rows)])
                done += len(rows)


def _rows_at_a_time(group: Any, columns: Sequence[str] | None) -> int:
    """How many rows of a row group are decoded at a time."""
    parts = [group.column(i) for i in range(group.num_columns)]
    size = sum(
        p.total_uncompressed_size
        for p in parts
        if columns is None or p.path_in_schema.split(".")[0] in columns
    )
    fitting: int = _PARQUET_BYTES * group.num_rows // max(1, size)
    return max(1, min(_PARQUET_ROWS, fitting))


def parquet_groups(file: SourceFile, target_bytes: int) -> Iterator[tuple[range, int]]:
    """Row groups of about `target_bytes` together, with the bytes of the file that they take.

    Raises:
        DataError: It is no Parquet file.
    """
    with _parquet(file) as table:
        start, size, count = 0, 0, table.metadata.num_row_groups
        for group in range(count):
            columns = table.metadata.row_group(group)
            size += sum(columns.column(i).total_compressed_size for i in range(columns.num_columns))
            if size >= target_bytes or group == count - 1:
                yield range(start, group + 1), size
                start, size = group + 1, 0


def field_text(fields: dict[str, Any], name: str) -> str | Bad:
    """The text of a record."""
    if name not in fields:
        return Bad(f"has no field {name!r} (it has {', '.join(map(repr, sorted(fields)))})")
    text = fields[name]
    if not isinstance(text, str):
        return Bad(f"has a {type(text).__name__} in field {name!r}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError:
        # JSON may spell half of a surrogate pair; no UTF-8 text can hold it.
        return Bad(f"has half a surrogate pair in field {name!r}")
    return text


@contextmanager
def _parquet(file: SourceFile) -> Iterator[pyarrow.parquet.ParquetFile]:
    try:
        with pyarrow.parquet.ParquetFile(file.path) as table:
            yield table
    except pyarrow.ArrowException as error:
        raise DataError(
            f"{file.path} cannot be read as Parquet: {error}", "write or fetch it again"
        ) from error


class _Lent:
    """A stream for pyarrow, which closes what it is given; the lender still hashes the rest."""

    closed = False

    def __init__(self, stream: BinaryIO) -> None:
        self.read = stream.read

    def close(self) -> None:
        """Leave it open."""


def _fits(value: Any, rule: Condition) -> bool:
    if isinstance(rule, RangeCondition):
        number = _number(value)
        if number is None:
            return False
        return (rule.min is None or rule.min <= number) and (rule.max is None or number <= rule.max)
    if value in rule:
        return True
    # Cells of a CSV file are text, whatever they mean.
    number = _number(value) if isinstance(value, str) else None
    return number is not None and any(number == v for v in rule if not isinstance(v, str))


def _number(value: Any) -> int | float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)
        return None
    return value if isinstance(value, int | float) else None


def _text_file(file: SourceFile, content: bytes) -> dict[str, Any] | Bad:
    if len(content) > MAX_RECORD_BYTES:
        return _too_long()
    try:
        return {file.text_field: content.decode("utf-8-sig")}
    except UnicodeDecodeError as error:
        return _not_utf8(error)


def _lines(content: BinaryIO, line: int) -> Iterator[tuple[int, bytes]]:
    """(line, bytes) of each line; one that is too long comes cut, just above the limit."""
    while record := content.readline(MAX_RECORD_BYTES + 1):
        line += 1
        rest = record
        while not rest.endswith(b"\n") and len(rest) > MAX_RECORD_BYTES:
            rest = content.readline(MAX_RECORD_BYTES + 1)
        if line == 1:
            record = record.removeprefix(_BOM)
        if record.strip():
            yield line, record


def _json_object(record: bytes) -> dict[str, Any] | Bad:
    if len(record) > MAX_RECORD_BYTES:
        return _too_long()
    try:
        parsed = json.loads(record.decode("utf-8"))
    except UnicodeDecodeError as error:
        return _not_utf8(error)
    except RecursionError:
        return Bad("is nested too deeply to be read as JSON")
    except ValueError as error:
        return Bad(f"is not valid JSON: {error}")
    if not isinstance(parsed, dict):
        return Bad(f"is a JSON {type(parsed).__name__}, not an object")
    return parsed


def _rows(file: SourceFile, content: BinaryIO) -> Records:
    # The limit is the process's own; Python's default of 128 KB is shorter than a speech.
    csv.field_size_limit(MAX_RECORD_BYTES)
    # Bytes that are no UTF-8 pass as lone surrogates, so that one bad row does not end the file.
    lines = io.TextIOWrapper(content, "utf-8-sig", "surrogateescape", newline="")
    reader = csv.reader(lines, strict=True)
    try:
        header = next(reader, [])
    except csv.Error as error:
        raise DataError(f"{file.path}:1 is not valid CSV: {error}", "correct its header") from error
    if header:  # An empty file has no records; that there is no text at all is told elsewhere.
        _check_columns(file, header)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            yield line, Bad(f"is not valid CSV: {error}")
            continue
        if cells:
            yield line, _row(header, cells)
    lines.detach()


def _row(header: list[str], cells: list[str]) -> dict[str, Any] | Bad:
    if len(cells) != len(header):
        return Bad(f"has {len(cells)} cells, the header {len(header)}")
    for cell in () if "".join(cells).isascii() else cells:
        try:
            cell.encode()
        except UnicodeEncodeError as error:
            return Bad(f"is not UTF-8: invalid byte in {cell[: error.start][-20:]!r}...")
    return dict(zip(header, cells, strict=True))


def _check_columns(file: SourceFile, columns: list[str]) -> None:
    setting = "text_field" if file.columns is None else "data.features"
    for name in (*file.fields, *file.where):
        if name not in columns:
            raise DataError(
                f"{file.path} has no column {name!r} (it has {', '.join(map(repr, columns))})",
                f"set {setting} and `where` of its source to columns that it has",
            )
    wanted = set(file.fields or columns)
    for name, count in Counter(columns).items():
        if count > 1 and name in wanted:
            raise DataError(
                f"{file.path} has {count} columns {name!r}", "give each column a name of its own"
            )


def _not_utf8(error: UnicodeDecodeError) -> Bad:
    return Bad(f"is not UTF-8: {error.reason} at byte {error.start}")


def _too_long() -> Bad:
    return Bad(f"is longer than {MAX_RECORD_BYTES} bytes")
