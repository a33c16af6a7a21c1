"""A disk that hangs: a segment becomes a pipe without a writer, and opening it hangs in the kernel.

As with a disk, nothing but the other end can end the call.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from eagleray.actors.cache import FeatureCache, feature_cache, levels, open_cache
from eagleray.actors.cache.bounded_store import BoundedStore
from eagleray.actors.cache.levels import LeveledStore
from eagleray.platform.config import FeatureCacheConfig

Until = Callable[..., None]
KEYS = [b"%d" % number for number in range(20)]


def value_of(key: bytes) -> bytes:
    return key * 500


def settings(folder: Path) -> FeatureCacheConfig:
    """A disk alone: no memory, no Redis."""
    return FeatureCacheConfig.model_validate(
        {"disk_bytes": "8MB", "disk_path": str(folder), "max_bytes": 0}
    )


def opened(folder: Path) -> FeatureCache:
    cache = open_cache(settings(folder), None, clock=lambda: 0.0)
    assert cache is not None
    return cache


def reader_of(cache: FeatureCache) -> BoundedStore:
    assert isinstance(cache.store, LeveledStore)
    store = cache.store.levels[-1].store
    assert isinstance(store, BoundedStore)
    return store


def is_right(cache: FeatureCache) -> bool:
    values = cache.get_or_compute_many(KEYS, lambda at: [value_of(KEYS[i]) for i in at])
    return values == [value_of(key) for key in KEYS]


@pytest.fixture
def hanging(tmp_path: Path) -> Path:
    """The pipe, in the place of the segment that holds all values of a cache in `tmp_path`."""
    cache = opened(tmp_path)
    assert is_right(cache)
    cache.close()
    (segment,) = tmp_path.glob("*/segment-*")
    segment.unlink()
    os.mkfifo(segment, 0o600)
    return segment


def release(pipe: Path) -> None:
    """Be the other end: whoever hangs goes on, and finds no value."""
    os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))


def test_look_ups_on_a_hanging_disk_are_misses_and_cost_one_deadline(
    hanging: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.setattr(feature_cache, "DISK_TIMEOUT_S", 0.1)
    monkeypatch.setattr(levels, "_END_S", 0.1)
    cache = opened(tmp_path)
    reader = reader_of(cache)
    for _ in range(20):
        assert is_right(cache)
    # Twenty look-ups: the first one waits, the breaker keeps the others from it.
    assert (reader.late, reader.left_behind) == (1, 1)
    assert cache.level_stats()[-1].late == 1
    assert cache.stats.hits == 0
    # The writer hangs as well, in the same segment; neither is waited for.
    cache.close()
    assert reader.left_behind == 1
    until(lambda: release(hanging) or reader.left_behind == 0, "the thread back")


READER = """
import sys
from eagleray.actors.cache import levels, open_cache
from eagleray.platform.config import FeatureCacheConfig
levels._END_S = 0.1
cache = open_cache(FeatureCacheConfig.model_validate_json(sys.argv[1]), None)
assert cache.get_or_compute_many([b"3"], lambda _: [b"computed"]) == [b"computed"]
assert cache.level_stats()[-1].late == 1
cache.close()
print("closed")
"""


def test_a_process_ends_though_its_threads_hang(hanging: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-c", READER, settings(tmp_path).model_dump_json()]
    done = subprocess.run(words, text=True, capture_output=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
