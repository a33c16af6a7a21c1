"""The cache in front of a store: hits, misses, duplicates, and the store in memory."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagleray.actors.cache import FeatureCache, open_cache
from eagleray.actors.cache.frame import digest_key
from eagleray.actors.cache.memory_store import MemoryStore
from eagleray.actors.cache.policies import LruK, NoEvict
from eagleray.actors.cache.redis_store import RedisStore
from eagleray.platform.config import FeatureCacheConfig


def in_memory(max_bytes: int = 1000) -> FeatureCache:
    return FeatureCache(MemoryStore(LruK(2, 100), max_bytes))


def value_of(key: bytes) -> bytes:
    return b"value of " + key


@given(
    requests=st.lists(st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=6), max_size=20),
    max_bytes=st.integers(0, 60),
)
def test_each_key_gets_its_value_whatever_is_evicted(
    requests: list[list[bytes]], max_bytes: int
) -> None:
    store = MemoryStore(LruK(2, 100), max_bytes)
    cache = FeatureCache(store)
    for keys in requests:
        values = cache.get_or_compute_many(
            keys, lambda missing, k=keys: [value_of(k[i]) for i in missing]
        )
        assert values == [value_of(key) for key in keys]
        assert store.total_bytes <= max_bytes
        assert store.total_bytes == sum(map(len, store._payloads.values()))


def test_only_what_is_missing_is_computed_once_and_in_order() -> None:
    cache = in_memory()
    asked: list[list[int]] = []

    def compute(missing: list[int]) -> list[bytes]:
        asked.append(missing)
        return [b"%d" % index for index in missing]

    cache.get_or_compute_many([b"x"], compute)
    values = cache.get_or_compute_many([b"b", b"x", b"a", b"b"], compute)
    assert asked == [[0], [0, 2]]
    assert values == [b"0", b"0", b"2", b"0"]
    assert (cache.stats.hits, cache.stats.misses, cache.stats.stored) == (1, 3, 3)


def test_no_keys_compute_nothing() -> None:
    assert in_memory().get_or_compute_many([], lambda missing: pytest.fail("asked")) == []


def test_an_error_while_computing_passes_through_and_stores_nothing() -> None:
    cache = in_memory()

    def fail(missing: list[int]) -> list[bytes]:
        raise LookupError(missing)

    with pytest.raises(LookupError):
        cache.get_or_compute_many([b"a"], fail)
    assert cache.get_or_compute_many([b"a"], lambda missing: [b"now"]) == [b"now"]


def test_a_wrong_number_of_values_is_refused() -> None:
    with pytest.raises(ValueError, match="1 values for 2 keys"):
        in_memory().get_or_compute_many([b"a", b"b"], lambda missing: [b"one"])


def test_a_value_above_the_limit_is_given_but_not_kept() -> None:
    cache = in_memory(10)
    for _ in range(2):
        assert cache.get_or_compute_many([b"a"], lambda missing: [bytes(11)]) == [bytes(11)]
    assert (cache.stats.misses, cache.stats.stored) == (2, 0)


def test_closing_the_memory_store_frees_it() -> None:
    store = MemoryStore(LruK(2, 100), 100)
    store.put_many([(digest_key(b"a"), b"x")])
    store.close()
    assert store.get_many([digest_key(b"a")]) == [None]


def test_the_configuration_decides_where_values_are_kept() -> None:
    config = FeatureCacheConfig()
    assert open_cache(FeatureCacheConfig(enabled=False), None) is None
    assert open_cache(FeatureCacheConfig(max_bytes=0), "unix:///nowhere") is None
    memory, redis = open_cache(config, None), open_cache(config, "unix:///nowhere")
    assert memory is not None
    assert redis is not None
    assert isinstance(memory.store, MemoryStore)
    assert isinstance(redis.store, RedisStore)


def test_what_the_policy_does_not_admit_is_given_and_not_kept() -> None:
    store = MemoryStore(NoEvict(20), 20)
    assert [store.put_many([(bytes([n]), bytes(10))]) for n in range(3)] == [1, 1, 0]
    assert store.get_many([b"\0", b"\1", b"\2"]) == [bytes(10), bytes(10), None]


@pytest.mark.parametrize("policy", ["lru-k", "lru", "s3-fifo", "w-tinylfu", "no-evict"])
def test_every_policy_can_be_chosen_and_keeps_the_budget(policy: str) -> None:
    config = FeatureCacheConfig.model_validate({"policy": policy, "max_bytes": 1000})
    cache = open_cache(config, None)
    assert cache is not None
    for number in range(300):
        (value,) = cache.get_or_compute_many([b"%d" % (number % 70)], lambda _: [bytes(100)])
        assert value == bytes(100)
    assert isinstance(cache.store, MemoryStore)
    assert cache.store.total_bytes <= 1000


@pytest.mark.parametrize("is_failing", [False, True])
def test_what_two_threads_miss_at_once_is_computed_by_one(
    until: Callable[..., None],
    is_failing: bool,
) -> None:
    cache = open_cache(FeatureCacheConfig(max_bytes=10_000), None)
    assert cache is not None
    begun, go_on = threading.Event(), threading.Event()
    computed: list[tuple[str, bytes]] = []

    def look(name: str, keys: list[bytes]) -> list[bytes]:
        def compute(missing: list[int]) -> list[bytes]:
            computed.extend((name, keys[i]) for i in missing)
            if name == "first":
                begun.set()
                assert go_on.wait(30)
                if is_failing:
                    raise OSError("first")
            return [keys[i] * 2 for i in missing]

        return cache.get_or_compute_many(keys, compute)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(look, "first", [b"a", b"b"])
        assert begun.wait(30)
        second = pool.submit(look, "second", [b"b", b"c"])
        until(lambda: ("second", b"c") in computed, "the second's own value")
        go_on.set()
        assert second.result() == [b"bb", b"cc"]
        if is_failing:
            with pytest.raises(OSError, match="first"):
                first.result()
        else:
            assert first.result() == [b"aa", b"bb"]
    assert (("second", b"b") in computed) == is_failing
    assert look("third", [b"a", b"b", b"c"]) == [b"aa", b"bb", b"cc"]
