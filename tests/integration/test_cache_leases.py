"""Leases in a real Redis: one fill among many processes, and heirs of the dead."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from redis import Redis

from eagleray.actors.cache import FeatureCache
from eagleray.actors.cache.frame import digest_key
from eagleray.actors.cache.leases import LEASE_PREFIX, RedisLeases
from eagleray.actors.cache.redis_store import RedisStore
from eagleray.platform.redis_server import RedisServer

NUM_PROCESSES = 32
# Forks processes that wait for a sign, ask for one key, and note each fill as a file.
ASKERS = """
import os, sys, time
from pathlib import Path
from eagleray.actors.cache import FeatureCache
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
        cache = FeatureCache(RedisStore(url, 5), RedisLeases(url, 5, lease_s=1.0))
        (folder / f"ready-{os.getpid()}").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
        assert cache.get_or_compute_many([b"key"], fill) == [b"value"]
        os._exit(0)
    children.append(child)
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


def ask(
    server: RedisServer, folder: Path, work_s: float, number: int = 1
) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-c", ASKERS, server.url, str(folder), str(work_s), str(number)]
    return subprocess.Popen(words, start_new_session=True)


def count(folder: Path, what: str) -> int:
    return len(list(folder.glob(f"{what}-*")))


def test_many_processes_that_miss_one_key_compute_it_once(
    redis_server: RedisServer, tmp_path: Path, until: Callable[..., None]
) -> None:
    # Longer than the lease: the one that computes must renew it.
    askers = ask(redis_server, tmp_path, 2.5, NUM_PROCESSES)
    try:
        until(lambda: count(tmp_path, "ready") == NUM_PROCESSES, "all processes", 60)
        (tmp_path / "go").touch()
        assert askers.wait(60) == 0
    finally:
        end(askers)
    assert count(tmp_path, "fill") == 1
    with Redis.from_url(redis_server.url) as client:
        assert client.keys(LEASE_PREFIX + b"*") == []


def test_when_the_one_that_computes_is_killed_another_does_it(
    redis_server: RedisServer, tmp_path: Path, until: Callable[..., None]
) -> None:
    first = ask(redis_server, tmp_path, 3600)
    (tmp_path / "go").touch()
    try:
        until(lambda: count(tmp_path, "fill") == 1, "the first fill", 60)
        second = ask(redis_server, tmp_path, 0)
        until(lambda: count(tmp_path, "ready") == 2, "the second process", 60)
        (computing,) = tmp_path.glob("fill-*")
        os.kill(int(computing.name.removeprefix("fill-")), signal.SIGKILL)
        assert second.wait(60) == 0
    finally:
        end(first)
    assert count(tmp_path, "fill") == 2


def end(askers: "subprocess.Popen[bytes]") -> None:
    """End the process and all it forked, if they have not ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(askers.pid, signal.SIGKILL)
    askers.wait()


def test_a_lease_is_given_back_only_by_who_holds_it(redis_server: RedisServer) -> None:
    key = digest_key(b"key")
    mine, other = (RedisLeases(redis_server.url, 5, lease_s=30) for _ in range(2))
    assert mine.take([key]) == [True]
    assert other.take([key]) == [False]
    with other.held([key]):
        pass
    assert other.take([key]) == [False]
    with mine.held([key]):
        pass
    assert other.take([key]) == [True]


def test_without_redis_everybody_computes_and_nobody_waits(tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/nobody.sock"
    cache = FeatureCache(RedisStore(url, 0.05), RedisLeases(url, 0.05, lease_s=60))
    started = time.monotonic()
    assert cache.get_or_compute_many([b"a", b"b"], lambda at: [b"v"] * len(at)) == [b"v", b"v"]
    assert time.monotonic() - started < 10
