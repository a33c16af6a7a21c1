"""Batches while Redis fails in every way: identical, and never late for long."""

import os
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest

from eagleray.actors.cache import open_cache
from eagleray.actors.data import Dataset
from eagleray.actors.data.loader import Loader
from eagleray.platform.config import FeatureCacheConfig
from eagleray.platform.redis_server import RedisServer


@pytest.mark.parametrize("fault", ["none", "stop", "kill", "flush"])
def test_batches_are_the_same_whatever_happens_to_redis(
    small_dataset: Dataset, redis_server: RedisServer, fault: str
) -> None:
    cache = open_cache(FeatureCacheConfig(timeout_s=0.05), redis_server.url)
    pid = redis_server.pid
    assert pid is not None
    with (
        Loader(small_dataset, "train", 5, 8, cache) as loader,
        Loader(small_dataset, "train", 5, 8, prefetch_batches=0) as plain,
    ):
        started = time.monotonic()
        for step in range(60):
            if step == 10 and fault != "none":
                if fault == "flush":
                    os.kill(pid, signal.SIGKILL)  # It comes back empty.
                else:
                    os.kill(pid, signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
            if step == 40 and fault == "stop":
                os.kill(pid, signal.SIGCONT)
            ours, theirs = loader.batch(step), plain.batch(step)
            assert np.array_equal(ours.ids, theirs.ids)
            assert np.array_equal(ours.tokens, theirs.tokens)
        assert time.monotonic() - started < 10
        if fault == "none":
            assert loader.stats().cache_hits > 0


def test_a_second_loader_hits_what_the_first_stored(
    small_dataset: Dataset, redis_server: RedisServer, until: Callable[..., None]
) -> None:
    for round_number in range(2):
        cache = open_cache(FeatureCacheConfig(timeout_s=5), redis_server.url)
        with Loader(small_dataset, "train", 0, 8, cache, prefetch_batches=0) as loader:
            for step in range(5):
                loader.batch(step)
            assert loader.stats().cache_misses == (0 if round_number else 1)
