"""How fast the feature cache answers, and how much less a trainer waits with it and read-ahead.

    python -m benchmarks.cache [--quick] [--json FILE]

Hits, in microseconds; p50 and p99 of each round, medians over the rounds:
    L1  values in /dev/shm, one process. p99 below 200 us must hold, or the command fails.
    L2  values in a Redis Cluster of three nodes on loopback, by the product's client and, in turns,
        by redis-py's, which checks neither key nor checksum. p50 below 200 us at 4 KB must hold.
        p99 is the scheduler's where cores are contended: it must be below 200 us only if, between
        these calls, 2,000 round trips over a socket pair to another process have a p99 below 60
        us. Otherwise the figure says "contended". How many calls were below 200 us is told anyway.
Waiting: see benchmarks/waiting.py. Four minutes in all; with --quick one.
"""

import argparse
import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import Figure, run
from benchmarks.segments import GOAL_US, SIZES, latencies_us, percentiles, warm_folder
from benchmarks.waiting import waiting
from redis.cluster import RedisCluster as RedisClient
from tools.redis_cluster import HOST, RedisCluster

from eagleray.actors.cache.cluster_store import ClusterStore
from eagleray.actors.cache.frame import digest_key
from eagleray.actors.cache.framed_values import KEY_PREFIX

_NUM_KEYS = 1024
_BATCH_KEYS = 64
_TURN_CALLS = 50
_CALM_US = 60
_NUM_PINGS = 2000
# The product gives up after 50 ms; here a late answer is one to be counted.
_TIMEOUT_S = 5.0

_ECHO = """
import socket, sys
with socket.socket(fileno=int(sys.argv[1])) as end:
    while data := end.recv(64):
        end.sendall(data)
"""

Look = Callable[[Sequence[bytes]], Sequence[Any]]


def measure(arguments: argparse.Namespace) -> list[Figure]:
    """All figures."""
    rounds, count = (3, 1000) if arguments.quick else (7, 4000)
    figures = [*_l1(rounds, count)]
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as folder:
        cluster = RedisCluster(has_replicas=False)
        try:
            cluster.join()
            figures += _l2(cluster, rounds, count)
        finally:
            cluster.stop()
        figures += waiting(Path(folder), arguments.quick)
    return figures


def _l1(rounds: int, count: int) -> Iterator[Figure]:
    with warm_folder() as folder:
        for size in SIZES:
            took_us = [latencies_us(folder, size, count, "get") for _ in range(rounds)]
            p50, p99 = _medians(took_us)
            name = f"L1 hit, {size // 1024} KB"
            yield Figure(f"{name}: p50", p50, "us")
            yield Figure(
                f"{name}: p99", p99, "us", goal=f"below {GOAL_US}", holds=p99 < GOAL_US,
                must_hold=True,
            )  # fmt: skip


