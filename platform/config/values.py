"""Value types of the configuration: sizes, durations and the base of every section."""

import difflib
import re
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_BYTE_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SECOND_UNITS = {"": 1.0, "MS": 1e-3, "S": 1.0, "M": 60.0, "MIN": 60.0, "H": 3600.0, "D": 86400.0}
_QUANTITY = re.compile(r"^\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z]*)\s*$")


def parse_bytes(value: Any) -> Any:
    """Turn `512MB` (10^6) or `1GiB` (2^30) into bytes; anything else passes through."""
    return _scaled(value, _BYTE_UNITS, "a size such as 512MB or 1GiB", whole=True)


def parse_seconds(value: Any) -> Any:
    """Turn `30s`, `250ms`, `5m` or `2h` into seconds; anything else passes through."""
    return _scaled(value, _SECOND_UNITS, "a duration such as 30s, 5m or 2h", whole=False)


def near(name: str, legal: Iterable[str]) -> str:
    """The legal name that was probably meant; empty if none is close."""
    return next(iter(difflib.get_close_matches(name, list(legal), n=1, cutoff=0.5)), "")


def _scaled(value: Any, units: dict[str, Any], rule: str, *, whole: bool) -> Any:
    if not isinstance(value, str):
        return value
    match = _QUANTITY.match(value)
    if match is None or match[2].upper() not in units:
        raise ValueError(f"must be {rule}")
    scaled = float(match[1]) * units[match[2].upper()]
    return round(scaled) if whole else scaled


ByteSize = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
"""Bytes; `512MB` and `1GiB` are accepted."""

Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(ge=0)]
"""Seconds; `30s`, `5m` and `2h` are accepted."""


Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
"""What a project, a model or a domain may be called."""


class Section(BaseModel):
    """Base of every configuration section: frozen, unknown keys refused, docstrings as help."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True,
        # A wait must end, and a record is JSON, which has no infinity.
        allow_inf_nan=False,
    )  # fmt: skip
