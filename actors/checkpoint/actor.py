"""The checkpoint store as a Ray actor, and the client that workers hold."""

from collections.abc import Callable
from typing import Any

import ray

from eagleray.actors.checkpoint.manifest import Checkpoint
from eagleray.actors.checkpoint.snapshot import Snapshot
from eagleray.actors.checkpoint.store import CheckpointStore, StoreStatus
from eagleray.actors.rpc import call, result
from eagleray.platform.config import CheckpointConfig
from eagleray.platform.runs import RunStore
from eagleray.platform.storage import Storage

_THREADS = 16
"""Ranks whose parts may wait at once; further ones queue in Ray."""


class _StoreActor:
    """CheckpointStore in a process of its own."""

    def __init__(self, storage: Storage, run_id: str, config: CheckpointConfig) -> None:
        events: Callable[..., None] = RunStore(storage).add_event
        self._store = CheckpointStore(
            storage, run_id, config, lambda event, **details: events(run_id, event, **details)
        )

    def begin(self, attempt: int) -> Checkpoint | None:
        return self._store.begin(attempt)

    def submit(self, snapshot: Snapshot) -> None:
        self._store.submit(snapshot)

    def flush(self) -> StoreStatus:
        return self._store.flush()


def create_store(storage: Storage, run_id: str, config: CheckpointConfig) -> Any:
    """Start the store of a run; it ends with its creator.

    Returns:
        The actor's handle, to be given to `StoreClient`.
    """
    options: dict[str, Any] = {
        "name": f"checkpoint-store:{run_id}", "num_cpus": 0, "max_restarts": -1,
        "max_concurrency": _THREADS,
    }  # fmt: skip
    return ray.remote(_StoreActor).options(**options).remote(storage, run_id, config)


class StoreClient:
    """A worker's way to the store; a SnapshotSink. Not for several threads at once.

    Args:
        handle: From `create_store`.
        timeout_s: Longest wait for an answer.
    """

    def __init__(self, handle: Any, timeout_s: float) -> None:
        self._handle, self._timeout_s = handle, timeout_s
        self._in_flight: Any = None

    def begin(self, attempt: int) -> Checkpoint | None:
        """The state to go on from; None at the very start."""
        found: Checkpoint | None = call(
            self._handle.begin, attempt, timeout_s=self._timeout_s, what="the newest checkpoint"
        )
        return found

    def submit(self, snapshot: Snapshot) -> None:
        """Hand in a part without waiting for storage; at most one is on its way.

        Raises:
            DeadlineExceededError: Storage is so slow that the one before is still waiting.
        """
        self._settle()
        self._in_flight = self._handle.submit.remote(snapshot)

    def flush(self) -> None:
        """Return when everything handed in is on storage."""
        self._settle()
        call(self._handle.flush, timeout_s=self._timeout_s, what="the writing of checkpoints")

    def _settle(self) -> None:
        if self._in_flight is not None:
            what = "the checkpoint store's receipt"
            result(self._in_flight, timeout_s=self._timeout_s, what=what)
            self._in_flight = None
