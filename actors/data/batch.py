"""What a loader gives: batches and figures.

    B = batch_size, T = seq_len

Apart from the loader: whoever only receives them loads neither cache nor Redis.
"""

from dataclasses import dataclass

from eagleray.actors.data.dataset import IntArray, SampleArray
from eagleray.actors.data.order import slice_bounds


@dataclass(frozen=True)
class Batch:
    """A global batch, or the part of one rank: ids int64 [B], tokens int32 [B, T+1]."""

    step: int
    ids: IntArray
    tokens: SampleArray

    def slice_for_rank(self, rank: int, world_size: int) -> "Batch":
        """The contiguous part of one rank.

        Raises:
            ValueError: The batch does not divide evenly, or there is no such rank.
        """
        start, stop = slice_bounds(len(self.ids), rank, world_size)
        return Batch(self.step, self.ids[start:stop], self.tokens[start:stop])


@dataclass(frozen=True)
class LoaderStats:
    """Figures since the start.

    `ready` of the `batches` asked for had been read ahead; callers waited `wait_s` for the rest.
    Reading took `read_s` in all. Cache figures count blocks.
    """

    batches: int = 0
    ready: int = 0
    wait_s: float = 0.0
    read_s: float = 0.0
    cache_hits: int = 0
    cache_misses: int = 0
