"""The loader as an actor: one per node, shared by the ranks on it, and safe to kill.

The trainer creates it; Ray restarts it when its process or node dies, and repeats the calls that
were under way. A batch is a pure function of its step, so the new one answers them identically.
What a restart loses: batches read ahead, and the figures of `stats`.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from eagleray.actors.cache import TouchSink, open_cache
from eagleray.actors.cache.evictor_actor import EvictorClient
from eagleray.actors.cache.levels import LevelStats
from eagleray.actors.data.activity import longest
from eagleray.actors.data.batch import Batch, LoaderStats
from eagleray.actors.data.dataset import Dataset, Split
from eagleray.actors.data.loader import Loader
from eagleray.actors.data.mixture import Mixture
from eagleray.actors.telemetry import RaySink, TotalsMeter
from eagleray.platform.config import FeatureCacheConfig
from eagleray.platform.storage import Storage
from eagleray.platform.telemetry import (
    CACHE_LEVEL_CALLS,
    CACHE_LEVEL_EVICTIONS,
    CACHE_LEVEL_LATE,
    CACHE_LEVEL_LOOKUPS,
    CACHE_LEVEL_READ,
    CACHE_LEVEL_SPENT,
    CACHE_LOOKUPS,
    DATA_BATCHES,
    DATA_READ,
    DATA_WAIT,
)

logger = logging.getLogger(__name__)

# The actor mostly waits for its callers; any share of a CPU would be taken from a trainer worker.
_NUM_CPUS = 0


@dataclass(frozen=True)
class LoaderSpec:
    """Everything a loader is a function of, and where it may look first.

    `redis_url` may hold a password and is left out of repr; with None, and no segments in `cache`,
    there is no cache, as the memory map of the shards is faster than a second copy in the memory of
    a process. `evictor` is the name that `create_evictor` was given: with a handle in its
    arguments, an actor cannot be restarted once its creator has let go of them.
    """

    storage_root: Path
    dataset: str
    order_seed: int
    batch_size: int
    split: Split = "train"
    prefetch_batches: int | None = None
    fetchers: int | None = None
    mixture: Mixture | None = None
    cache: FeatureCacheConfig | None = None
    redis_url: str | None = field(default=None, repr=False)
    evictor: str | None = None


class LoaderServer:
    """What runs in the actor: a loader, and the cutting of batches for ranks.

    Args:
        spec: What it reads.
        rank: With `world_size`, the only rank that it reads for.
        world_size: 1: it reads for all.
    """

    def __init__(self, spec: LoaderSpec, rank: int = 0, world_size: int = 1) -> None:
        self._spec, self._rank, self._world_size = spec, rank, world_size
        self._meter = TotalsMeter(RaySink())

    @cached_property
    def _loader(self) -> Loader:
        # Not in __init__: what goes wrong there reaches callers without its type.
        spec = self._spec
        dataset = Dataset.open(Storage(spec.storage_root), spec.dataset)
        cache = None
        if spec.cache is not None and (spec.redis_url is not None or spec.cache.has_segments):
            root = str(spec.storage_root)
            cache = open_cache(spec.cache, spec.redis_url, _sink(spec.evictor), scope=root)
        return Loader(
            dataset,
            spec.split,
            spec.order_seed,
            spec.batch_size,
            cache,
            spec.prefetch_batches,
            spec.mixture,
            self._rank,
            self._world_size,
            fetchers=spec.fetchers,
        )

    def batch(self, step: int, rank: int, world_size: int, mixture: Mixture | None = None) -> Batch:
        """One rank's part of a step's batch; the whole is read once for all ranks."""
        batch = self._loader.batch(step, mixture)
        if self._world_size == 1:
            batch = batch.slice_for_rank(rank, world_size)
        self._measure(self._loader.stats())
        self._measure_levels(self._loader.level_stats())
        return batch

    def eval_batch(self, index: int, rank: int, world_size: int) -> Batch:
        """One rank's part of a batch of held-out samples."""
        return self._loader.eval_batch(index).slice_for_rank(rank, world_size)

    @ray.method(concurrency_group="status")
    def doing(self) -> tuple[str, float] | None:
        """What has been read for longest at this moment, and for how many seconds."""
        return longest()

    def stats(self) -> LoaderStats:
        """Figures since this process started."""
        return self._loader.stats()

    def close(self) -> None:
        """Let go of the cache; its segments go with their last user."""
        if "_loader" in vars(self):
            self._loader.close()

    def _measure(self, stats: LoaderStats) -> None:
        meter = self._meter
        meter.reach(DATA_BATCHES, stats.ready, ready="yes")
        meter.reach(DATA_BATCHES, stats.batches - stats.ready, ready="no")
        meter.reach(DATA_WAIT, stats.wait_s)
        meter.reach(DATA_READ, stats.read_s)
        meter.reach(CACHE_LOOKUPS, stats.cache_hits, result="hit")
        meter.reach(CACHE_LOOKUPS, stats.cache_misses, result="miss")

    def _measure_levels(self, levels: Sequence[LevelStats]) -> None:
        meter = self._meter
        for level in levels:
            meter.reach(CACHE_LEVEL_LOOKUPS, level.hits, level=level.name, result="hit")
            meter.reach(CACHE_LEVEL_LOOKUPS, level.misses, level=level.name, result="miss")
            meter.reach(CACHE_LEVEL_READ, level.hit_bytes, level=level.name)
            meter.reach(CACHE_LEVEL_SPENT, level.lookup_s, level=level.name)
            meter.reach(CACHE_LEVEL_CALLS, level.lookups, level=level.name)
            meter.reach(CACHE_LEVEL_EVICTIONS, level.evictions, level=level.name)
            meter.reach(CACHE_LEVEL_LATE, level.late, level=level.name)


def create_loader(spec: LoaderSpec, *, name: str | None = None, node_id: str | None = None) -> Any:
    """Start a loader actor and return its handle, at once; the first call waits until it is up.

    Args:
        spec: What it reads, in which order.
        name: To be found by `ray.get_actor` in this namespace; None: by its handle only.
        node_id: The node that it should share with its callers, if that is alive; None: any.
    """
    options: dict[str, Any] = {
        "num_cpus": _NUM_CPUS,
        # Without limit: each restart answers a death from outside, and callers have deadlines.
        "max_restarts": -1,
        "max_task_retries": -1,
        "name": name,
    }
    if node_id is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=True)
    # `status` answers while a read hangs.
    remote: Any = ray.remote
    actor = remote(concurrency_groups={"status": 1})(LoaderServer)
    return actor.options(**options).remote(spec)


def _sink(evictor: str | None) -> TouchSink | None:
    if evictor is None:
        return None
    try:
        return EvictorClient(ray.get_actor(evictor))
    except ValueError:
        # Without it nobody evicts, and Redis refuses what does not fit: speed, nothing more.
        logger.warning("no evictor of this name: the cache will fill and stay name=%s", evictor)
        return None
