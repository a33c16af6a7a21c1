"""Figures as people read them: numbers, shares, durations, sizes, moments."""

import json
import math
from datetime import UTC, datetime

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_THOUSANDS = ((1e9, "B"), (1e6, "M"), (1e3, "k"))
NOTHING = "-"


def number(value: float | None, digits: int = 4) -> str:
    """`6.322`, `1,234`, `0.00025`, `2.5e-05`: `digits` significant ones, whole when that large."""
    if value is None or not math.isfinite(value):
        return NOTHING if value is None else str(value)
    if value == round(value) and abs(value) < 1e15:
        return f"{value:,.0f}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def loss_text(value: float | None, decimals: int = 3) -> str:
    """`6.380`: losses are compared, so they keep their zeros."""
    return NOTHING if value is None else f"{value:,.{decimals}f}"


def compact(value: float, digits: int = 3) -> str:
    """`816k`, `4.56k`, `1.2M`; small numbers as they are."""
    for size, letter in _THOUSANDS:
        if abs(value) >= size:
            return f"{value / size:.{digits}g}{letter}"
    return number(value, digits)


def percent(share: float | None) -> str:
    """`29 %`, `0.4 %`."""
    if share is None or not math.isfinite(share):
        return NOTHING
    value = 100 * share
    return f"{value:.0f} %" if value >= 9.95 or value == 0 else f"{value:.1f} %"


def duration(seconds: float | None) -> str:
    """`250 ms`, `25.5 s`, `1 min 42 s`, `2 h 5 min`, `3 d 4 h`."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 1:
        return "0 s" if seconds <= 0 else f"{seconds * 1000:.0f} ms"
    if seconds < _MINUTE:
        return f"{seconds:.1f} s" if round(seconds, 1) < _MINUTE else "1 min"
    whole = round(seconds)
    for unit, name, lower, lower_name in (
        (_DAY, "d", _HOUR, "h"), (_HOUR, "h", _MINUTE, "min"), (_MINUTE, "min", 1, "s")
    ):  # fmt: skip
        if whole >= unit:
            rest = whole % unit // lower
            return f"{whole // unit} {name}" + (f" {rest} {lower_name}" if rest else "")
    return f"{whole} s"


def size(num_bytes: float) -> str:
    """`12.3 MB`; powers of ten, as in the configuration."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes:.0f} B"


def moment(seconds: float) -> str:
    """A time of the day in UTC, so that a page reads the same everywhere."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def counted(count: int, noun: str, plural: str = "") -> str:
    """`1 fault`, `2 faults`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def parameter(value: object) -> str:
    """A configuration's value: short floats, everything else as JSON would show it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return number(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
