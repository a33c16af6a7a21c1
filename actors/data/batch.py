"""What a loader gives: batches and figures.

    B = batch_size, T = seq_len, F = features

Apart from the loader: whoever only receives them loads neither cache nor Redis.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import numpy as np
import numpy.typing as npt

from eagleray.actors.data.dataset import IntArray, SampleArray
from eagleray.actors.data.features import FloatArray, RowLayout
from eagleray.actors.data.order import slice_bounds
from eagleray.platform.errors import DataError


@dataclass(frozen=True)
class Batch:
    """A global batch, or the part of one rank: ids int64 [B], and a sample for each.

    Samples of text are `tokens`. Those of a dataset of features are rows, which `layout` parts into
    `features` and `labels`.
    """

    step: int
    ids: IntArray
    samples: SampleArray
    layout: RowLayout | None = None

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Token ids, int32 [B, T+1].

        Raises:
            DataError: It is a batch of features.
        """
        if self.layout is not None:
            raise DataError(
                "a batch of this dataset holds rows of numbers, not tokens",
                "read its `features` and `labels`",
            )
        return cast(npt.NDArray[np.int32], self.samples)

    @cached_property
    def features(self) -> FloatArray:
        """Features of each row, float32 [B, F], contiguous.

        Raises:
            DataError: It is a batch of text.
        """
        rows = cast(FloatArray, self.samples)
        return np.ascontiguousarray(rows[:, : self._of_rows().num_features])

    @cached_property
    def labels(self) -> npt.NDArray[np.int64 | np.float32]:
        """Label of each row, [B]: int64 if it is a class, else float32.

        Raises:
            DataError: It is a batch of text, or the dataset has no label.
        """
        label = self._of_rows().label
        if label is None:
            raise DataError(
                "the rows of this dataset have no label", "set data.features.label, and build it"
            )
        return self.samples[:, -1].astype(np.int64 if label == "class" else np.float32)

    def slice_for_rank(self, rank: int, world_size: int) -> "Batch":
        """The contiguous part of one rank.

        Raises:
            ValueError: The batch does not divide evenly, or there is no such rank.
        """
        start, stop = slice_bounds(len(self.ids), rank, world_size)
        return replace(self, ids=self.ids[start:stop], samples=self.samples[start:stop])

    def _of_rows(self) -> RowLayout:
        if self.layout is None:
            raise DataError(
                "a batch of this dataset holds tokens, not rows of numbers", "read its `tokens`"
            )
        return self.layout


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
