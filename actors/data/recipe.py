"""What of a build depends on the kind of its samples, and what such a part is given."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from eagleray.actors.data.records import SourceFile
from eagleray.actors.data.sources import Tally
from eagleray.actors.data.units import Encoder, Unit, UnitResult
from eagleray.platform.config import DataConfig
from eagleray.platform.errors import DataError

Phase = Literal["hash", "wait", "count", "tokenizer", "cluster", "encode", "found"]


@dataclass(frozen=True)
class BuildProgress:
    """How far a phase is: `fraction` of its bytes, with what has been read and written in it.

    Of a dataset of features `documents` are records, and `tokens` the values of their rows.
    """

    phase: Phase
    fraction: float
    documents: int = 0
    bytes: int = 0
    tokens: int = 0


OnProgress = Callable[[BuildProgress], None]


@dataclass(frozen=True)
class Task:
    """What is to be built: `files` in reading order, of `total_bytes` in all."""

    data: DataConfig
    resolve: Callable[[str], Path]
    files: list[SourceFile]
    total_bytes: int
    report: OnProgress

    def share(self, num_bytes: int) -> float:
        """Which part of the raw data some bytes are."""
        return min(1.0, num_bytes / max(1, self.total_bytes))


class Recipe(Protocol):
    """Turns records into samples of one kind; the same input gives the same bytes."""

    format: int
    """Of the manifest."""

    def identity(self) -> dict[str, Any]:
        """What the dataset follows from, beside its sources and its format."""
        ...

    def encoder(self, folder: Path, digests: Sequence[str]) -> Encoder:
        """What encodes units in this folder, after what they need was learnt from the files.

        Raises:
            DataError: The files give nothing to learn from, or are not those of the digests.
        """
        ...

    def write(
        self, folder: Path, encoder: Encoder, units: Sequence[Unit], results: Sequence[UnitResult]
    ) -> dict[str, Any]:
        """Fill the dataset's folder; returns its part of the manifest, `splits` in it."""
        ...

    def check(self, tallies: Sequence[Tally], splits: dict[str, Any]) -> None:
        """Refuse what has too few samples.

        Raises:
            DataError: A split, or a domain's training split, has none.
        """
        ...


def check_documents(task: Task, tallies: Sequence[Tally], what: str, fix: str) -> None:
    """Refuse files without a single record that can be used.

    Raises:
        DataError: There is none; says what became of those that there are.
    """
    if not any(tally.documents for tally in tallies):
        paths = ", ".join(source.path for source in task.data.sources)
        raise DataError(
            f"data.sources: no {what} in {len(task.files)} files of {paths}: "
            f"{sum(t.empty for t in tallies)} empty, "
            f"{sum(t.filtered for t in tallies)} filtered out, "
            f"{sum(t.skipped for t in tallies)} skipped as bad",
            fix,
        )
