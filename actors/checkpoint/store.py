"""The checkpoint store: takes snapshots from workers, keeps and writes them, gives them back.

Life: created by the run's driver under a name of the run, restarted by Ray if its process dies.
What is lost then: snapshots that were accepted but not yet on storage; a restarted run goes on from
the newest intact checkpoint there. The store outlives the workers, so after a worker's death the
newest complete snapshot comes from memory, without touching storage.

Laws:
    * A snapshot is complete when all ranks of one attempt have handed in their part; only complete
      ones are written, in order, each committed by its manifest.
    * Parts of an attempt that is over are dropped and counted; those of an attempt that this
      process did not begin are refused: what led up to them died with the process before it.
    * At most `_MAX_PENDING` complete snapshots wait for storage; then `submit` waits.
    * A worker of the same node copies into shared memory that the store lends and writes from, and
      goes on from there after a death. With two buffers the newest complete state stays while the
      next one is copied; a third (`double_buffer`) takes another one while storage is slow.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from eagleray.actors.checkpoint.buffer_pool import BufferPool
from eagleray.actors.checkpoint.manifest import CheckpointFolder, newest_intact
from eagleray.actors.checkpoint.retention import Retention, prune
from eagleray.actors.checkpoint.samples import SampleLog, Segment
from eagleray.actors.checkpoint.shard_file import give_way
from eagleray.actors.checkpoint.snapshot_buffer import BufferName, NoRoomError, Placed
from eagleray.actors.checkpoint.state import Checkpoint, Snapshot
from eagleray.platform.config import CheckpointConfig
from eagleray.platform.errors import DeadlineExceededError, ServiceError, StorageError
from eagleray.platform.storage import Storage

logger = logging.getLogger(__name__)

_MAX_PENDING = 2
_COUNTERS = ("written", "dropped", "failed", "pending")


@dataclass(frozen=True)
class StoreStatus:
    """Counts since the store's process started."""

    written: int = 0
    dropped: int = 0
    failed: int = 0
    pending: int = 0
    newest_step: int = 0
    last_error: str = ""
    shared_bytes: int = 0
    """Memory that the store shares with workers of its node."""


@dataclass
class _Generation:
    """Parts of one step from the ranks of one attempt."""

    attempt: int
    parts: dict[int, Snapshot] = field(default_factory=dict)

    def is_complete(self) -> bool:
        return len(self.parts) == next(iter(self.parts.values())).world_size


