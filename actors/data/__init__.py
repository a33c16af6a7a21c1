"""Raw text to verified shards to batches in an order that is a pure function of seed and step."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from eagleray.actors.data.dataset import Damage, Dataset
from eagleray.actors.data.order import batch_ids, slice_for_rank

if TYPE_CHECKING:
    from eagleray.actors.data.build import build_dataset, last_digest
    from eagleray.actors.data.recipe import BuildProgress
    from eagleray.actors.data.stream import BatchStream

__all__ = [
    "BatchStream",
    "BuildProgress",
    "Damage",
    "Dataset",
    "batch_ids",
    "build_dataset",
    "last_digest",
    "slice_for_rank",
]

_LATER = {
    "BatchStream": "stream", "BuildProgress": "recipe", "build_dataset": "build",
    "last_digest": "build",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    # A training worker imports this package: it must not wait for parsers and tokenizers.
    if name in _LATER:
        return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