def _l2(cluster: RedisCluster, rounds: int, count: int) -> list[Figure]:
    pings_us: list[list[float]] = []
    took_us: dict[tuple[str, str], list[list[float]]] = {}
    with (
        contextlib.closing(ClusterStore(cluster.url, _TIMEOUT_S)) as store,
        contextlib.closing(RedisClient(host=HOST, port=cluster.ports[0])) as client,
        contextlib.closing(_PingPong()) as ping,
    ):
        keys = {
            size: [digest_key(b"%d %d" % (size, n)) for n in range(_NUM_KEYS)] for size in SIZES
        }
        for size in SIZES:
            stored = sum(store.put_many([(key, os.urandom(size))]) for key in keys[size])
            assert stored == _NUM_KEYS, f"{stored} of {_NUM_KEYS} values stored"

        def pipelined(names: Sequence[bytes]) -> Sequence[Any]:
            with client.pipeline() as pipeline:
                for name in names:
                    pipeline.get(name)
                return pipeline.execute()

        singles: dict[str, Look] = {
            "ours": store.get_many,
            "RedisCluster.get": lambda names: [client.get(names[0])],
        }
        batches: dict[str, Look] = {
            "ours": store.get_many,
            "RedisCluster.pipeline": pipelined,
            "RedisCluster.mget_nonatomic": client.mget_nonatomic,
        }
        draw = random.Random(0)
        cases = [(f"L2 hit, {size // 1024} KB", singles, size, 1, count) for size in SIZES]
        cases += [("L2 hits, 64 x 4 KB, per value", batches, SIZES[0], _BATCH_KEYS, count // 10)]
        for _ in range(rounds):
            for name, looks, size, num_keys, calls in cases:
                pinged_us, found = _in_turns(draw, ping, looks, keys[size], num_keys, calls)
                pings_us.append(pinged_us)
                for peer, us in found.items():
                    took_us.setdefault((name, peer), []).append(us)
    return [*_l2_figures(pings_us, took_us)]


def _in_turns(
    draw: random.Random,
    ping: "_PingPong",
    looks: dict[str, Look],
    keys: list[bytes],
    num_keys: int,
    calls: int,
) -> tuple[list[float], dict[str, list[float]]]:
    """The time of round trips, and per value of so many calls of each client; all must be hits."""
    pings_us: list[float] = []
    took_us: dict[str, list[float]] = {name: [] for name in looks}
    turns = calls // _TURN_CALLS
    for _ in range(turns):
        pings_us += ping.took_us(_NUM_PINGS // turns)
        for name, look in looks.items():
            is_ours = name == "ours"
            for _ in range(_TURN_CALLS):
                chosen = draw.sample(keys, num_keys)
                names = chosen if is_ours else [KEY_PREFIX + key for key in chosen]
                started = time.perf_counter_ns()
                values = look(names)
                ended = time.perf_counter_ns()
                if None in values:
                    raise RuntimeError(f"{name} did not find a value that was stored")
                took_us[name].append((ended - started) / 1000 / num_keys)
    return pings_us, took_us


class _PingPong:
    """Another process that sends back what it is sent."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-c", _ECHO, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )
        self.took_us(_NUM_PINGS // 10)

    def took_us(self, count: int) -> list[float]:
        """The time of each of so many round trips."""
        took_us = []
        for _ in range(count):
            started = time.perf_counter_ns()
            self._socket.sendall(b"ping")
            self._socket.recv(64)
            took_us.append((time.perf_counter_ns() - started) / 1000)
        return took_us

    def close(self) -> None:
        """End it."""
        self._socket.close()
        self._process.wait()


def _l2_figures(
    pings_us: list[list[float]], took_us: dict[tuple[str, str], list[list[float]]]
) -> Iterator[Figure]:
    ping_p50, ping_p99 = _medians(pings_us)
    is_calm = ping_p99 < _CALM_US
    yield Figure("ping-pong: p50", ping_p50, "us")
    yield Figure("ping-pong: p99", ping_p99, "us", goal=f"below {_CALM_US}: calm", holds=is_calm)
    for (name, peer), theirs_us in took_us.items():
        if peer == "ours":
            continue
        ours_us = took_us[name, "ours"]
        (p50, p99), (their_p50, their_p99) = _medians(ours_us), _medians(theirs_us)
        is_single, is_small = "64 x" not in name, "hit, 4 KB" in name
        yield Figure(
            f"{name}: p50", p50, "us", peer, their_p50,
            *((f"below {GOAL_US}", p50 < GOAL_US, True) if is_small else ()),
        )  # fmt: skip
        goal: tuple[str, bool | None, bool] = ("", None, False)
        if is_single and is_calm:
            goal = (f"below {GOAL_US}", p99 < GOAL_US, True)
        elif is_single:
            goal = ("contended", None, False)
        yield Figure(f"{name}: p99", p99, "us", peer, their_p99, *goal)
        if is_single:
            shares = [_share_below(us, GOAL_US) for us in (ours_us, theirs_us)]
            yield Figure(f"{name}: below {GOAL_US} us", shares[0], "% of calls", peer, shares[1])


def _medians(rounds_us: list[list[float]]) -> tuple[float, float]:
    """p50 and p99 of each round; of these the medians."""
    p50s, p99s = zip(*(percentiles(us) for us in rounds_us), strict=True)
    return median(p50s), median(p99s)


def _share_below(rounds_us: list[list[float]], limit_us: float) -> float:
    return 100 * median(sum(one < limit_us for one in us) / len(us) for us in rounds_us)


if __name__ == "__main__":
    run(__doc__ or "", measure)
