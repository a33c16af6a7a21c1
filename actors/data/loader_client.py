"""A way to a loader actor; apart from it: a training worker loads nothing that it needs not."""

from dataclasses import replace
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from eagleray.actors.data.batch import Batch, LoaderStats
from eagleray.actors.data.mixture import Mixture
from eagleray.actors.rpc import ask, call, result
from eagleray.platform.errors import DeadlineExceededError

_STATUS_S = 2.0


class LoaderClient:
    """A loader actor with ordinary methods. Arrays that it gives may be read-only views.

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
            DeadlineExceededError: It did not come in time; names the step, the loader, and what it
                is reading.
            ServiceError: The loader is gone for good, or the batch does not divide by `world_size`.
            NotFoundError: There is no such dataset.
            IntegrityError: A block of a shard is damaged; names shard and block.
        """
        return self.take(step, self.ask(step, rank, world_size, mixture))

    def ask(
        self, step: int, rank: int = 0, world_size: int = 1, mixture: Mixture | None = None
    ) -> Any:
        """Ask for a batch and go on; `take` waits for it.

        Raises:
            ServiceError: The loader is gone for good.
        """
        return ask(self._handle.batch, step, rank, world_size, mixture, what=_name(step))

    def take(self, step: int, asked: Any) -> Batch:
        """What was asked for; raises as `batch` does."""
        return self._result(asked, _name(step))

    def eval_batch(self, index: int, rank: int = 0, world_size: int = 1) -> Batch:
        """One rank's part of a batch of held-out samples; raises as `batch` does."""
        what = f"evaluation batch {index}"
        asked = ask(self._handle.eval_batch, index, rank, world_size, what=what)
        return self._result(asked, what)

    def stats(self) -> LoaderStats:
        """Figures since the actor's process started."""
        stats: LoaderStats = call(
            self._handle.stats, timeout_s=self._timeout_s, what="the loader's statistics"
        )
        return stats

    def _result(self, asked: Any, what: str) -> Batch:
        try:
            batch: Batch = result(asked, timeout_s=self._timeout_s, what=what)
        except DeadlineExceededError as error:
            raise DeadlineExceededError(f"{error.what}: {self._reason()}", error.fix) from error
        # The samples stay where they are; ids are kept for longer, and would keep them there.
        return replace(batch, ids=np.array(batch.ids))

    def _reason(self) -> str:
        """Why a loader does not answer, as far as it can tell."""
        name = f"loader {self._handle._actor_id.hex()[:12]}"
        try:
            found = ray.get(self._handle.doing.remote(), timeout=_STATUS_S)
        except GetTimeoutError:
            return f"{name} does not answer at all"
        except RayError as error:
            return f"{name} is gone ({type(error).__name__})"
        if found is None:
            return f"{name} reads nothing at the moment"
        return f"{name} has been reading {found[0]} for {found[1]:.1f} s"


def _name(step: int) -> str:
    return f"the batch of step {step}"
