"""One cache over several levels: L1 segments in memory, L2 Redis, L3 segments on a disk.

    look-up   down the levels until all is found; what a level gives goes to those above it
    store     to every level: at once, or by a thread where writing is slow (L3)

So L3 is written through, and not on eviction from L1: a writer that evicts would wait for the disk,
and what a kill takes from L1 would never have come there. The price is that L3 also gets values
that L1 never lets go of. The thread's queue is bounded: what finds no place in it is not written.

A level that is gone, full or wrong gives misses, as its store promises, and costs speed alone.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eagleray.actors.cache.value_store import ValueStore
from eagleray.platform.errors import StorageError

logger = logging.getLogger(__name__)

Item = tuple[bytes, bytes]
_MAX_WAITING_BYTES = 64 << 20
_END_S = 5.0


@dataclass(frozen=True)
class LevelStats:
    """What a level did since the start: values and bytes it gave, and the time of its look-ups.

    `evictions` are the segments that this process removed; `dropped` values found no place in the
    queue to a slow level; `late` look-ups were not waited for.
    """

    name: str
    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    lookups: int = 0
    lookup_s: float = 0.0
    evictions: int = 0
    dropped: int = 0
    late: int = 0


class Level:
    """A store and its figures.

    Args:
        name: In metrics: l1, l2, l3.
        store: Where values are looked up, and stored if there is no `behind`.
        behind: Opens a second store on the same values, in a thread that stores.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        name: str,
        store: ValueStore,
        behind: Callable[[], ValueStore] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.store, self._clock = store, clock
        self._behind = _WriteBehind(behind, name) if behind else None
        self._stats = LevelStats(name)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The payload under each key digest; None where there is none."""
        started = self._clock()
        found = self.store.get_many(keys)
        sizes = [len(value) for value in found if value is not None]
        stats = self._stats
        self._stats = replace(
            stats,
            hits=stats.hits + len(sizes),
            misses=stats.misses + len(found) - len(sizes),
            hit_bytes=stats.hit_bytes + sum(sizes),
            lookups=stats.lookups + 1,
            lookup_s=stats.lookup_s + self._clock() - started,
        )
        return found

    def put_many(self, items: Sequence[Item]) -> int:
        """Store payloads, now or soon; how many were stored or await it."""
        return (self._behind or self.store).put_many(items)

    def stats(self) -> LevelStats:
        """Figures since the start."""
        stores: list[Any] = [self.store, self._behind.store if self._behind else None]
        counts = [getattr(store, "counts", None) for store in stores]
        evicted = sum(getattr(count, "evicted", 0) for count in counts)
        dropped = self._behind.dropped if self._behind else 0
        late = getattr(self.store, "late", 0)
        return replace(self._stats, evictions=evicted, dropped=dropped, late=late)

    def close(self) -> None:
        """Store what waits, for a while, and let go."""
        if self._behind:
            self._behind.close()
        self.store.close()


class LeveledStore:
    """A value store over levels, the fastest first. Not for several threads."""

    def __init__(self, levels: Sequence[Level]) -> None:
        self.levels = tuple(levels)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The payload under each key digest; None where no level has one."""
        found: list[bytes | None] = [None] * len(keys)
        missing = list(range(len(keys)))
        for depth, level in enumerate(self.levels):
            if not missing:
                break
            values = level.get_many([keys[at] for at in missing])
            fresh = []
            for at, value in zip(missing, values, strict=True):
                if value is not None:
                    found[at] = value
                    fresh.append((keys[at], value))
            missing = [at for at in missing if found[at] is None]
            if fresh:
                self._promote(depth, fresh)
        return found

    def put_many(self, items: Sequence[Item]) -> int:
        """Store payloads in every level; how many the most accommodating one took."""
        return max((level.put_many(items) for level in self.levels), default=0)

    def stats(self) -> tuple[LevelStats, ...]:
        """Figures of each level since the start."""
        return tuple(level.stats() for level in self.levels)

    def close(self) -> None:
        """Let go of all levels."""
        for level in self.levels:
            level.close()

    def _promote(self, depth: int, items: Sequence[Item]) -> None:
        """Store what a level gave in those above it."""
        for above in self.levels[:depth]:
            above.put_many(items)


class _WriteBehind:
    """Opens a store and stores in it by a thread, in order, from a bounded queue."""

    def __init__(self, open_store: Callable[[], ValueStore], name: str) -> None:
        self._open_store = open_store
        self.store: ValueStore | None = None
        self.dropped = 0
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._thread = threading.Thread(target=self._write, name=f"{name}-writer", daemon=True)
        self._thread.start()

    def put_many(self, items: Sequence[Item]) -> int:
        taken = 0
        for item in items:
            size = len(item[1])
            with self._lock:
                has_room = self._waiting_bytes + size <= _MAX_WAITING_BYTES
                self._waiting_bytes += size if has_room else 0
            if has_room:
                self._queue.put(item)
                taken += 1
            else:
                self.dropped += 1
        return taken

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(_END_S)
        if self._thread.is_alive():
            # A disk that hangs: the thread is left to end with the process.
            logger.warning("values were not written in time thread=%s", self._thread.name)

    def _write(self) -> None:
        try:
            self.store = self._open_store()
        except (StorageError, OSError) as error:
            logger.warning("values are not written thread=%s reason=%s", self._thread.name, error)
        while (item := self._queue.get()) is not None:
            try:
                if self.store:
                    self.store.put_many([item])
            except Exception:  # The thread must live: a level that fails costs speed alone.
                logger.exception("a value was not stored thread=%s", self._thread.name)
            with self._lock:
                self._waiting_bytes -= len(item[1])
        if self.store:
            self.store.close()
