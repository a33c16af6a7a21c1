"""A worker's way to the checkpoint store; apart from it: a worker loads nothing that it needs not.

PyTorch's checkpoint package takes more than a second to import, on the path of every recovery.
"""

from typing import Any

from eagleray.actors.checkpoint.state import Checkpoint, Snapshot
from eagleray.actors.rpc import call, result


class StoreClient:
    """A worker's way to the store; a SnapshotSink. Not for several threads at once.

    Args:
        handle: From `create_store`.
        timeout_s: Longest wait for an answer.
    """

    def __init__(self, handle: Any, timeout_s: float) -> None:
        self._handle, self._timeout_s = handle, timeout_s
        self._in_flight: Any = None
        self._step = self._written = 0

    def begin(self, attempt: int) -> Checkpoint | None:
        """The state to go on from; None at the very start."""
        found: Checkpoint | None = call(
            self._handle.begin, attempt, timeout_s=self._timeout_s, what="the newest checkpoint"
        )
        self._step = found.step if found else 0
        return found

    def renew(self, attempt: int) -> int:
        """Go on with the state that the ranks hold; the newest complete snapshot's step, or 0."""
        self._in_flight = None
        step: int = call(
            self._handle.renew, attempt, timeout_s=self._timeout_s, what="the newest checkpoint"
        )
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

    def flush(self) -> None:
        """Return when the newest state that was handed in, or given, is on storage.

        Raises:
            StorageError: It could not be written.
            ServiceError: The store was restarted and has lost it, or is gone.
        """
        self._settle()
        what = "the writing of checkpoints"
        call(self._handle.flush, self._step, timeout_s=self._timeout_s, what=what)

    def _settle(self) -> None:
        if self._in_flight is not None:
            what = "the checkpoint store's receipt"
            self._written = result(self._in_flight, timeout_s=self._timeout_s, what=what)
            self._in_flight = None
