"""What the rows of a dataset mean: their columns, in order, as the manifest describes them.

    F = features: the values of all columns but the label, which comes last in a row.

Figures are those of the training split; how they are computed: docs/formats.md#dataset-of-features.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from eagleray.platform.storage import canonical_json, digest_bytes

FloatArray = npt.NDArray[np.float32]


class RowLayout(NamedTuple):
    """How a row is parted into F features and perhaps a label: a class, or a number."""

    num_features: int
    label: Literal["class", "number"] | None


@dataclass(frozen=True)
class Column:
    """Numbers, one or a vector of `width`, or a code for one of `categories`.

    Of numbers, the figures are one per place of the vector, over the `count` that are not NaN; the
    standard deviation is that of a population. Of categories, `count` says how often each occurs.
    """

    name: str
    width: int
    categories: tuple[str, ...] | None
    count: tuple[int, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    min: tuple[float, ...] = ()
    max: tuple[float, ...] = ()

    def word(self, value: float) -> str:
        """What a value stands for."""
        return f"{value:g}" if self.categories is None else self.categories[int(value)]

    def identity(self) -> list[Any]:
        """What the bytes of its values mean."""
        return [self.name, self.width, self.categories]


@dataclass(frozen=True)
class Features:
    """The columns of a dataset's rows."""

    columns: tuple[Column, ...]
    label: Column | None

    @classmethod
    def from_manifest(cls, described: dict[str, Any]) -> "Features":
        """Read the part `features` of a manifest."""
        label = described["label"]
        return cls(tuple(map(_column, described["columns"])), _column(label) if label else None)

    def describe(self) -> dict[str, Any]:
        """The part `features` of a manifest; takes `from_manifest` back to the same."""
        return {
            "columns": [_described(column) for column in self.columns],
            "label": _described(self.label) if self.label else None,
        }

    @property
    def all_columns(self) -> tuple[Column, ...]:
        """Those of the features, and the label's."""
        return (*self.columns, *([self.label] if self.label else []))

    @cached_property
    def layout(self) -> RowLayout:
        """How a row is parted."""
        num_features = sum(column.width for column in self.columns)
        if self.label is None:
            return RowLayout(num_features, None)
        return RowLayout(num_features, "number" if self.label.categories is None else "class")

    @property
    def row_values(self) -> int:
        """Values of a row."""
        return self.layout.num_features + (self.label is not None)

    @property
    def names(self) -> list[str]:
        """A name for each of the F features: of a vector `pixels[0]`, `pixels[1]` and so on."""
        return list(_value_names(self.columns))

    @cached_property
    def mean(self) -> FloatArray:
        """Mean of each feature, [F]; 0 for a category, whose codes are no quantities."""
        return np.array(
            [m for column in self.columns for m in column.mean or [0.0]], dtype=np.float32
        )

    @cached_property
    def scale(self) -> FloatArray:
        """Standard deviation of each feature, [F]; 1 for a category and where all are equal."""
        return np.array(
            [s or 1.0 for column in self.columns for s in column.std or [1.0]], dtype=np.float32
        )

    @property
    def digest(self) -> bytes:
        """SHA-256 of what the values of a row mean; figures do not belong to it."""
        label = self.label.identity() if self.label else None
        meaning = [[column.identity() for column in self.columns], label]
        return bytes.fromhex(digest_bytes(canonical_json(meaning)))


def _column(described: dict[str, Any]) -> Column:
    values = {"categories": None, **described}
    plain: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
    }
    return Column(**plain)


def _described(column: Column) -> dict[str, Any]:
    names = ["name", "width", "count"]
    names += ["categories"] if column.categories is not None else ["mean", "std", "min", "max"]
    return {name: getattr(column, name) for name in names}


def _value_names(columns: tuple[Column, ...]) -> Iterator[str]:
    for column in columns:
        if column.width == 1:
            yield column.name
        else:
            yield from (f"{column.name}[{place}]" for place in range(column.width))
