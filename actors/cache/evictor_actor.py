"""The evictor as an actor: one per Redis, fed by all readers, and safe to kill.

Whoever starts the cluster's Redis creates it; Ray restarts it when its process dies. What a restart
loses: the history of references. It starts again from what lies in Redis, by idle time.
"""

import logging
from typing import Any

import ray
from ray.exceptions import RayError
from redis.exceptions import RedisError

from eagleray.actors.cache.cluster_link import ClusterLink, is_cluster_url
from eagleray.actors.cache.evictor import Evictor, EvictorStats, resident_in, unlink_in
from eagleray.actors.cache.policies import make_policy
from eagleray.actors.cache.redis_link import RedisLink
from eagleray.actors.cache.touches import Schedule, TouchBatch
from eagleray.actors.rpc import call
from eagleray.platform.config import FeatureCacheConfig

logger = logging.getLogger(__name__)

_NUM_CPUS = 0
_TIMEOUT_S = 1.0
# Batches under way from one reader; at more the evictor is behind, and touches are dropped.
_MAX_PENDING = 64


class EvictorServer:
    """What runs in the actor."""

    def __init__(self, redis_url: str, config: FeatureCacheConfig) -> None:
        is_cluster = is_cluster_url(redis_url)
        link = (ClusterLink if is_cluster else RedisLink)(redis_url, _TIMEOUT_S)
        policy = make_policy(config.policy, config.max_bytes, config.history)
        self._evictor = Evictor(policy, config.max_bytes, unlink_in(link))
        try:
            self._evictor.touch(resident_in(link))
        except (RedisError, OSError) as error:
            logger.warning("evictor starts without what is cached: %s", error)

    def touch(self, batch: TouchBatch) -> None:
        """Note references, and evict if the budget is exceeded."""
        self._evictor.touch(batch)

    def expect(self, schedule: Schedule) -> None:
        """Note what will be referenced."""
        self._evictor.expect(schedule)

    def stats(self) -> EvictorStats:
        """Figures since this process started."""
        return self._evictor.stats()


def create_evictor(config: FeatureCacheConfig, redis_url: str, *, name: str | None = None) -> Any:
    """Start an evictor actor and return its handle, at once."""
    options = {
        "num_cpus": _NUM_CPUS,
        # Without limit: each restart answers a death from outside, and nobody waits for it.
        "max_restarts": -1,
        "max_pending_calls": _MAX_PENDING,
        "name": name,
    }
    return ray.remote(EvictorServer).options(**options).remote(redis_url, config)


class EvictorClient:
    """An evictor actor as a `TouchSink`; `dropped` counts batches that it could not be given."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.dropped = 0

    def touch(self, batch: TouchBatch) -> None:
        """Send a batch and do not wait."""
        try:
            self._handle.touch.remote(batch)
        except RayError:
            # Too many under way, or the actor is gone: a worse order of eviction, nothing more.
            self.dropped += 1

    def expect(self, schedule: Schedule) -> None:
        """Send a schedule and do not wait."""
        try:
            self._handle.expect.remote(schedule)
        except RayError:
            self.dropped += 1

    def stats(self, timeout_s: float) -> EvictorStats:
        """Figures since the actor's process started.

        Raises:
            ServiceError: It is gone, or did not answer in time.
        """
        stats: EvictorStats = call(
            self._handle.stats, timeout_s=timeout_s, what="the evictor's statistics"
        )
        return stats
