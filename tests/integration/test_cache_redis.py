"""The feature cache on a real Redis: every fault is a miss, never a wrong value and never long."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from redis import Redis
from tools.stalling_proxy import StallingProxy

from eagleray.actors.cache import FeatureCache, TransformCache, open_cache
from eagleray.actors.cache.evictor import Evictor, resident_in, unlink_in
from eagleray.actors.cache.frame import OVERHEAD_BYTES, digest_key
from eagleray.actors.cache.framed_values import KEY_PREFIX
from eagleray.actors.cache.policies import LruK
from eagleray.actors.cache.redis_link import RedisLink
from eagleray.actors.cache.redis_store import RedisStore
from eagleray.platform.config import FeatureCacheConfig
from eagleray.platform.redis_server import RedisServer

Until = Callable[..., None]
KEYS = [b"key %d" % number for number in range(40)]


def value_of(key: bytes) -> bytes:
    return key * 20


def ask(cache: FeatureCache, keys: list[bytes]) -> list[bytes]:
    return cache.get_or_compute_many(keys, lambda missing: [value_of(keys[i]) for i in missing])


def right(cache: FeatureCache, keys: list[bytes] = KEYS) -> bool:
    return ask(cache, keys) == [value_of(key) for key in keys]


def stored_at(server: RedisServer, key: bytes) -> str:
    return (KEY_PREFIX + digest_key(key)).hex()


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator["Redis[bytes]"]:
    with Redis.from_url(redis_server.url) as client:
        yield client


def test_what_one_process_stores_another_finds(redis_server: RedisServer) -> None:
    first = FeatureCache(RedisStore(redis_server.url, 5))
    second = FeatureCache(RedisStore(redis_server.url, 5))
    assert right(first)
    assert right(second)
    assert (first.stats.hits, first.stats.stored) == (0, 40)
    assert (second.stats.hits, second.stats.misses) == (40, 0)


def test_a_damaged_value_is_a_miss_and_is_replaced(
    redis_server: RedisServer, client: "Redis[bytes]"
) -> None:
    store = RedisStore(redis_server.url, 5)
    cache = FeatureCache(store)
    assert right(cache)
    names = [KEY_PREFIX + digest_key(key) for key in KEYS[:3]]
    client.setrange(names[0], 30, b"\xff\xff")
    client.set(names[1], client.get(names[2]) or b"")
    client.set(names[2], b"")
    assert right(cache)
    assert store.counts.damaged == 3
    assert right(cache)
    assert store.counts.damaged == 3
    assert cache.stats.misses == 43


def test_a_value_of_another_type_is_a_miss(
    redis_server: RedisServer, client: "Redis[bytes]"
) -> None:
    client.lpush(KEY_PREFIX + digest_key(KEYS[0]), "a list")
    assert right(FeatureCache(RedisStore(redis_server.url, 5)))


def test_a_full_server_refuses_and_is_not_avoided_for_it(
    start_redis: Callable[..., RedisServer],
) -> None:
    store = RedisStore(start_redis(max_bytes=6_000_000).url, 5)
    cache = FeatureCache(store)
    for number in range(20):
        keys = [b"big %d %d" % (number, part) for part in range(4)]
        values = cache.get_or_compute_many(keys, lambda missing: [bytes(200_000) for _ in missing])
        assert values == [bytes(200_000)] * 4
    assert store.counts.refused > 0
    assert cache.stats.stored + store.counts.refused == 80
    assert store.breaker.times_opened == 0


@pytest.mark.parametrize("fault", ["stop", "kill"])
def test_a_server_that_stops_or_dies_costs_little_and_is_used_again(
    redis_server: RedisServer, until: Until, fault: str
) -> None:
    now = 0.0
    store = RedisStore(redis_server.url, 0.05, clock=lambda: now)
    cache = FeatureCache(store)
    right(cache)
    pid = redis_server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
    started = time.monotonic()
    assert all(right(cache) for _ in range(500))
    assert time.monotonic() - started < 5  # Three time-outs, then the breaker; the rest is slack.
    assert store.breaker.times_opened == 1
    assert store.counts.failed_calls == 3
    if fault == "stop":
        os.kill(pid, signal.SIGCONT)
    else:
        until(lambda: redis_server.pid not in (None, pid), "another server")

    def hits_again() -> bool:
        nonlocal now
        now += 30
        before = cache.stats.hits
        assert right(cache)
        return cache.stats.hits == before + 40

    until(hits_again, "hits")


def test_a_server_that_accepts_and_never_answers_costs_three_timeouts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        store = RedisStore(f"redis://127.0.0.1:{mute.getsockname()[1]}", 0.05, clock=lambda: 0.0)
        started = time.monotonic()
        assert all(right(FeatureCache(store)) for _ in range(500))
        assert time.monotonic() - started < 5
        assert store.counts.failed_calls == 3


def test_answers_that_come_late_open_the_breaker_too(redis_server: RedisServer) -> None:
    ticks = iter(range(0, 10**6, 10))
    store = RedisStore(redis_server.url, 5, clock=lambda: float(next(ticks)))
    cache = FeatureCache(store)
    assert right(cache)
    assert right(cache)
    assert store.breaker.times_opened > 0


def test_a_timeout_at_any_byte_of_an_answer_never_gives_the_next_one_its_bytes(
    redis_server: RedisServer, stalling_proxy: StallingProxy
) -> None:
    # Short ones, so that each byte can have its turn.
    keys = [b"a", b"b", b"c", b"d"]

    def is_right(cache: FeatureCache, keys: list[bytes]) -> bool:
        return cache.get_or_compute_many(keys, lambda at: [keys[i] * 2 for i in at]) == [
            key * 2 for key in keys
        ]

    assert is_right(FeatureCache(RedisStore(redis_server.url, 5)), keys)
    frame = f"${OVERHEAD_BYTES + 2}\r\n".encode() + bytes(OVERHEAD_BYTES + 2) + b"\r\n"
    for limit in range(len(b"*2\r\n" + 2 * frame)):
        store = RedisStore(stalling_proxy.url, 0.02, clock=lambda: 0.0)
        cache = FeatureCache(store)
        stalling_proxy.limit = limit
        assert is_right(cache, keys[:2])
        stalling_proxy.limit = None
        assert store.counts.failed_calls >= 1
        for asked in (keys[2:4], keys[:2], keys[1:3]):
            assert is_right(cache, asked)
        assert store.counts.damaged == 0
        store.close()


def test_an_interrupt_between_sending_and_reading_closes_the_connection(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = RedisLink(redis_server.url, 5)
    link.call("SET", "a", "1")
    link.call("SET", "b", "2")

    def interrupt(self: RedisLink) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RedisLink, "_reply", interrupt)
        with pytest.raises(KeyboardInterrupt):
            link.call("GET", "a")
    assert link.call("GET", "b") == b"2"
    link.close()


def test_the_evictor_keeps_redis_within_the_budget(
    redis_server: RedisServer, client: "Redis[bytes]"
) -> None:
    link = RedisLink(redis_server.url, 5)
    evictor = Evictor(LruK(2, 100), 30_000, unlink_in(link))
    cache = FeatureCache(RedisStore(redis_server.url, 5, evictor))
    hot = [b"hot"]
    for number in range(300):
        assert right(cache, [*hot, b"cold %d" % number])
    cache.close()
    sizes = [client.strlen(name) for name in client.scan_iter(match=KEY_PREFIX + b"*")]
    assert 0 < sum(sizes) <= 30_000
    assert evictor.stats().evicted > 0
    assert evictor.stats().bytes <= 30_000
    assert client.exists(KEY_PREFIX + digest_key(b"hot"))


def test_a_new_evictor_learns_what_lies_in_redis(redis_server: RedisServer) -> None:
    link = RedisLink(redis_server.url, 5)
    assert right(FeatureCache(RedisStore(redis_server.url, 5)))
    link.call("SET", "another's key", "stays")
    found = resident_in(link)
    assert {key for key, _ in found.pairs()} == {digest_key(key) for key in KEYS}
    evictor = Evictor(LruK(2, 100), 1000, unlink_in(link))
    evictor.touch(found)
    assert evictor.stats().bytes <= 1000
    assert link.call("GET", "another's key") == b"stays"
    link.close()


def test_another_process_finds_the_transforms_of_equal_samples(redis_server: RedisServer) -> None:
    cache = open_cache(FeatureCacheConfig(timeout_s=5), redis_server.url)
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    expected = TransformCache(cache, "halve", "1").map(rows, lambda row: row / 2)
    program = (
        "import sys, numpy as np\n"
        "from eagleray.actors.cache import TransformCache, open_cache\n"
        "from eagleray.platform.config import FeatureCacheConfig\n"
        "cache = open_cache(FeatureCacheConfig(timeout_s=5), sys.argv[1])\n"
        "rows = np.arange(15, dtype=np.float32).reshape(5, 3)\n"
        "values = TransformCache(cache, 'halve', '1').map(rows, lambda row: row * 100)\n"
        "print(cache.stats.hits, cache.stats.misses, [value.tolist() for value in values])\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, redis_server.url],
        capture_output=True, text=True, check=True, timeout=50,
    )  # fmt: skip
    last = [1200.0, 1300.0, 1400.0]
    assert ran.stdout == f"4 1 {[*(value.tolist() for value in expected), last]}\n"
