"""Leases in a real Redis and a real cluster: one fill among many processes, heirs of the dead."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from redis import Redis
from tools.redis_cluster import RedisCluster

from eagleray.actors.cache import FeatureCache, open_cache
from eagleray.actors.cache.cluster_link import ClusterLink, is_cluster_url
from eagleray.actors.cache.cluster_store import ClusterStore
from eagleray.actors.cache.frame import digest_key
from eagleray.actors.cache.leases import LEASE_PREFIX, RedisLeases
from eagleray.actors.cache.redis_store import RedisStore
from eagleray.platform.config import FeatureCacheConfig

Until = Callable[..., None]
NUM_PROCESSES = 32
# Forks processes that wait for a sign, ask for one key, and note each fill as a file.
ASKERS = """
import os, sys, time
from pathlib import Path
from eagleray.actors.cache import FeatureCache
from eagleray.actors.cache.cluster_link import is_cluster_url
from eagleray.actors.cache.cluster_store import ClusterStore
from eagleray.actors.cache.leases import RedisLeases
from eagleray.actors.cache.redis_store import RedisStore
url, folder, work_s, number = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
def fill(_):
    (folder / f"fill-{os.getpid()}").touch()
    time.sleep(work_s)
    return [b"value"]
children = []
for _ in range(number):
    child = os.fork()
    if not child:
        store = (ClusterStore if is_cluster_url(url) else RedisStore)(url, 5)
        cache = FeatureCache(store, RedisLeases(url, 5, lease_s=1.0))
        (folder / f"ready-{os.getpid()}").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
        assert cache.get_or_compute_many([b"key"], fill) == [b"value"]
        os._exit(0)
    children.append(child)
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


@pytest.fixture(params=["redis_server", "redis_cluster"])
def url(request: pytest.FixtureRequest) -> str:
    """One Redis, or a cluster."""
    named: str = request.getfixturevalue(request.param).url
    return named


def ask(url: str, folder: Path, work_s: float, number: int = 1) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-c", ASKERS, url, str(folder), str(work_s), str(number)]
    return subprocess.Popen(words, start_new_session=True)


def count(folder: Path, what: str) -> int:
    return len(list(folder.glob(f"{what}-*")))


def store_in(url: str) -> RedisStore | ClusterStore:
    return (ClusterStore if is_cluster_url(url) else RedisStore)(url, 5)


def leases_in(url: str) -> int:
    """How many there are on all servers."""
    if not is_cluster_url(url):
        with Redis.from_url(url) as client:
            return len(client.keys(LEASE_PREFIX + b"*"))
    link = ClusterLink(url, 5)
    replies = [link.on_node(node, [("KEYS", LEASE_PREFIX + b"*")]) for node in link.nodes()]
    link.close()
    return sum(len(found) for reply in replies if reply for found in reply)


def test_many_processes_that_miss_one_key_compute_it_once(
    url: str, tmp_path: Path, until: Until
) -> None:
    # Longer than the lease: the one that computes must renew it.
    askers = ask(url, tmp_path, 2.5, NUM_PROCESSES)
    try:
        until(lambda: count(tmp_path, "ready") == NUM_PROCESSES, "all processes", 60)
        (tmp_path / "go").touch()
        until(lambda: leases_in(url) == 1, "the lease", 60)
        assert askers.wait(60) == 0
    finally:
        end(askers)
    assert count(tmp_path, "fill") == 1
    assert leases_in(url) == 0


def test_when_the_one_that_computes_is_killed_another_does_it(
    url: str, tmp_path: Path, until: Until
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    first, second = ask(url, one, 3600), ask(url, two, 0)
    try:
        (one / "go").touch()
        until(lambda: count(one, "fill") == 1, "the first fill", 60)
        until(lambda: count(two, "ready") == 1, "the second process", 60)
        (two / "go").touch()
        (computing,) = one.glob("fill-*")
        os.kill(int(computing.name.removeprefix("fill-")), signal.SIGKILL)
        assert second.wait(60) == 0
    finally:
        end(first)
        end(second)
    assert count(two, "fill") == 1


def end(askers: "subprocess.Popen[bytes]") -> None:
    """End the process and all it forked, if they have not ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(askers.pid, signal.SIGKILL)
    askers.wait()


def test_leases_are_given_back_only_by_who_holds_them(url: str) -> None:
    # As many as lie on every node of a cluster.
    keys = [digest_key(b"%d" % number) for number in range(40)]
    mine, other = (RedisLeases(url, 5, lease_s=30) for _ in range(2))
    assert mine.take(keys) == [True] * 40
    assert other.take(keys) == [False] * 40
    with other.held(keys):
        pass
    assert other.take(keys) == [False] * 40
    with mine.held(keys):
        pass
    assert leases_in(url) == 0
    assert other.take(keys) == [True] * 40
    for leases in (mine, other):
        leases.close()


def test_the_configuration_gives_dear_values_leases(
    url: str, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    cache = open_cache(FeatureCacheConfig(timeout_s=5), url, is_dear=True)
    assert cache is not None
    look, has_looked = cache.store.get_many, threading.Event()

    def looking(keys: Sequence[bytes]) -> list[bytes | None]:
        found = look(keys)
        has_looked.set()
        return found

    monkeypatch.setattr(cache.store, "get_many", looking)
    key, holder = digest_key(b"key"), RedisLeases(url, 5, lease_s=60)
    assert holder.take([key]) == [True]
    with ThreadPoolExecutor(1) as thread, contextlib.closing(cache), contextlib.closing(holder):
        waiting = thread.submit(
            cache.get_or_compute_many, [b"key"], lambda _: pytest.fail("computed as well")
        )
        until(has_looked.is_set, "a look-up that misses")
        with contextlib.closing(store_in(url)) as other:
            assert other.put_many([(key, b"value")]) == 1
        assert waiting.result(30) == [b"value"]


def test_a_node_that_is_lost_hands_out_its_leases_and_the_others_keep_theirs(
    fragile_redis_cluster: RedisCluster,
) -> None:
    named = (digest_key(b"%d" % number) for number in range(60))
    keys = [key for key in named if b"}" not in key]  # Those lie where their values do.
    victim = fragile_redis_cluster.owner(keys[0])
    lost = [fragile_redis_cluster.owner(key) == victim for key in keys]
    assert not all(lost)
    holder, other = (RedisLeases(fragile_redis_cluster.url, 0.2, lease_s=30) for _ in range(2))
    assert all(holder.take(keys))
    assert not any(other.take(keys))
    with fragile_redis_cluster.faulty(victim, "stop"):
        assert other.take(keys) == lost
    for leases in (holder, other):
        leases.close()


def test_without_redis_everybody_computes_and_nobody_waits(tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/nobody.sock"
    cache = FeatureCache(RedisStore(url, 0.05), RedisLeases(url, 0.05, lease_s=60))
    started = time.monotonic()
    assert cache.get_or_compute_many([b"a", b"b"], lambda at: [b"v"] * len(at)) == [b"v", b"v"]
    assert time.monotonic() - started < 10
