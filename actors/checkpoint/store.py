"""The checkpoint store: takes snapshots from workers, keeps and writes them, gives them back.

Life: created by the run's driver under a name of the run, restarted by Ray if its process dies.
What is lost then: snapshots that were accepted but not yet on storage; a restarted run goes on from
the newest intact checkpoint there. The store outlives the workers, so after a worker's death the
newest complete snapshot comes from memory, without touching storage.

Laws:
    * A snapshot is complete when all ranks of one attempt have handed in their part; only complete
      ones are written, in order, each committed by its manifest.
    * Parts of an attempt that is over are dropped and counted.
    * At most `_MAX_PENDING` complete snapshots wait for storage; then `submit` waits.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eagleray.actors.checkpoint.manifest import CheckpointFolder, newest_intact
from eagleray.actors.checkpoint.samples import SampleLog, Segment
from eagleray.actors.checkpoint.snapshot import Checkpoint, Snapshot
from eagleray.platform.config import CheckpointConfig
from eagleray.platform.errors import DeadlineExceededError, StorageError
from eagleray.platform.storage import Storage

logger = logging.getLogger(__name__)

_MAX_PENDING = 2
BEST_BY = "eval_loss"


@dataclass(frozen=True)
class StoreStatus:
    """Counts since the store's process started."""

    written: int = 0
    dropped: int = 0
    failed: int = 0
    pending: int = 0
    newest_step: int = 0
    last_error: str = ""


@dataclass
class _Generation:
    """Parts of one step from the ranks of one attempt."""

    attempt: int
    parts: dict[int, Snapshot] = field(default_factory=dict)

    def is_complete(self) -> bool:
        return len(self.parts) == next(iter(self.parts.values())).world_size


class CheckpointStore:
    """The store of one run, without Ray. Methods may be called from several threads.

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
        self._folder = CheckpointFolder(storage, run_id)
        self._samples = SampleLog(storage, run_id)
        self._config, self._on_event = config, on_event
        self._changed = threading.Condition()
        self._attempt = 0
        self._generations: dict[int, _Generation] = {}
        self._queue: list[Checkpoint] = []
        self._writing = False
        self._newest: Checkpoint | None = None
        self._head = ""
        self._unlogged: list[tuple[int, np.ndarray]] = []
        self._status = StoreStatus()
        threading.Thread(target=self._write_all, name="checkpoint-writer", daemon=True).start()

    def begin(self, attempt: int) -> Checkpoint | None:
        """Start an attempt: the newest complete state to go on from; None at the very start.

        Parts of earlier attempts that come later are dropped.
        """
        with self._changed:
            self._attempt = max(self._attempt, attempt)
            self._generations.clear()
            self._unlogged.clear()
            damaged: list[StorageError] = []
            if self._newest is None:
                self._newest, damaged = newest_intact(self._folder)
                self._head = self._newest.samples if self._newest else ""
            found = self._newest
        for error in damaged:
            logger.warning("checkpoint skipped: %s", error)
            self._on_event("checkpoint_damaged", message=str(error.args[0]))
        return found

    def submit(self, snapshot: Snapshot) -> None:
        """Take one rank's part; returns before it is on storage.

        Raises:
            DeadlineExceededError: Storage is so slow that the queue stayed full.
        """
        with self._changed:
            if snapshot.attempt != self._attempt:
                self._count(dropped=1)
                return
            self._wait_for(lambda: len(self._queue) < _MAX_PENDING, "take a snapshot")
            generation = self._generations.setdefault(snapshot.step, _Generation(snapshot.attempt))
            generation.parts[snapshot.rank] = snapshot
            if not generation.is_complete():
                return
            del self._generations[snapshot.step]
            self._accept(generation)

    def flush(self) -> StoreStatus:
        """Wait until all complete snapshots are on storage.

        Raises:
            DeadlineExceededError: They were not in time.
            StorageError: The newest one could not be written.
        """
        with self._changed:
            self._wait_for(lambda: not self._queue and not self._writing, "write what it holds")
            if self._status.last_error:
                raise StorageError(self._status.last_error, "free some room, then resume the run")
            return self._status

    def status(self) -> StoreStatus:
        """Counts so far."""
        with self._changed:
            return self._status

    def _accept(self, generation: _Generation) -> None:
        ordered = [generation.parts[rank] for rank in sorted(generation.parts)]
        arrays: dict[str, np.ndarray] = {}
        for part in ordered:
            arrays.update(part.arrays)
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
            self._fail(first.step, error)
            return
        self._unlogged.clear()
        meta: dict[str, Any] = {
            **first.meta, "attempt": first.attempt, "world_size": first.world_size
        }  # fmt: skip
        self._newest = Checkpoint(first.step, arrays, self._head, meta)
        self._queue.append(self._newest)
        self._count(pending=1)
        self._changed.notify_all()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue))
                checkpoint = self._queue.pop(0)
                self._writing = True
            try:
                digest = self._folder.write(checkpoint)
                self._prune()
            except StorageError as error:
                with self._changed:
                    self._fail(checkpoint.step, error)
            except Exception as error:  # noqa: BLE001 - a dead writer thread would hang the run
                with self._changed:
                    self._fail(checkpoint.step, StorageError(f"checkpoint write failed: {error!r}"))
            else:
                with self._changed:
                    self._count(written=1, newest_step=checkpoint.step, last_error="")
                self._on_event("checkpoint", step=checkpoint.step, digest=digest)
            with self._changed:
                self._writing = False
                self._count(pending=-1)
                self._changed.notify_all()

    def _prune(self) -> None:
        steps = self._folder.steps()
        keep = set(steps[-self._config.keep :])
        scored = [(self._folder.manifest(step)["meta"].get(BEST_BY), step) for step in steps]
        best = min(((loss, step) for loss, step in scored if loss is not None), default=None)
        if best is not None:
            keep.add(best[1])
        for step in set(steps) - keep:
            self._folder.remove(step)

    def _fail(self, step: int, error: StorageError) -> None:
        logger.error("checkpoint step=%d not written: %s", step, error)
        self._count(failed=1, last_error=error.what)
        self._on_event("checkpoint_failed", step=step, message=error.what)

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        if not self._changed.wait_for(condition, timeout=self._config.write_timeout_s):
            raise DeadlineExceededError(
                f"storage was too slow for the checkpoint store to {what} within "
                f"{self._config.write_timeout_s:g} s",
                "use faster storage, or raise train.checkpoint.write_timeout_s or every_steps",
            )

    def _count(self, **changes: Any) -> None:
        values = dict(vars(self._status))
        for name, change in changes.items():
            values[name] = values[name] + change if name in _COUNTERS else change
        self._status = StoreStatus(**values)


_COUNTERS = ("written", "dropped", "failed", "pending")
