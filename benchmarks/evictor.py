"""Latency of reads from Redis while the evictor evicts.

    python -m benchmarks.evictor [--quick] [--json FILE]

One process reads values of 4 KB, one per call. Another one holds an evictor that is told of more
values than its budget holds and unlinks half of them, 16 at a time, while the first goes on. Beside
it stands the same reader while that process asks for as many keys at a time instead: what another
client costs that evicts nothing. Medians over rounds of p50 and p99; the goal is a p99 below twice
that.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from benchmarks.record import Figure, run

from eagleray.actors.cache.evictor import CHUNK_KEYS, Evictor, unlink_in
from eagleray.actors.cache.frame import digest_key
from eagleray.actors.cache.framed_values import ENTRY_OVERHEAD_BYTES, KEY_PREFIX
from eagleray.actors.cache.policies import make_policy
from eagleray.actors.cache.redis_link import RedisLink
from eagleray.actors.cache.redis_store import RedisStore
from eagleray.actors.cache.touches import TouchBatch
from eagleray.platform.config import RedisConfig
from eagleray.platform.redis_server import RedisServer

_VALUE_BYTES = 4096
_NUM_VALUES = 20_000
_NUM_READ = 100
_GOAL = 2
_SIZE = _VALUE_BYTES + ENTRY_OVERHEAD_BYTES


def measure(arguments: argparse.Namespace) -> list[Figure]:
    """All figures."""
    rounds = 3 if arguments.quick else 15
    with tempfile.TemporaryDirectory(prefix="bench-evictor-") as folder:
        server = RedisServer.start(RedisConfig(max_bytes=256_000_000), Path(folder))
        if server is None:
            raise RuntimeError("there is no Redis to be measured")
        try:
            found: dict[str, list[list[float]]] = {"ask": [], "evict": []}
            for _ in range(rounds):
                for what, took in found.items():
                    took.append(_round(server.url, what))
        finally:
            server.stop()
    return [_figure(f"p{place}", place, found["evict"], found["ask"]) for place in (50, 99)]


def _round(url: str, what: str) -> list[float]:
    """Microseconds of each read during what the other process does."""
    store, payload = RedisStore(url, 5), os.urandom(_VALUE_BYTES)
    keys = [digest_key(b"%d" % number) for number in range(_NUM_VALUES + _NUM_READ)]
    store.put_many([(key, payload) for key in keys])
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    other = context.Process(target=_other, args=(url, keys[:_NUM_VALUES], what, theirs))
    other.start()
    ours.recv()
    for key in keys[_NUM_VALUES:]:
        store.get_many([key])
    ours.send("go")
    took, turn = [], 0
    while not ours.poll():
        started = time.perf_counter_ns()
        (value,) = store.get_many([keys[_NUM_VALUES + turn % _NUM_READ]])
        took.append((time.perf_counter_ns() - started) / 1000)
        turn += 1
        if value is None:
            raise RuntimeError("a value that was not to be evicted is gone")
    other.join()
    store.close()
    return sorted(took)


def _other(url: str, keys: list[bytes], what: str, parent: Connection) -> None:
    link = RedisLink(url, 5)
    policy = make_policy("lru-k", _NUM_VALUES * _SIZE, 2)
    evictor = Evictor(policy, _NUM_VALUES * _SIZE // 2, unlink_in(link))
    parent.send("ready")
    parent.recv()
    if what == "evict":
        evictor.touch(TouchBatch(b"".join(keys), (_SIZE,) * len(keys)))
        if evictor.stats().evicted < _NUM_VALUES // 2:
            raise RuntimeError(f"the evictor evicted {evictor.stats().evicted} values only")
    else:
        evictor = Evictor(policy, 2 * _NUM_VALUES * _SIZE, unlink_in(link))
        evictor.touch(TouchBatch(b"".join(keys), (_SIZE,) * len(keys)))
        for start in range(0, len(keys) // 2, CHUNK_KEYS):
            names = [KEY_PREFIX + key for key in keys[start : start + CHUNK_KEYS]]
            link.call("EXISTS", *names)
    parent.send("done")


def _figure(name: str, place: int, ours: list[list[float]], theirs: list[list[float]]) -> Figure:
    def middle(rounds: list[list[float]]) -> float:
        return median(took[len(took) * place // 100] for took in rounds)

    ratio = middle(ours) / middle(theirs)
    is_goal = name == "p99"
    return Figure(
        f"read while the evictor evicts: {name}", middle(ours), "us", "while it asks",
        middle(theirs), f"below {_GOAL} x" if is_goal else "", ratio < _GOAL if is_goal else None,
    )  # fmt: skip


if __name__ == "__main__":
    run(__doc__ or "", measure)
