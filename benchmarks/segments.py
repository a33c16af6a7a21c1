"""Latency of hits in the node-shared segments (L1), alone and with four readers.

    python -m benchmarks.segments [--quick] [--json FILE]

One key per look-up, from a warm store in /dev/shm; p50 and p99 in microseconds, over all readers.
The goal is the project's for a hit in the node: p99 below 200 microseconds. With more readers than
cores the tail is the scheduler's.
"""

import argparse
import contextlib
import multiprocessing as mp
import os
import random
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.record import Figure, run

from eagleray.actors.cache.frame import digest_key
from eagleray.actors.cache.segment_folder import PREFIX
from eagleray.actors.cache.segments import SegmentStore

_BUDGET = 256 << 20
_NUM_KEYS = 1000
GOAL_US = 200
SIZES = (4096, 65_536)


@contextlib.contextmanager
def warm_folder() -> Iterator[Path]:
    """A store's folder in /dev/shm with values of each of SIZES."""
    folder = Path(f"/dev/shm/{PREFIX}bench-{secrets.token_hex(8)}")
    with contextlib.closing(SegmentStore(folder, _BUDGET)) as store:
        for size in SIZES:
            store.put_many([(_key(size, n), os.urandom(size)) for n in range(_NUM_KEYS)])
        yield folder


def latencies_us(folder: Path, size: int, count: int, method: str) -> list[float]:
    """The time of each of so many hits, by `get_many` or `view_many`."""
    store, draw = SegmentStore(folder, _BUDGET), random.Random(os.getpid())
    look = store.view_many if method == "view" else store.get_many
    took = []
    for turn in range(count + count // 10):
        keys = [_key(size, draw.randrange(_NUM_KEYS))]
        started = time.perf_counter_ns()
        (value,) = look(keys)
        ended = time.perf_counter_ns()
        if value is None:
            raise RuntimeError("a value is gone: the store is smaller than what it should hold")
        if turn >= count // 10:
            took.append((ended - started) / 1000)
    store.close()
    return took


def percentiles(took_us: list[float]) -> tuple[float, float]:
    """p50 and p99."""
    ordered = sorted(took_us)
    return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]


def _key(size: int, number: int) -> bytes:
    return digest_key(b"%d %d" % (size, number))


def _measure(arguments: argparse.Namespace) -> list[Figure]:
    count = 2_000 if arguments.quick else 20_000
    figures = []
    with warm_folder() as folder, mp.get_context("spawn").Pool(4) as pool:
        for readers in (1, 4):
            for size in SIZES:
                for method in ("get", "view"):
                    tasks = [(folder, size, count, method)] * readers
                    parts = pool.starmap(latencies_us, tasks, chunksize=1)
                    name = f"{method} {size // 1024} KB, {readers} readers"
                    figures += _figures(name, [us for part in parts for us in part])
    return figures


def _figures(name: str, took_us: list[float]) -> list[Figure]:
    p50, p99 = percentiles(took_us)
    return [
        Figure(f"{name}: p50", p50, "us"),
        Figure(f"{name}: p99", p99, "us", goal=f"below {GOAL_US}", holds=p99 < GOAL_US),
    ]


if __name__ == "__main__":
    run(__doc__ or "", _measure)