class CheckpointStore:
    """The store of one run, without Ray. Methods may be called from several threads.

    It alone writes to the run's checkpoints. Close it: its thread and the newest state stay else.

    Args:
        storage: Where checkpoints are written.
        run_id: The run they belong to.
        config: Retention and the deadline of a write.
        on_event: Told of each commit, failure and damaged checkpoint.
    """

    def __init__(
        self,
        storage: Storage,
        run_id: str,
        config: CheckpointConfig,
        on_event: Callable[..., None] = lambda event, **details: None,
    ) -> None:
        self._folder = CheckpointFolder(storage, run_id, config.max_bytes_per_s)
        self._retention = Retention(config.keep, config.keep_every_steps)
        self._samples = SampleLog(storage, run_id)
        self._config, self._on_event = config, on_event
        self._changed = threading.Condition()
        self._attempt = 0
        self._generations: dict[int, _Generation] = {}
        self._buffers = BufferPool(3 if config.double_buffer else 2)
        self._is_apart = False  # a worker's snapshots do not come through shared memory
        self._queue: list[Checkpoint] = []
        self._writing: Checkpoint | None = None
        self._closed = False
        self._settled_step = 0  # the newest one that was written, or could not be
        self._newest: Checkpoint | None = None
        self._head = ""
        self._unlogged: list[tuple[int, np.ndarray]] = []
        self._status = StoreStatus()
        self._outage: dict[str, Any] | None = None  # the first failure since the last success
        self._is_outage_told = False
        self._writer = threading.Thread(
            target=self._write_all, name="checkpoint-writer", daemon=True
        )
        self._writer.start()

    def begin(self, attempt: int) -> Checkpoint | None:
        """Start an attempt: the newest complete state to go on from; None at the very start.

        Parts of earlier attempts that come later are dropped.
        """
        with self._changed:
            self._start(attempt)
            self._unlogged.clear()
            damaged: list[StorageError] = []
            if self._newest is None:
                self._folder.remove_unfinished()
                self._newest, damaged = newest_intact(self._folder)
                self._head = self._newest.samples if self._newest else ""
            self._settled_step = self._newest.step if self._newest else 0
            found = self._newest
        for error in damaged:
            logger.warning("checkpoint skipped: %s", error)
            self._tell("checkpoint_damaged", message=error.what)
        return found

    def renew(self, attempt: int) -> int:
        """Start an attempt whose ranks hold a newer state than any snapshot: they lost a peer.

        Returns:
            The step of the newest complete snapshot, 0 if there is none: what its ranks hand in
            next is to lead on from there.
        """
        with self._changed:
            if self._newest is not None:
                self._start(attempt)
                return self._newest.step
        found = self.begin(attempt)
        return found.step if found else 0

    def lend(self, attempt: int, num_bytes: int) -> BufferName | None:
        """Shared memory for a worker of this node to copy a snapshot into, then to be submitted.

        Returns:
            None: there is none; the arrays are to be handed in themselves.

        Raises:
            DeadlineExceededError: Storage is so slow that no buffer became free.
            ServiceError: This process never began the attempt: it is a restarted one.
        """
        lent: list[BufferName | None] = []

        def is_lent() -> bool:
            if attempt == self._attempt:
                name = self._buffers.lend(num_bytes)
                lent.extend([name] if name else [])
            return bool(lent) or attempt != self._attempt

        with self._changed:
            if attempt > self._attempt:
                raise _restarted("the place of the snapshot before")
            try:
                self._wait_for(is_lent, "lend memory for a snapshot")
            except NoRoomError as error:
                self._go_apart(error.what)
            return lent[0] if lent else None

    def go_apart(self, attempt: int, reason: str) -> None:
        """Hear that a worker of this attempt cannot use what it was lent."""
        with self._changed:
            if attempt == self._attempt:
                self._buffers.drop_lent()
            self._go_apart(reason)

    def placed(self, step: int) -> Placed | None:
        """Where in shared memory the state of a step lies; None: nowhere."""
        with self._changed:
            return self._buffers.placed(step)

    def submit(self, snapshot: Snapshot) -> int:
        """Take one rank's part; returns before it is on storage. One that is kept is dropped.

        Returns:
            The newest step on storage, 0 if this process has written none.

        Raises:
            DeadlineExceededError: Storage is so slow that the queue stayed full.
            ServiceError: This process never began the attempt: it is a restarted one.
        """
        with self._changed:
            if snapshot.attempt > self._attempt:
                raise _restarted(f"the snapshot of step {snapshot.step}")
            self._wait_for(
                lambda: len(self._queue) < _MAX_PENDING or snapshot.attempt != self._attempt,
                "take a snapshot",
            )
            is_kept = self._newest is not None and snapshot.step <= self._newest.step
            if snapshot.attempt != self._attempt or is_kept:
                self._count(dropped=1)
                return self._status.newest_step
            generation = self._generations.setdefault(snapshot.step, _Generation(snapshot.attempt))
            generation.parts[snapshot.rank] = snapshot
            if generation.is_complete():
                del self._generations[snapshot.step]
                self._accept(generation)
            return self._status.newest_step

    def flush(self, step: int = 0) -> StoreStatus:
        """Wait until all complete snapshots are on storage, that of `step` among them.

        Raises:
            DeadlineExceededError: They were not in time.
            ServiceError: This process never began an attempt: what it held before is lost.
            StorageError: The newest one could not be written.
        """
        with self._changed:
            if step and not self._attempt:
                raise _restarted(f"the checkpoint of step {step}")
            self._wait_for(
                lambda: not self._queue and self._writing is None and self._settled_step >= step,
                "write what it holds",
            )
            if self._status.last_error:
                raise StorageError(self._status.last_error, "free some room, then resume the run")
            return self._counts()

    def status(self) -> StoreStatus:
        """Counts so far."""
        with self._changed:
            return self._counts()

    def close(self) -> None:
        """Write what is complete, then end the writer, within the deadline of a write."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._writer.join(self._config.write_timeout_s)
        with self._changed:
            self._buffers.close()

    def _start(self, attempt: int) -> None:
        self._attempt = max(self._attempt, attempt)
        self._generations.clear()
        self._buffers.drop_lent()
        # Parts that wait for room see that their attempt is over.
        self._changed.notify_all()

    def _accept(self, generation: _Generation) -> None:
        ordered = [generation.parts[rank] for rank in sorted(generation.parts)]
        arrays: dict[str, np.ndarray] = {}
        for part in ordered:
            arrays.update(part.arrays)
            if part.placed is not None:
                arrays.update(self._buffers.take(part.placed, part.attempt, part.step))
        samples_SG = np.concatenate([part.samples_SB for part in ordered], axis=1)
        first = ordered[0]
        # A segment that storage refused is not lost: it becomes part of the next one.
        self._unlogged.append((first.first_step, samples_SG))
        segment = Segment(
            self._unlogged[0][0], np.concatenate([ids for _, ids in self._unlogged]), self._head
        )
        try:
            self._head = self._samples.append(segment)
        except StorageError as error:
            self._free_buffers()
            self._fail(first.step, error)
            return
        self._unlogged.clear()
        meta: dict[str, Any] = {
            **first.meta, "attempt": first.attempt, "world_size": first.world_size
        }  # fmt: skip
        self._newest = Checkpoint(first.step, arrays, self._head, meta)
        self._queue.append(self._newest)
        self._free_buffers()
        self._count(pending=1)
        self._changed.notify_all()

    def _free_buffers(self) -> None:
        """Keep what is the newest state, or not yet on storage."""
        needed = (self._newest, self._writing, *self._queue)
        self._buffers.hold_only({checkpoint.step for checkpoint in needed if checkpoint})

    def _go_apart(self, reason: str) -> None:
        if self._is_apart:
            return
        self._is_apart = True
        logger.warning("snapshots are copied through calls: %s", reason)
        self._tell("snapshots_not_shared", message=reason)

    def _write_all(self) -> None:
        give_way()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._closed)
                if not self._queue:
                    return
                checkpoint = self._writing = self._queue.pop(0)
                # There is room for one more.
                self._changed.notify_all()
            try:
                digest = self._folder.write(checkpoint)
            except StorageError as error:
                with self._changed:
                    self._fail(checkpoint.step, error)
            except Exception as error:  # noqa: BLE001 - a dead writer thread would hang the run
                with self._changed:
                    self._fail(checkpoint.step, StorageError(f"checkpoint write failed: {error!r}"))
            else:
                with self._changed:
                    self._count(written=1, newest_step=checkpoint.step, last_error="")
                    self._tell_outage()
                    self._outage = None
                self._tell("checkpoint", step=checkpoint.step, digest=digest)
                self._prune(checkpoint.step)
            with self._changed:
                self._writing = None
                self._free_buffers()
                self._settled_step = max(self._settled_step, checkpoint.step)
                self._count(pending=-1)
                self._changed.notify_all()

    def _prune(self, written: int) -> None:
        try:
            prune(self._folder, self._retention, written)
        except (StorageError, OSError) as error:
            # The checkpoint itself is safe; the next one prunes again.
            logger.warning("checkpoints not pruned after step=%d: %s", written, error)

    def _fail(self, step: int, error: StorageError) -> None:
        logger.error("checkpoint step=%d not written: %s", step, error)
        self._count(failed=1, last_error=error.what)
        self._settled_step = max(self._settled_step, step)
        self._changed.notify_all()
        if self._outage is None:
            self._outage, self._is_outage_told = {"step": step, "message": error.what}, False
        self._tell_outage()

    def _tell_outage(self) -> None:
        """Say once that storage refuses checkpoints: if it refuses this too, when it takes it."""
        if self._outage is not None and not self._is_outage_told:
            self._is_outage_told = self._tell("checkpoint_failed", **self._outage)

    def _tell(self, event: str, **details: Any) -> bool:
        try:
            self._on_event(event, **details)
        except (StorageError, OSError) as error:
            # Events are written to the same storage that may just have refused a checkpoint.
            logger.warning("event not recorded event=%s: %s", event, error)
            return False
        return True

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        if not self._changed.wait_for(condition, timeout=self._config.write_timeout_s):
            raise DeadlineExceededError(
                f"storage was too slow for the checkpoint store to {what} within "
                f"{self._config.write_timeout_s:g} s",
                "use faster storage, or raise train.checkpoint.write_timeout_s, every_steps or "
                "max_bytes_per_s",
            )

    def _counts(self) -> StoreStatus:
        return replace(self._status, shared_bytes=self._buffers.num_bytes)

    def _count(self, **changes: Any) -> None:
        values = dict(vars(self._status))
        for name, change in changes.items():
            values[name] = values[name] + change if name in _COUNTERS else change
        self._status = StoreStatus(**values)


def _restarted(lost: str) -> ServiceError:
    return ServiceError(
        f"the checkpoint store was restarted, and {lost} went with it",
        "the next attempt goes on from the newest checkpoint on storage",
    )
