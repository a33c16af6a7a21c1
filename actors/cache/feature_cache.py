"""The feature cache: values that are dear to compute, looked up by key, never trusted to be there.

Keys name content (for token blocks: dataset digest, split, block), so a value under a key never
changes and nothing is ever invalidated.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from eagleray.actors.cache.cluster_link import is_cluster_url
from eagleray.actors.cache.cluster_store import ClusterStore
from eagleray.actors.cache.frame import digest_key
from eagleray.actors.cache.leases import Leases, RedisLeases, SingleFlight
from eagleray.actors.cache.memory_store import MemoryStore
from eagleray.actors.cache.policies import make_policy
from eagleray.actors.cache.redis_store import RedisStore
from eagleray.actors.cache.touches import TouchSink
from eagleray.platform.config import FeatureCacheConfig


class ValueStore(Protocol):
    """Where values are kept. Answers in bounded time; a fault is a miss and raises nothing."""

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The payload under each 16-byte key digest; None where there is none."""
        ...

    def put_many(self, items: Sequence[tuple[bytes, bytes]]) -> int:
        """Store payloads where there is room; how many were stored."""
        ...

    def close(self) -> None:
        """Let go of connections and memory."""
        ...


@dataclass(frozen=True)
class CacheStats:
    """Values looked up since the start; `stored` of the misses were kept."""

    hits: int = 0
    misses: int = 0
    stored: int = 0


class FeatureCache:
    """Reads through a store. Not for several threads.

    Args:
        store: Where values are kept.
        leases: With them, a value that several processes miss at once is computed in one of them.
    """

    def __init__(self, store: ValueStore, leases: Leases | None = None) -> None:
        self.store, self._leases = store, leases
        self._flight = SingleFlight(leases, store.get_many, store.put_many) if leases else None
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
        values = dict(zip(unique, self.store.get_many(unique), strict=True))
        missing = sorted(first[digest] for digest in unique if values[digest] is None)
        stored = 0
        if missing and self._flight:
            wanted = [digests[i] for i in missing]
            found, stored = self._flight.fill(wanted, lambda at: compute([missing[i] for i in at]))
            values.update(zip(wanted, found, strict=True))
        elif missing:
            computed = compute(missing)
            if len(computed) != len(missing):
                raise ValueError(f"compute gave {len(computed)} values for {len(missing)} keys")
            fresh = [(digests[i], value) for i, value in zip(missing, computed, strict=True)]
            values.update(fresh)
            stored = self.store.put_many(fresh)
        self.stats = CacheStats(
            self.stats.hits + len(unique) - len(missing),
            self.stats.misses + len(missing),
            self.stats.stored + stored,
        )
        return [value for digest in digests if (value := values[digest]) is not None]

    def close(self) -> None:
        """Let go of connections and memory."""
        self.store.close()
        if self._leases:
            self._leases.close()


def open_cache(
    config: FeatureCacheConfig,
    redis_url: str | None,
    sink: TouchSink | None = None,
    clock: Callable[[], float] = time.monotonic,
    *,
    is_dear: bool = False,
) -> FeatureCache | None:
    """The cache that the configuration asks for: in Redis, else in memory; None if it is off.

    `is_dear` says that values are worth a lease, so that no two processes compute the same one; in
    a cluster there are none.
    """
    if not config.enabled or not config.max_bytes:
        return None
    if redis_url is None:
        policy = make_policy(config.policy, config.max_bytes, config.history)
        return FeatureCache(MemoryStore(policy, config.max_bytes))
    if is_cluster_url(redis_url):
        return FeatureCache(ClusterStore(redis_url, config.timeout_s, sink, clock))
    leases = RedisLeases(redis_url, config.timeout_s) if is_dear else None
    return FeatureCache(RedisStore(redis_url, config.timeout_s, sink, clock), leases)
