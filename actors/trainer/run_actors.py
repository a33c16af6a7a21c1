"""Handles of the actors of one run; they outlive its workers. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunActors:
    """Handles of the actors of one run."""

    recorder: Any
    store: Any
    loaders: Mapping[str, Sequence[Any]]
    """Node id -> the loaders there."""
    evictor: Any = None
    run_id: str = ""
    reading: Any = None
    """A LoaderSpec: where there are no loaders, each worker reads for itself."""
