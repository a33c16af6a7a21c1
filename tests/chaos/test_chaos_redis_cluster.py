"""Batches beside a Redis Cluster whose masters fail and whose slots move: the same bits, always."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import cycle
from pathlib import Path

import pytest
from redis.crc import key_slot
from tools.redis_cluster import FAULTS, HOST, RedisCluster

from eagleray.actors.cache import FeatureCache, open_cache
from eagleray.actors.cache.breaker import FAILURES, FIRST_PAUSE_S
from eagleray.actors.cache.cluster_link import ClusterLink
from eagleray.actors.cache.cluster_store import ClusterStore
from eagleray.actors.cache.frame import digest_key
from eagleray.actors.cache.framed_values import KEY_PREFIX
from eagleray.actors.data import Dataset
from eagleray.actors.data.batch import Batch
from eagleray.actors.data.loader import Loader
from eagleray.platform.config import FeatureCacheConfig

pytestmark = pytest.mark.timeout(240)
Until = Callable[..., None]
BATCH_SIZE = 32
# Longer than the product's 50 ms: a test's machine may be busy. Where no node is silent, patience
# costs nothing.
TIMEOUT_S, PATIENT_S = 1.0, 30.0


@pytest.fixture(scope="module")
def dataset(
    tmp_path_factory: pytest.TempPathFactory, build_letters: Callable[[Path, int], Dataset]
) -> Dataset:
    """Some forty blocks."""
    return build_letters(tmp_path_factory.mktemp("dataset"), 800_000)


class Clock:
    """Time that passes when it is told: until then no breaker that is open closes."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Reader:
    """A loader that reads through the cluster, and what each step must give it."""

    def __init__(self, dataset: Dataset, cluster: RedisCluster, timeout_s: float) -> None:
        self.clock = Clock()
        config = FeatureCacheConfig(timeout_s=timeout_s)
        cache = open_cache(config, cluster.url, clock=self.clock)
        assert isinstance(cache, FeatureCache)
        assert isinstance(cache.store, ClusterStore)
        self.link: ClusterLink = cache.store.link
        # What is read ahead would be there without a look-up.
        self.loader = Loader(dataset, "train", 5, BATCH_SIZE, cache, prefetch_batches=0)
        self._plain = Loader(dataset, "train", 5, BATCH_SIZE, prefetch_batches=0)
        self._next = 0

    def read(self, num_steps: int) -> int:
        """Read so many batches on; each must be what it is without a cache. Blocks looked up."""
        for step in range(self._next, self._next + num_steps):
            assert _digest(self.loader.batch(step)) == _digest(self._plain.batch(step))
        self._next += num_steps
        stats = self.loader.stats()
        return stats.cache_hits + stats.cache_misses

    def all_hit(self, num_steps: int, after_s: float = 1.0) -> bool:
        """Whether nothing is missed in so many steps, some time later."""
        self.clock.now += after_s
        before = self.loader.stats().cache_misses
        self.read(num_steps)
        return self.loader.stats().cache_misses == before

    def close(self) -> None:
        self.loader.close()
        self._plain.close()


def _digest(batch: Batch) -> bytes:
    return sha256(batch.ids.tobytes() + batch.tokens.tobytes()).digest()


def block_keys(dataset: Dataset) -> list[bytes]:
    """What the loader's blocks are called in the cache."""
    (stream,) = dataset.split("train").streams
    assert stream is not None
    names = (f"{dataset.digest}:train:{block}" for block in range(stream.num_blocks))
    return [digest_key(name.encode()) for name in names]


@pytest.mark.parametrize(
    # A replica takes over from a killed master; the others stay away, and one of them comes back.
    ("fault", "fragile_redis_cluster"),
    [(fault, 1000 if fault == "kill" else 600_000) for fault in FAULTS],
    indirect=["fragile_redis_cluster"],
    ids=FAULTS,
)
def test_a_master_that_fails_costs_misses_and_no_call_once_its_breaker_is_open(
    dataset: Dataset, fragile_redis_cluster: RedisCluster, fault: str, until: Until
) -> None:
    cluster = fragile_redis_cluster
    reader = Reader(dataset, cluster, PATIENT_S if fault == "kill" else TIMEOUT_S)
    try:
        until(lambda: reader.all_hit(20), "a cache that holds it all")
        assert reader.link.counts.failed_calls == 0
        victim = cluster.owner(block_keys(dataset)[0])
        until(lambda: cluster.is_replicated(victim), "a replica that has it all")
        counts, before = reader.link.counts, reader.loader.stats()
        with cluster.faulty(victim, fault):
            reader.read(20)
            # From here on nobody asks the node, whatever is read: no step waits for it.
            assert counts.by_node == {(HOST, victim): FAILURES}
            reader.read(100)
            assert counts.by_node == {(HOST, victim): FAILURES}
            during = reader.loader.stats()
            assert during.cache_misses > before.cache_misses
            assert during.cache_hits > before.cache_hits
            if fault == "kill":
                key = block_keys(dataset)[0]
                until(lambda: victim not in cluster.owners(key), "a replica in its place", 60)
                # Sooner than the breaker lets the lost node be tried again.
                reader.clock.now += FIRST_PAUSE_S * 0.6
                # What the first look misses it stores, where the replica had not got it.
                assert reader.all_hit(10, 0.1) or reader.all_hit(10, 0.1)
                assert counts.by_node == {(HOST, victim): FAILURES}
        if fault == "stop":
            until(lambda: reader.all_hit(10), "hits from the node that goes on", 60)
        assert set(counts.by_node) == {(HOST, victim)}
    finally:
        reader.close()


def test_slots_that_move_under_20000_reads_cost_neither_a_value_nor_an_error(
    dataset: Dataset, redis_cluster: RedisCluster, until: Until
) -> None:
    reader, keys = Reader(dataset, redis_cluster, PATIENT_S), block_keys(dataset)
    homes = {key_slot(KEY_PREFIX + key): redis_cluster.owner(key) for key in keys}
    is_read, num_moves = threading.Event(), 0

    def move() -> None:
        nonlocal num_moves
        for slot in cycle(homes):
            if is_read.is_set():
                return
            home = homes[slot]
            away = next(port for port in redis_cluster.masters if port != home)
            redis_cluster.move(home, away, [slot])
            redis_cluster.move(away, home, [slot])
            num_moves += 2

    try:
        until(lambda: reader.all_hit(20), "a cache that holds it all")
        missed, first = reader.loader.stats().cache_misses, reader.read(0)
        with ThreadPoolExecutor(1) as thread:
            mover = thread.submit(move)
            try:
                while (num_reads := reader.read(10) - first) < 20_000:
                    reader.clock.now += 0.1
            finally:
                is_read.set()
            mover.result()
        assert num_moves > len(homes)
        assert reader.link.counts.redirected > 0
        assert reader.link.counts.failed_calls == 0
        # A command that is redirected twice is a miss.
        assert reader.loader.stats().cache_misses - missed < num_reads / 10
        until(lambda: reader.all_hit(20), "hits in the new places")
    finally:
        reader.close()
