"""Records to rows: which columns there are, and what each cell becomes.

    number      the nearest float32; a list of them is a vector, of one length in the whole corpus
    category    a name, or a whole number or a truth value in the place of one
    empty       no field, null, NaN or nothing but white space; of a number also NA and NaN as text

How many values a column has is learnt from the first record that has any.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from eagleray.actors.data.recipe import Task, check_documents
from eagleray.actors.data.records import Bad, SourceFile
from eagleray.actors.data.sources import PartReader, Tally
from eagleray.platform.config import MAX_FLOAT32, FeaturesConfig
from eagleray.platform.errors import DataError

MAX_ROW_VALUES = 65_536
_NAME_THEM = "name the columns that you mean in data.features.columns"
_SHOWN_CHARS = 40


class Row(NamedTuple):
    """Values of a row, 0 for each category, and the words of its categories."""

    values: list[float]
    words: list[str]


@dataclass(frozen=True)
class RowColumn:
    """One column: `width` numbers, or a category."""

    name: str
    width: int
    is_category: bool
    is_label: bool = False


@dataclass(frozen=True)
class RowSchema:
    """The columns of the rows, the label last.

    `other_fields` may stand in a record without becoming features; None: any field may.
    """

    columns: tuple[RowColumn, ...]
    missing: Literal["fail", "nan"] | float
    other_fields: frozenset[str] | None = None

    @property
    def row_values(self) -> int:
        """Values of a row."""
        return sum(column.width for column in self.columns)

    @property
    def category_places(self) -> list[tuple[int, RowColumn]]:
        """Each category with the place of its code in a row."""
        places, place = [], 0
        for column in self.columns:
            if column.is_category:
                places.append((place, column))
            place += column.width
        return places

    def read_from(self, file: SourceFile) -> SourceFile:
        """The file, so that the columns are read from it."""
        return replace(file, columns=tuple(column.name for column in self.columns))

    def row(self, record: dict[str, Any]) -> Row | Bad:
        """The row of a record."""
        if self.other_fields is not None and not self._known_fields.issuperset(record):
            other = min(record.keys() - self._known_fields)
            return Bad(f"has a field {other!r}, as no record before it", _NAME_THEM)
        return self._plain_row(record) or self._checked_row(record)

    @cached_property
    def _known_fields(self) -> frozenset[str]:
        return frozenset(column.name for column in self.columns) | (self.other_fields or set())

    @cached_property
    def _shape(self) -> list[tuple[str, int, bool]]:
        return [(column.name, column.width, column.is_category) for column in self.columns]

    def _plain_row(self, record: dict[str, Any]) -> Row | None:
        """The row of a record without anything that needs a closer look: nearly all, quickly."""
        values: list[float] = []
        words: list[str] = []
        try:
            for name, width, is_category in self._shape:
                cell = record[name]
                if is_category:
                    if type(cell) is not str or not cell.isascii() or not cell.strip():
                        return None
                    words.append(cell)
                    values.append(0.0)
                elif width == 1:
                    values.append(float(cell))
                elif type(cell) is list and len(cell) == width:
                    values += map(float, cell)
                else:
                    return None
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        # False if one is NaN, infinite or too large.
        return Row(values, words) if sum(map(abs, values)) <= MAX_FLOAT32 else None

    def _checked_row(self, record: dict[str, Any]) -> Row | Bad:
        row = Row([], [])
        for column in self.columns:
            bad = self._add(row, column, record)
            if bad is not None:
                return bad
        return row

    def _add(self, row: Row, column: RowColumn, record: dict[str, Any]) -> Bad | None:
        cell = record.get(column.name)
        if column.is_category:
            word = self._word(cell, column, record)
            if isinstance(word, Bad):
                return word
            row.values.append(0.0)
            row.words.append(word)
            return None
        cells = cell if isinstance(cell, list) else [cell]
        if len(cells) != column.width and not _is_empty(cell):
            given = f"a list of {len(cells)}" if isinstance(cell, list) else "one value"
            known = f"{column.width} values" if column.width > 1 else "one"
            return Bad(f"has {given} in column {column.name!r}, and the first record has {known}")
        if len(cells) != column.width:
            cells = [None] * column.width
        for one in cells:
            value = self._number(one, column, record)
            if isinstance(value, Bad):
                return value
            row.values.append(value)
        return None

    def _number(self, cell: Any, column: RowColumn, record: dict[str, Any]) -> float | Bad:
        try:
            value = float(cell)
            if -MAX_FLOAT32 <= value <= MAX_FLOAT32:  # false for NaN
                return value
        except (TypeError, ValueError):
            pass
        except OverflowError:
            value = float("inf")
        if _is_empty(cell) or _is_not_available(cell):
            return self._empty(column, record)
        in_column = f"{_shown(cell)} in column {column.name!r}"
        if isinstance(cell, str | int | float) and _is_number(cell):
            return Bad(f"has {in_column}, which float32 cannot hold")
        return Bad(
            f"has {in_column}, not a number",
            "name the column in data.features.categories if its values are names, or leave it out "
            "of data.features.columns",
        )

    def _word(self, cell: Any, column: RowColumn, record: dict[str, Any]) -> str | Bad:
        if _is_empty(cell):
            if self.missing == "fail" or column.is_label:
                bad = self._empty(column, record)
                assert isinstance(bad, Bad), "an empty cell is bad here"
                return bad
            return ""
        if isinstance(cell, bool):
            return str(cell).lower()
        if isinstance(cell, float) and cell.is_integer():
            # What a table without empty cells would hold as a whole number.
            return str(int(cell))
        if isinstance(cell, int):
            return str(cell)
        if not isinstance(cell, str):
            return Bad(
                f"has {_shown(cell)} in category {column.name!r}, not a name or a whole number"
            )
        try:
            cell.encode()
        except UnicodeEncodeError:
            return Bad(f"has half a surrogate pair in category {column.name!r}")
        return cell

    def _empty(self, column: RowColumn, record: dict[str, Any]) -> float | Bad:
        if self.missing != "fail" and not column.is_label:
            return float(self.missing)
        has = "has an empty cell in column" if column.name in record else "has no field"
        fix = "" if column.is_label else "set data.features.missing to nan or to a number"
        return Bad(f"{has} {column.name!r}", fix)


def find_schema(task: Task) -> RowSchema:
    """The columns that the configuration asks for, as the first records have them.

    Raises:
        DataError: A column is not there, tables disagree about what columns there are, rows are too
            long, or there is no record at all.
    """
    config = task.data.features
    assert config is not None, "a dataset of features has their section"
    found = _Found(config, frozenset(name for file in task.files for name in file.where))
    tallies = [found.look(file) for file in task.files]
    if found.names is None:
        check_records(task, tallies)
        raise AssertionError("a record that can be used names columns")
    return found.schema()


def check_records(task: Task, tallies: Sequence[Tally]) -> None:
    """Refuse files without a single record that can be used.

    Raises:
        DataError: There is none; says what became of those that there are.
    """
    check_documents(task, tallies, "record", "check `where`, or name other files")


class _Found:
    """What is known of the columns; `names` are those of the features."""

    def __init__(self, config: FeaturesConfig, conditions: frozenset[str]) -> None:
        self._config, self._conditions = config, conditions
        self._asked = tuple([*(config.columns or []), *([config.label] if config.label else [])])
        self._widths: dict[str, int] = {}
        self._first: tuple[SourceFile, list[str]] | None = None
        self.names: Sequence[str] | None = config.columns

    def look(self, file: SourceFile) -> Tally:
        """Read as many records of a file as are needed."""
        is_open = self._config.columns is None
        wanted = replace(file, columns=() if is_open else self._asked)
        reader = PartReader(wanted, "skip", lambda num_bytes: None)
        if self.names is None or self._unknown() or (is_open and file.kind != "jsonl"):
            for record in reader.values(lambda record: record):
                self._learn(file, record)
                if file.kind == "csv" or not self._unknown():
                    break
        return reader.tally

    def schema(self) -> RowSchema:
        """All columns; one without any value is given the width of a number."""
        config = self._config
        columns = [
            RowColumn(name, self._widths.get(name, 1), name in config.categories)
            for name in self.names or []
        ]
        if config.label is not None:
            width = self._widths.get(config.label, 1)
            if width > 1:
                raise DataError(
                    f"data.features.label {config.label!r} holds a list of {width}, not one value",
                    "name a column that holds one",
                )
            is_class = config.label in config.categories
            columns.append(RowColumn(config.label, 1, is_class, is_label=True))
        others = self._conditions if config.columns is None else None
        schema = RowSchema(tuple(columns), config.missing, others)
        if schema.row_values > MAX_ROW_VALUES:
            raise DataError(
                f"data.features give {schema.row_values} values in a row; at most {MAX_ROW_VALUES} "
                "are possible",
                _NAME_THEM,
            )
        return schema

    def _learn(self, file: SourceFile, record: dict[str, Any]) -> None:
        if self._config.columns is None:
            self._learn_names(file, record)
        for name in self._unknown():
            cell = record.get(name)
            if not _is_empty(cell) and cell != []:
                self._widths[name] = len(cell) if isinstance(cell, list) else 1

    def _learn_names(self, file: SourceFile, record: dict[str, Any]) -> None:
        fields, label = list(record), self._config.label
        if self._first is None:
            self._first = (file, fields)
            for name in (*self._asked, *self._config.categories):
                if name not in fields:
                    raise DataError(
                        f"data.features: {name!r} is no column of {file.path} "
                        f"(it has {', '.join(map(repr, fields))})",
                        "correct the name, or name columns in data.features.columns",
                    )
            self.names = [n for n in fields if n != label and n not in self._conditions]
            if not self.names:
                raise DataError(
                    f"{file.path} has no column that could be a feature "
                    f"(it has {', '.join(map(repr, fields))})",
                    _NAME_THEM,
                )
        elif file.kind != "jsonl" and set(fields) - self._conditions != (
            set(self._first[1]) - self._conditions
        ):
            other = min(set(fields) ^ set(self._first[1]))
            raise DataError(
                f"{file.path} and {self._first[0].path} have different columns: only one of them "
                f"has {other!r}",
                _NAME_THEM,
            )

    def _unknown(self) -> list[str]:
        """Columns whose width is not known yet; a category is one code."""
        names = [*(self.names or []), *([self._config.label] if self._config.label else [])]
        known = (*self._widths, *self._config.categories)
        return [name for name in names if name not in known]


def _is_empty(cell: Any) -> bool:
    if isinstance(cell, str):
        return not cell.strip()
    return cell is None or (isinstance(cell, float) and cell != cell)


def _is_not_available(cell: Any) -> bool:
    return isinstance(cell, str) and cell.strip().upper() in ("NA", "NAN")


def _is_number(cell: str | float) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    except OverflowError:
        pass
    return True


def _shown(cell: Any) -> str:
    if not isinstance(cell, str | int | float):
        return f"a {type(cell).__name__}"
    text = repr(cell)
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."
