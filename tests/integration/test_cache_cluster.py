"""The feature cache on a real Redis Cluster of three masters and three replicas."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from redis.crc import key_slot
from tools.redis_cluster import HOST, NUM_MASTERS, RedisCluster

from eagleray.actors.cache import FeatureCache, open_cache
from eagleray.actors.cache.breaker import FAILURES
from eagleray.actors.cache.cluster_link import ClusterLink
from eagleray.actors.cache.cluster_store import ClusterStore
from eagleray.actors.cache.evictor import Evictor, resident_in, unlink_in
from eagleray.actors.cache.frame import digest_key
from eagleray.actors.cache.framed_values import KEY_PREFIX
from eagleray.actors.cache.policies import LruK
from eagleray.actors.cache.redis_link import RedisLink
from eagleray.platform.config import FeatureCacheConfig, RedisConfig
from eagleray.platform.redis_server import RedisServer

pytestmark = pytest.mark.timeout(240)
Until = Callable[..., None]
KEYS = [digest_key(b"%d" % number) for number in range(256)]
# Longer than the product's 50 ms: a test's machine may be busy. Where no node is silent, patience
# costs nothing.
TIMEOUT_S, PATIENT_S = 0.5, 30.0


def value_of(key: bytes) -> bytes:
    return key * 9


def filled(cluster: RedisCluster, timeout_s: float) -> ClusterStore:
    """A store that holds a value under each of KEYS."""
    made = ClusterStore(cluster.url, timeout_s)
    assert made.put_many([(key, value_of(key)) for key in KEYS]) == len(KEYS)
    return made


@pytest.fixture
def store(redis_cluster: RedisCluster) -> Iterator[ClusterStore]:
    """A store in the cluster that the tests share."""
    with contextlib.closing(filled(redis_cluster, PATIENT_S)) as made:
        yield made


@pytest.fixture
def fragile_store(fragile_redis_cluster: RedisCluster) -> Iterator[ClusterStore]:
    """A store in a cluster whose nodes may be killed."""
    with contextlib.closing(filled(fragile_redis_cluster, TIMEOUT_S)) as made:
        yield made


def slots_by_owner(cluster: RedisCluster, keys: Sequence[bytes]) -> dict[int, list[int]]:
    """The slots of keys, by the port of the master that has them."""
    found: dict[int, list[int]] = {port: [] for port in cluster.masters}
    for slot, key in {key_slot(KEY_PREFIX + key): key for key in keys}.items():
        found[cluster.owner(key)].append(slot)
    return found


def look(store: ClusterStore, keys: Sequence[bytes] = KEYS) -> int:
    """How many values are found; each of them must be right."""
    found = store.get_many(keys)
    for key, value in zip(keys, found, strict=True):
        assert value is None or value == value_of(key)
    return sum(value is not None for value in found)


def test_values_are_spread_over_the_nodes_and_come_back_in_order(
    redis_cluster: RedisCluster, store: ClusterStore
) -> None:
    assert look(store, KEYS[::-1]) == len(KEYS)
    sizes = [redis_cluster.ask(port, "DBSIZE") for port in redis_cluster.masters]
    assert sum(sizes) == len(KEYS)
    assert min(sizes) > len(KEYS) // 6
    assert sorted(port for _, port in store.link.nodes()) == sorted(redis_cluster.masters)
    assert store.put_many([(KEYS[0], bytes(2_000_000))]) == 0
    assert look(store) == len(KEYS)


def test_damaged_and_exchanged_values_are_misses(
    redis_cluster: RedisCluster, store: ClusterStore
) -> None:
    key = KEYS[0]
    name, node = KEY_PREFIX + key, redis_cluster.owner(key)
    redis_cluster.ask(node, "SETRANGE", name, 0, b"\0")
    assert store.get_many([key]) == [None]
    assert redis_cluster.ask(node, "EXISTS", name) == 0
    assert store.counts.damaged == 1


def test_500_slots_that_move_during_20000_reads_cost_no_wrong_value_and_no_error(
    redis_cluster: RedisCluster, store: ClusterStore
) -> None:
    slots_at = slots_by_owner(redis_cluster, KEYS)
    ended, num_moved = threading.Event(), 0

    def move() -> None:
        nonlocal num_moved
        try:
            # Round and round, a few at a time.
            while num_moved < 500:
                for source in redis_cluster.masters:
                    place = redis_cluster.masters.index(source)
                    target = redis_cluster.masters[place - 1]
                    moving, slots_at[source] = slots_at[source][:20], slots_at[source][20:]
                    redis_cluster.move(source, target, moving)
                    slots_at[target] += moving
                    num_moved += len(moving)
        finally:
            ended.set()

    mover = threading.Thread(target=move)
    mover.start()
    reads, missed = 0, 0
    while reads < 20_000 or not ended.is_set():
        missed += len(KEYS) - look(store)
        reads += len(KEYS)
    mover.join()
    assert num_moved >= 500
    assert store.link.counts.redirected > 0
    assert store.link.counts.failed_calls == 0
    # A command that is redirected twice is a miss.
    assert missed < reads / 10
    assert look(store) == len(KEYS)


def test_any_number_of_redirections_reads_the_map_once(redis_cluster: RedisCluster) -> None:
    now = 0.0
    store = ClusterStore(redis_cluster.url, 5, clock=lambda: now)
    with contextlib.closing(store):
        store.put_many([(key, value_of(key)) for key in KEYS])
        counts = store.link.counts
        assert (counts.refreshed, counts.redirected) == (1, 0)
        moved = slots_by_owner(redis_cluster, KEYS[:20])
        for source, slots in moved.items():
            target = next(port for port in redis_cluster.masters if port != source)
            redis_cluster.move(source, target, slots)
        # Each of them is asked again where the reply says, and all come in their order.
        assert look(store) == len(KEYS)
        all_moved = {slot for slots in moved.values() for slot in slots}
        wanted = sum(key_slot(KEY_PREFIX + key) in all_moved for key in KEYS)
        assert (counts.refreshed, counts.redirected) == (1, wanted)
        now += 1
        assert look(store) == len(KEYS)
        assert (counts.refreshed, counts.redirected) == (2, wanted)


def test_a_killed_master_costs_its_keys_until_its_replica_takes_over(
    fragile_redis_cluster: RedisCluster, fragile_store: ClusterStore, until: Until
) -> None:
    cluster, store = fragile_redis_cluster, fragile_store
    victim = cluster.owner(KEYS[0])
    until(lambda: cluster.is_replicated(victim), "a replica that has it all")
    with cluster.faulty(victim, "kill"):
        lost = len(KEYS) - look(store)
        assert 0 < lost < len(KEYS) * 2 / 3
        until(lambda: look(store) == len(KEYS), "all values from the replica", 60)
        assert cluster.owner(KEYS[0]) != victim
        assert store.put_many([(KEYS[0], value_of(KEYS[0]))]) == 1


# No replica takes over: what is tried is the patience of the reader.
@pytest.mark.parametrize("fragile_redis_cluster", [600_000], indirect=True)
def test_a_stopped_master_holds_nobody_up_once_its_breaker_is_open(
    fragile_redis_cluster: RedisCluster, fragile_store: ClusterStore, until: Until
) -> None:
    cluster, store = fragile_redis_cluster, fragile_store
    victim = cluster.owner(KEYS[0])
    calm = _seconds(store)
    with cluster.faulty(victim, "stop"):
        for _ in range(FAILURES):
            look(store)
        node = store.link._nodes[HOST, victim]
        assert node.breaker.times_opened == 1
        # No answer is waited for: far less than the time that one would be given.
        assert _seconds(store) < calm + TIMEOUT_S / 2
        assert 0 < look(store) < len(KEYS)
    until(lambda: look(store) == len(KEYS), "all values", 60)


def _seconds(store: ClusterStore) -> float:
    started = time.monotonic()
    look(store)
    return time.monotonic() - started


def test_a_node_that_takes_connections_and_never_answers_is_left_alone(
    fragile_redis_cluster: RedisCluster, fragile_store: ClusterStore
) -> None:
    cluster = fragile_redis_cluster
    victim = cluster.owner(KEYS[0])
    others = [key for key in KEYS if cluster.owner(key) != victim][:20]
    with cluster.faulty(victim, "black hole"):
        fresh = ClusterStore(f"redis-cluster://{HOST}:{cluster.ports[1]}", TIMEOUT_S)
        with contextlib.closing(fresh):
            for _ in range(2 * FAILURES):
                assert look(fresh, others) == len(others)


def test_an_interrupt_between_sending_and_reading_mixes_up_no_replies(
    store: ClusterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = RedisLink.receive
    for interrupted_at in range(NUM_MASTERS):
        reads = 0

        def failing(self: RedisLink, count: int, at: int = interrupted_at) -> list[Any]:
            nonlocal reads
            reads += 1
            if reads == at + 1:
                raise KeyboardInterrupt
            return receive(self, count)

        with monkeypatch.context() as patched:
            patched.setattr(RedisLink, "receive", failing)
            with pytest.raises(KeyboardInterrupt):
                store.get_many(KEYS)
        assert look(store, KEYS[::-1]) == len(KEYS)


def test_the_evictor_keeps_its_budget_over_all_nodes(
    redis_cluster: RedisCluster, store: ClusterStore
) -> None:
    link = ClusterLink(redis_cluster.url, 5)
    found = resident_in(link)
    assert {key for key, _ in found.pairs()} == set(KEYS)
    total = sum(found.sizes)
    evictor = Evictor(LruK(2, 1000), total // 2, unlink_in(link))
    evictor.touch(found)
    assert evictor.stats().bytes <= total // 2
    assert look(store) == evictor.stats().keys
    link.close()


def test_the_configuration_opens_a_cluster(redis_cluster: RedisCluster, tmp_path: Path) -> None:
    config = RedisConfig.model_validate({"url": redis_cluster.url})
    server = RedisServer.start(config, tmp_path)
    assert server is not None
    cache = open_cache(FeatureCacheConfig(timeout_s=PATIENT_S), server.url)
    assert isinstance(cache, FeatureCache)
    assert isinstance(cache.store, ClusterStore)
    for _ in range(2):
        values = cache.get_or_compute_many(KEYS, lambda at: [value_of(KEYS[i]) for i in at])
        assert values == [value_of(key) for key in KEYS]
    assert cache.stats.hits == len(KEYS)
    cache.close()
