"""The feature cache: values that are dear to compute, looked up by key, never trusted to be there.

Keys name content (for token blocks: dataset digest, split, block), so a value under a key never
changes and nothing is ever invalidated.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from eagleray.actors.cache.bounded_store import BoundedStore
from eagleray.actors.cache.cluster_link import is_cluster_url
from eagleray.actors.cache.cluster_store import ClusterStore
from eagleray.actors.cache.frame import digest_key
from eagleray.actors.cache.leases import Leases, RedisLeases, SingleFlight
from eagleray.actors.cache.levels import Level, LeveledStore, LevelStats
from eagleray.actors.cache.memory_store import MemoryStore
from eagleray.actors.cache.policies import make_policy
from eagleray.actors.cache.redis_store import RedisStore
from eagleray.actors.cache.segment_folder import PREFIX, sweep
from eagleray.actors.cache.segments import SegmentStore
from eagleray.actors.cache.touches import Schedule, TouchSink
from eagleray.actors.cache.value_store import ValueStore
from eagleray.platform.config import FeatureCacheConfig
from eagleray.platform.errors import StorageError

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
DISK_TIMEOUT_S = 1.0
"""A disk that takes longer for a look-up is left alone for a while: well above what one takes that
is busy, as a hundred blocks are read one after the other."""


@dataclass(frozen=True)
class CacheStats:
    """Values looked up since the start; `stored` of the misses were kept."""

    hits: int = 0
    misses: int = 0
    stored: int = 0


class FeatureCache:
    """Reads through a store. Safe for several threads, which compute at the same time.

    What two of them miss at once is computed by one.

    Args:
        store: Where values are kept.
        leases: With them, a value that several processes miss at once is computed in one of them.
        plan: Takes what will be looked up; None: nobody goes by it.
    """

    def __init__(
        self,
        store: ValueStore,
        leases: Leases | None = None,
        plan: Callable[[Schedule], None] | None = None,
    ) -> None:
        self.store, self._leases, self._plan = store, leases, plan
        self._flight = SingleFlight(leases, self._get, self._put) if leases else None
        # A store is for one thread. Leases too: with them values are computed one call at a time.
        self._using, self._flying = threading.Lock(), threading.Lock()
        self._counting = threading.Lock()
        self._filling: dict[bytes, Future[bytes]] = {}
        self.stats = CacheStats()

    def get_or_compute_many(
        self, keys: Sequence[bytes], compute: Callable[[list[int]], list[bytes]]
    ) -> list[bytes]:
        """The value of each key; those that are missing are computed in one call, then stored.

        Args:
            keys: Any bytes; a key that stands several times is looked up once.
            compute: Given the indices in `keys` of what is missing, returns their values in that
                order.

        Raises:
            ValueError: `compute` returned another number of values than it was asked for.
            Exception: Whatever `compute` raises; the store itself never does.
        """
        digests = [digest_key(key) for key in keys]
        first = {digest: index for index, digest in reversed(list(enumerate(digests)))}
        unique = list(first)
        values = dict(zip(unique, self._get(unique), strict=True))
        missing = sorted(first[digest] for digest in unique if values[digest] is None)
        stored = 0
        if missing and self._flight:
            wanted = [digests[i] for i in missing]
            with self._flying:
                found, stored = self._flight.fill(
                    wanted, lambda at: compute([missing[i] for i in at])
                )
            values.update(zip(wanted, found, strict=True))
        elif missing:
            mine, others = self._claim({digests[i]: i for i in missing})
            stored = self._fill(mine, compute, values)
            # Ours are done first: threads that wait for each other never wait in a circle.
            left = self._taken(others, values)
            stored += self._fill(left, compute, values)
            missing = [*mine.values(), *left.values()]
        with self._counting:
            self.stats = CacheStats(
                self.stats.hits + len(unique) - len(missing),
                self.stats.misses + len(missing),
                self.stats.stored + stored,
            )
        return [value for digest in digests if (value := values[digest]) is not None]

    @property
    def is_planned(self) -> bool:
        """Whether `expect` changes anything."""
        return self._plan is not None

    def expect(self, now: int, uses: Iterable[tuple[int, Sequence[bytes]]]) -> None:
        """Say what will be looked up, for the policy `auto`. Never fails, and may be lost.

        Args:
            now: The step that the reader is at; what it expected earlier is over.
            uses: (step, keys), each step once unless the reader begins anew.
        """
        if self._plan is None:
            return
        by_step = [(step, [digest_key(key) for key in keys]) for step, keys in uses]
        steps = tuple(step for step, _ in by_step)
        counts = tuple(len(keys) for _, keys in by_step)
        joined = b"".join(key for _, keys in by_step for key in keys)
        with self._using:
            self._plan(Schedule(now, steps, counts, joined))

    def level_stats(self) -> tuple[LevelStats, ...]:
        """Figures of each level since the start; none if there is one store alone."""
        return self.store.stats() if isinstance(self.store, LeveledStore) else ()

    def close(self) -> None:
        """Let go of connections and memory."""
        with self._using:
            self.store.close()
        if self._leases:
            self._leases.close()

    def _claim(
        self, wanted: dict[bytes, int]
    ) -> tuple[dict[bytes, int], dict[bytes, tuple[int, Future[bytes]]]]:
        """What this thread computes, and what another one is computing already."""
        with self._counting:
            others = {d: (i, self._filling[d]) for d, i in wanted.items() if d in self._filling}
            mine = {digest: index for digest, index in wanted.items() if digest not in others}
            self._filling.update((digest, Future()) for digest in mine)
        return mine, others

    def _fill(
        self,
        wanted: dict[bytes, int],
        compute: Callable[[list[int]], list[bytes]],
        values: dict[bytes, bytes | None],
    ) -> int:
        """Compute and store; how many were stored."""
        if not wanted:
            return 0
        computed: list[bytes] = []
        try:
            computed = compute(list(wanted.values()))
            if len(computed) != len(wanted):
                raise ValueError(f"compute gave {len(computed)} values for {len(wanted)} keys")
            fresh = list(zip(wanted, computed, strict=True))
            values.update(fresh)
            return self._put(fresh)
        finally:
            with self._counting:
                claims = [self._filling.pop(digest, None) for digest in wanted]
            for digest, claim in zip(wanted, claims, strict=True):
                value = values.get(digest)
                if claim is not None and value is not None:
                    claim.set_result(value)
                elif claim is not None:
                    claim.cancel()

    def _taken(
        self,
        others: dict[bytes, tuple[int, Future[bytes]]],
        values: dict[bytes, bytes | None],
    ) -> dict[bytes, int]:
        """Take what other threads compute; what they failed to compute is left."""
        left = {}
        for digest, (index, claim) in others.items():
            try:
                values[digest] = claim.result()
            except CancelledError:
                left[digest] = index
        return left

    def _get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._using:
            return self.store.get_many(keys)

    def _put(self, items: Sequence[tuple[bytes, bytes]]) -> int:
        with self._using:
            return self.store.put_many(items)


def open_cache(
    config: FeatureCacheConfig,
    redis_url: str | None,
    sink: TouchSink | None = None,
    clock: Callable[[], float] = time.monotonic,
    *,
    is_dear: bool = False,
    scope: str = "",
) -> FeatureCache | None:
    """The cache that the configuration asks for; None if it is off.

    Values are kept in the node's segments and Redis, whichever there is; in this process's memory
    if there is neither.

    Args:
        config: The section `data.cache`.
        redis_url: Where Redis is; None: nowhere.
        sink: Learns of what is read from and stored in Redis.
        clock: Seconds that only grow.
        is_dear: Values are worth a lease, so that no two processes compute the same one; without
            Redis there are none.
        scope: Processes of a node share segments if they name the same one, as the storage's root.
    """
    if not config.enabled:
        return None
    shared = _shared(config, scope)
    disk = _disk(config, scope, clock)
    redis = _redis(config, redis_url, sink, clock) if config.max_bytes else None
    levels = [*shared, *([Level("l2", redis)] if redis else []), *disk]
    store: ValueStore
    plan = sink.expect if sink and redis else None
    if shared or disk:
        store = LeveledStore(levels)
    elif redis:
        store = redis
    elif config.max_bytes:
        policy = make_policy(config.policy, config.max_bytes, config.history)
        store = memory = MemoryStore(policy, config.max_bytes)
        plan = memory.expect
    else:
        return None
    leases: Leases | None = None
    if is_dear and redis and redis_url:
        leases = RedisLeases(redis_url, config.timeout_s)
    return FeatureCache(store, leases, plan if config.policy == "auto" else None)


def _redis(
    config: FeatureCacheConfig,
    redis_url: str | None,
    sink: TouchSink | None,
    clock: Callable[[], float],
) -> RedisStore | ClusterStore | None:
    if redis_url is None:
        return None
    kind = ClusterStore if is_cluster_url(redis_url) else RedisStore
    return kind(redis_url, config.timeout_s, sink, clock)


def _shared(config: FeatureCacheConfig, scope: str) -> list[Level]:
    if not config.shared_bytes:
        return []
    try:
        sweep(SHARED_MEMORY)
        return [Level("l1", SegmentStore(SHARED_MEMORY / _folder(scope), config.shared_bytes))]
    except (StorageError, OSError) as error:
        logger.warning("the cache goes without shared memory reason=%s", error)
        return []


def _disk(config: FeatureCacheConfig, scope: str, clock: Callable[[], float]) -> list[Level]:
    if not config.disk_bytes or config.disk_path is None:
        return []
    folder = Path(config.disk_path) / _folder(scope)
    open_store = partial(
        SegmentStore, folder, config.disk_bytes, is_kept=True, setting="data.cache.disk_bytes"
    )
    try:
        reader = BoundedStore(open_store, DISK_TIMEOUT_S, "l3-reader", clock)
    except (StorageError, OSError) as error:
        logger.warning("the cache goes without a disk reason=%s", error)
        return []
    # Two on one folder: what is read does not wait for what is written.
    return [Level("l3", reader, open_store)]


def _folder(scope: str) -> str:
    return PREFIX + digest_key(scope.encode()).hex()
