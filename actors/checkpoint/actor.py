"""The checkpoint store as a Ray actor."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray

from eagleray.actors.checkpoint.snapshot_buffer import BufferName
from eagleray.actors.checkpoint.state import HandedOver, Snapshot
from eagleray.actors.checkpoint.store import CheckpointStore, StoreStatus
from eagleray.actors.nodes import beside_this_process
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

        self._node_id = ray.get_runtime_context().get_node_id()

    def begin(self, attempt: int, node_id: str) -> HandedOver | None:
        found = self._store.begin(attempt)
        if found is None:
            return None
        placed = self._store.placed(found.step) if node_id == self._node_id else None
        if placed is not None:
            there = {place.name for place in placed.places}
            arrays = {name: array for name, array in found.arrays.items() if name not in there}
            found = replace(found, arrays=arrays)
        return HandedOver(found, placed)

    def lend(self, attempt: int, num_bytes: int, node_id: str) -> BufferName | None:
        return self._store.lend(attempt, num_bytes) if node_id == self._node_id else None

    def go_apart(self, attempt: int, reason: str) -> None:
        self._store.go_apart(attempt, reason)

    def renew(self, attempt: int) -> int:
        return self._store.renew(attempt)

    def submit(self, snapshot: Snapshot) -> int:
        return self._store.submit(snapshot)

    def flush(self, step: int) -> StoreStatus:
        return self._store.flush(step)


def create_store(storage: Storage, run_id: str, config: CheckpointConfig) -> Any:
    """Start the store of a run; it ends with its creator.

    Returns:
        The actor's handle, to be given to `StoreClient`.
    """
    options: dict[str, Any] = {
        "name": f"checkpoint-store:{run_id}", "num_cpus": 0, "max_restarts": -1,
        "max_concurrency": _THREADS, "scheduling_strategy": beside_this_process(),
    }  # fmt: skip
    return ray.remote(_StoreActor).options(**options).remote(storage, run_id, config)
