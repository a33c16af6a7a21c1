"""A way to a loader actor; apart from it: a training worker loads nothing that it needs not."""

from dataclasses import replace
from typing import Any

import numpy as np

from eagleray.actors.data.batch import Batch, LoaderStats
from eagleray.actors.data.mixture import Mixture
from eagleray.actors.rpc import call


class LoaderClient:
    """A loader actor with ordinary methods. What it returns belongs to the caller.

    Args:
        handle: From `create_loader`.
        timeout_s: For each call, restarts of the actor included.
    """

    def __init__(self, handle: Any, timeout_s: float) -> None:
        self._handle, self._timeout_s = handle, timeout_s

    def batch(
        self, step: int, rank: int = 0, world_size: int = 1, mixture: Mixture | None = None
    ) -> Batch:
        """One rank's part of a step's batch; `mixture` as for `Loader.batch`.

        Raises:
            DeadlineExceededError: It did not come in time; names the step.
            ServiceError: The loader is gone for good, or the batch does not divide by `world_size`.
            NotFoundError: There is no such dataset.
            IntegrityError: A block of a shard is damaged; names shard and block.
        """
        what = f"the batch of step {step}"
        return self._call(self._handle.batch, what, step, rank, world_size, mixture)

    def eval_batch(self, index: int, rank: int = 0, world_size: int = 1) -> Batch:
        """One rank's part of a batch of held-out samples; raises as `batch` does."""
        return self._call(
            self._handle.eval_batch, f"evaluation batch {index}", index, rank, world_size
        )

    def stats(self) -> LoaderStats:
        """Figures since the actor's process started."""
        stats: LoaderStats = call(
            self._handle.stats, timeout_s=self._timeout_s, what="the loader's statistics"
        )
        return stats

    def _call(self, method: Any, what: str, *args: Any) -> Batch:
        batch: Batch = call(method, *args, timeout_s=self._timeout_s, what=what)
        # What came through the object store is read-only, which torch.from_numpy warns about.
        return replace(batch, ids=_owned(batch.ids), samples=_owned(batch.samples))


def _owned(array: Any) -> Any:
    return array if array.flags.writeable else np.array(array)
