"""Proves of the levels: what goes where, that a bad level costs speed alone, and the figures."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from eagleray.actors.cache import feature_cache, levels, open_cache
from eagleray.actors.cache.frame import digest_key
from eagleray.actors.cache.levels import Level, LeveledStore, LevelStats
from eagleray.actors.cache.memory_store import MemoryStore
from eagleray.actors.cache.policies import Lru
from eagleray.actors.cache.segment_folder import PREFIX
from eagleray.actors.cache.segments import SegmentStore
from eagleray.platform.config import FeatureCacheConfig

Until = Callable[..., None]
KEYS = [digest_key(b"%d" % number) for number in range(4)]


def store(*keys: bytes) -> MemoryStore:
    made = MemoryStore(Lru(), 10_000)
    made.put_many([(key, key * 2) for key in keys])
    return made


def ticking() -> Callable[[], float]:
    ticks = iter(range(1000))
    return lambda: float(next(ticks))


def test_a_look_up_goes_down_and_what_is_found_comes_up() -> None:
    first, second, third = store(KEYS[0]), store(KEYS[1]), store(KEYS[2])
    leveled = LeveledStore(
        [Level(f"l{n}", s, clock=ticking()) for n, s in enumerate((first, second, third), 1)]
    )
    assert leveled.get_many(KEYS) == [key * 2 for key in KEYS[:3]] + [None]
    assert first.get_many(KEYS) == [key * 2 for key in KEYS[:3]] + [None]
    assert second.get_many(KEYS) == [None, KEYS[1] * 2, KEYS[2] * 2, None]
    assert leveled.stats() == (
        LevelStats("l1", 1, 3, 32, 1, 1.0),
        LevelStats("l2", 1, 2, 32, 1, 1.0),
        LevelStats("l3", 1, 1, 32, 1, 1.0),
    )
    leveled.get_many(KEYS[:3])
    assert leveled.stats()[1].lookups == 1  # The first level had it all.


def test_new_values_go_to_every_level() -> None:
    first, second = store(), MemoryStore(Lru(), 0)
    assert LeveledStore([Level("l1", first), Level("l2", second)]).put_many([(KEYS[0], b"x")]) == 1
    assert first.get_many(KEYS[:1]) == [b"x"]
    assert LeveledStore([]).put_many([(KEYS[0], b"x")]) == 0
    assert LeveledStore([]).get_many(KEYS) == [None] * 4


class Gated(MemoryStore):
    """Stores when it is let; the first value it is given is an error."""

    def __init__(self) -> None:
        super().__init__(Lru(), 10_000)
        self.gate = threading.Event()
        self.taken: list[bytes] = []

    def put_many(self, items: Sequence[tuple[bytes, bytes]]) -> int:
        self.gate.wait(30)
        self.taken += [key for key, _ in items]
        if len(self.taken) == 1:
            raise LookupError("the first one")
        return super().put_many(items)


def test_a_slow_level_is_written_by_a_thread_and_drops_what_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(levels, "_MAX_WAITING_BYTES", 20)
    slow, looked = Gated(), store()
    level = Level("l3", looked, lambda: slow)
    assert level.put_many([(key, bytes(8)) for key in KEYS]) == 2
    assert level.stats().dropped == 2
    slow.gate.set()
    level.close()
    assert slow.taken == KEYS[:2]


def test_a_thread_that_hangs_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(levels, "_END_S", 0.01)
    slow = Gated()
    level = Level("l3", store(), lambda: slow)
    level.put_many([(KEYS[0], b"x")])
    level.close()
    assert "were not written in time" in caplog.text
    slow.gate.set()


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in the place of /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(feature_cache, "SHARED_MEMORY", folder)
    yield folder
    assert not list(folder.iterdir())


def test_the_configuration_opens_the_levels(
    shared_memory: Path, tmp_path: Path, until: Until
) -> None:
    config = FeatureCacheConfig.model_validate(
        {
            "shared_bytes": "8MB",
            "disk_bytes": "8MB",
            "disk_path": str(tmp_path / "disk"),
            "max_bytes": 0,
        }
    )
    one = open_cache(config, "unix:///nowhere", scope="s")
    other = open_cache(config, "unix:///nowhere", scope="s")
    assert one is not None
    assert other is not None
    assert one.get_or_compute_many([b"k"], lambda _: [b"v"]) == [b"v"]
    assert other.get_or_compute_many([b"k"], lambda _: pytest.fail("computed")) == [b"v"]
    assert [level.name for level in other.level_stats()] == ["l1", "l3"]
    assert other.level_stats()[0].hits == 1
    one.close()
    other.close()
    assert not list(shared_memory.iterdir())
    again = open_cache(config, None, scope="s", is_dear=True)
    assert again is not None
    assert again.get_or_compute_many([b"k"], lambda _: pytest.fail("computed")) == [b"v"]
    assert [level.hits for level in again.level_stats()] == [0, 1]
    elsewhere = open_cache(config, None, scope="another")
    assert elsewhere is not None
    assert elsewhere.get_or_compute_many([b"k"], lambda _: [b"w"]) == [b"w"]
    elsewhere.close()
    again.close()


def test_redis_that_is_away_is_a_level_that_misses(shared_memory: Path) -> None:
    config = FeatureCacheConfig.model_validate({"shared_bytes": "8MB"})
    cache = open_cache(config, "unix:///nowhere", is_dear=True)
    assert cache is not None
    for _ in range(2):
        assert cache.get_or_compute_many([b"k"], lambda _: [b"v"]) == [b"v"]
    assert [(level.name, level.hits) for level in cache.level_stats()] == [("l1", 1), ("l2", 0)]
    cache.close()


def test_levels_that_cannot_be_opened_are_gone_without(
    shared_memory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    config = FeatureCacheConfig.model_validate(
        {"disk_bytes": "8MB", "disk_path": str(tmp_path / "file"), "max_bytes": 1000}
    )
    cache = open_cache(config, None)
    assert cache is not None
    assert isinstance(cache.store, MemoryStore)
    assert cache.level_stats() == ()
    assert "goes without a disk" in caplog.text


def test_what_a_killed_process_left_is_removed_when_the_next_opens(shared_memory: Path) -> None:
    left = SegmentStore(shared_memory / f"{PREFIX}left", 8_000_000, is_kept=True)
    left.close()
    config = FeatureCacheConfig.model_validate({"shared_bytes": "8MB"})
    cache = open_cache(config, None, scope="s")
    assert cache is not None
    assert len(list(shared_memory.iterdir())) == 1
    cache.close()
