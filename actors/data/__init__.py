"""Raw text to verified shards to batches in an order that is a pure function of seed and step."""

from eagleray.actors.data.build import BuildProgress, build_dataset, last_digest
from eagleray.actors.data.dataset import Damage, Dataset
from eagleray.actors.data.order import batch_ids, slice_for_rank
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
