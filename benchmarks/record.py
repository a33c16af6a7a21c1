"""What every benchmark prints and writes: medians beside those of peers, with where they came from.

A benchmark exits with 0 when it ran, whatever it found, but for the figures that must hold.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from eagleray.platform.errors import EagleRayError

console = Console(highlight=False)


@dataclass(frozen=True)
class Figure:
    """One measurement beside a peer's of the same run; `ratio` is ours to theirs.

    `goal` says in words what was aimed at, `holds` whether that was reached; None: no goal. If one
    that `must_hold` does not, the command fails.
    """

    name: str
    ours: float
    unit: str
    peer: str = ""
    theirs: float | None = None
    goal: str = ""
    holds: bool | None = None
    must_hold: bool = False

    @property
    def ratio(self) -> float | None:
        """Ours divided by theirs."""
        return self.ours / self.theirs if self.theirs else None


def middle(values: Sequence[float]) -> tuple[float, float]:
    """The median, and half the range between the quartiles."""
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 4], ordered[-(len(ordered) // 4) - 1]
    return median(ordered), (high - low) / 2


def run(
    description: str,
    measure: Callable[[argparse.Namespace], list[Figure]],
    add_options: Callable[[argparse.ArgumentParser], None] = lambda _: None,
) -> None:
    """Parse the command line, measure, print a table, write JSON; fail if a figure must hold."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="less input, fewer repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    add_options(parser)
    arguments = parser.parse_args()
    # Else what it has started would outlive it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        figures = measure(arguments)
    except EagleRayError as error:
        raise SystemExit(f"error: {error}") from error
    place = _place()
    made = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("figure", "ours", "", "peer", "theirs", "ratio", "goal", ""):
        is_number = column in ("ours", "theirs", "ratio")
        made.add_column(column, justify="right" if is_number else "left")
    for figure in figures:
        holds = "" if figure.holds is None else ("holds" if figure.holds else "missed")
        made.add_row(
            figure.name, _number(figure.ours), figure.unit, figure.peer, _number(figure.theirs),
            _number(figure.ratio), figure.goal, holds,
        )  # fmt: skip
    console.print(made)
    console.print(", ".join(f"{name} {value}" for name, value in place.items()), style="dim")
    if arguments.json:
        entries = [{**asdict(figure), "ratio": figure.ratio} for figure in figures]
        arguments.json.write_text(json.dumps({**place, "figures": entries}, indent=2) + "\n")
    missed = [figure for figure in figures if figure.must_hold and figure.holds is False]
    if missed:
        raise SystemExit(
            "\n".join(f"{f.name} is {_number(f.ours)} {f.unit}, must be {f.goal}" for f in missed)
        )


def _place() -> dict[str, Any]:
    """Machine, versions, commit, date."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parent,
    )  # fmt: skip
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "machine": f"{os.cpu_count()} x {names[0] if names else platform.machine()}",
        "load": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("numpy", "torch", "ray")},
        "commit": found.stdout.strip() or "unknown",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
