"""The section `data.features`: which columns of the records become numbers."""

import math
from collections import Counter
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from eagleray.platform.config.values import Section, near

MAX_FLOAT32 = 3.4028234663852886e38
"""The largest number that a feature can be."""
_MAX_COLUMNS = 10_000


def _missing(value: Any) -> Any:
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value in ("fail", "nan") or (is_number and abs(value) <= MAX_FLOAT32):
        return value
    raise ValueError("must be fail, nan or a number that float32 can hold")


ColumnName = Annotated[str, Field(min_length=1, max_length=200)]


class FeaturesConfig(Section):
    """Numbers instead of text: columns of each record become a row of float32."""

    columns: list[ColumnName] | None = Field(default=None, min_length=1, max_length=_MAX_COLUMNS)
    """The features, in this order; null: every column but `label` and those of `where`. A field
    that holds a list of numbers is as many features."""
    label: ColumnName | None = None
    """What is to be predicted: a number, or a class if it is in `categories`."""
    categories: list[ColumnName] = Field(default=[], max_length=_MAX_COLUMNS)
    """Columns whose values are names: each becomes its place among the sorted names."""
    missing: Annotated[Literal["fail", "nan"] | float, BeforeValidator(_missing)] = "fail"
    """What an empty cell of a feature is: a bad record, NaN, or this number; unless it is fail, an
    empty category is a name of its own. A record without its label is bad in any case."""

    @model_validator(mode="after")
    def _names(self) -> Self:
        for where, names in (("columns", self.columns or []), ("categories", self.categories)):
            counts = Counter(names)
            twice = next((name for name in names if counts[name] > 1), None)
            if twice is not None:
                raise ValueError(f"{where} names {twice!r} twice")
        if self.columns is None:
            return self
        if self.label in self.columns:
            raise ValueError(
                f"label {self.label!r} is one of the columns too: a model would be given what it "
                "is to predict"
            )
        known = [*self.columns, *([self.label] if self.label else [])]
        for name in self.categories:
            if name not in known:
                meant = near(name, known)
                raise ValueError(
                    f"categories: {name!r} is neither one of the columns nor the label"
                    + (f": did you mean {meant!r}?" if meant else "")
                )
        return self
