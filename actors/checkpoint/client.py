"""A worker's way to the checkpoint store; apart from it: a worker loads nothing that it needs not.

PyTorch's checkpoint package takes more than a second to import, on the path of every recovery.
"""

from dataclasses import replace
from typing import Any

import ray

from eagleray.actors.checkpoint.snapshot_buffer import BufferName, SnapshotBuffer, placed_arrays
from eagleray.actors.checkpoint.state import Checkpoint, HandedOver, Snapshot
from eagleray.actors.rpc import call, result


class StoreClient:
    """A worker's way to the store; a SnapshotSink and a BufferLender. Not for several threads.

    Args:
        handle: From `create_store`.
        timeout_s: Longest wait for an answer.
    """

    def __init__(self, handle: Any, timeout_s: float) -> None:
        self._handle, self._timeout_s = handle, timeout_s
        self._node_id = ray.get_runtime_context().get_node_id()
        self._in_flight: Any = None
        self._attempt = self._step = self._written = 0
        self._is_apart = False  # snapshots do not go through shared memory
        self._buffers: dict[BufferName, SnapshotBuffer] = {}

    def begin(self, attempt: int) -> Checkpoint | None:
        """The state to go on from; None at the very start.

        On the store's node its arrays may be views of shared memory: read them before the second
        snapshot of this attempt.
        """
        self._attempt = attempt
        found = self._begin(self._node_id)
        try:
            checkpoint = _received(found)
        except (OSError, LookupError) as error:
            self._go_apart(str(error))
            checkpoint = _received(self._begin(""))
        self._step = checkpoint.step if checkpoint else 0
        return checkpoint

    def lend(self, num_bytes: int) -> SnapshotBuffer | None:
        """Shared memory to copy the next snapshot into; None: hand in its arrays themselves.

        Raises:
            DeadlineExceededError: Storage is so slow that no buffer became free.
            ServiceError: The store was restarted since `begin`, or is gone.
        """
        if self._is_apart:
            return None
        what = "shared memory for a snapshot"
        name: BufferName | None = self._call(
            self._handle.lend, self._attempt, num_bytes, self._node_id, what=what
        )
        if name is None:
            self._is_apart = True
            return None
        try:
            return self._attached(name)
        except (OSError, LookupError) as error:
            self._go_apart(str(error))
            return None

    def renew(self, attempt: int) -> int:
        """Go on with the state that the ranks hold; the newest complete snapshot's step, or 0."""
        self._in_flight, self._attempt = None, attempt
        step: int = self._call(self._handle.renew, attempt, what="the newest checkpoint")
        self._step = max(self._step, step)
        return step

    def submit(self, snapshot: Snapshot) -> int:
        """Hand in a part without waiting for storage; at most one is on its way.

        Returns:
            The newest step that was on storage when the part before was received.

        Raises:
            DeadlineExceededError: Storage is so slow that the one before is still waiting.
            ServiceError: The store was restarted since `begin`, or is gone.
        """
        self._settle()
        self._step = snapshot.step
        self._in_flight = self._handle.submit.remote(snapshot)
        return self._written

    def settle(self) -> None:
        """Return when the part that was handed in has been received; raises as `submit`."""
        self._settle()

    def flush(self) -> None:
        """Return when the newest state that was handed in, or given, is on storage.

        Raises:
            StorageError: It could not be written.
            ServiceError: The store was restarted and has lost it, or is gone.
        """
        self._settle()
        what = "the writing of checkpoints"
        self._call(self._handle.flush, self._step, what=what)

    def _begin(self, node_id: str) -> HandedOver | None:
        found: HandedOver | None = self._call(
            self._handle.begin, self._attempt, node_id, what="the newest checkpoint"
        )
        return found

    def _attached(self, name: BufferName) -> SnapshotBuffer:
        if name not in self._buffers:
            buffer = SnapshotBuffer.attach(name)
            # What has another size is out of use.
            kept = {n: b for n, b in self._buffers.items() if n.num_bytes == name.num_bytes}
            self._buffers = {**kept, name: buffer}
        return self._buffers[name]

    def _go_apart(self, reason: str) -> None:
        self._is_apart = True
        what = "the checkpoint store's receipt"
        self._call(self._handle.go_apart, self._attempt, reason, what=what)

    def _call(self, method: Any, *args: Any, what: str) -> Any:
        return call(method, *args, timeout_s=self._timeout_s, what=what)

    def _settle(self) -> None:
        if self._in_flight is not None:
            what = "the checkpoint store's receipt"
            self._written = result(self._in_flight, timeout_s=self._timeout_s, what=what)
            self._in_flight = None


def _received(found: HandedOver | None) -> Checkpoint | None:
    if found is None or found.placed is None:
        return found.checkpoint if found else None
    arrays = placed_arrays(found.placed, found.checkpoint.arrays)
    return replace(found.checkpoint, arrays=arrays)
