"""A store that hangs costs one deadline, some threads, and no more."""

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from eagleray.actors.cache.bounded_store import MAX_LEFT_BEHIND, BoundedStore
from eagleray.actors.cache.breaker import FIRST_PAUSE_S, LONGEST_PAUSE_S
from eagleray.actors.cache.frame import digest_key
from eagleray.actors.cache.memory_store import MemoryStore
from eagleray.actors.cache.policies import Lru

Until = Callable[..., None]
KEYS = [digest_key(b"%d" % number) for number in range(3)]


class Disk:
    """Opens stores that hang, or fail, as long as it is told to."""

    def __init__(self) -> None:
        self.well = threading.Event()
        self.well.set()
        self.error: Exception | None = None
        self.opened: list[Store] = []

    def open(self) -> "Store":
        self.well.wait(60)
        if self.error:
            raise self.error
        self.opened.append(Store(self))
        return self.opened[-1]


class Store(MemoryStore):
    def __init__(self, disk: Disk) -> None:
        super().__init__(Lru(), 10_000)
        self.put_many([(key, key * 2) for key in KEYS[:2]])
        self._disk, self.calls, self.is_closed = disk, 0, False

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self.calls += 1
        self._disk.well.wait(60)
        if self._disk.error:
            raise self._disk.error
        return super().get_many(keys)

    def close(self) -> None:
        self.is_closed = True


class Rig:
    """A bounded store on a disk, and a clock for its breaker."""

    def __init__(self) -> None:
        self.disk, self.now = Disk(), 0.0

    def store(self, timeout_s: float = 30.0) -> BoundedStore:
        return BoundedStore(self.disk.open, timeout_s, "reader", lambda: self.now)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.disk.well.set()


FOUND = [KEYS[0] * 2, KEYS[1] * 2, None]
MISSED: list[bytes | None] = [None] * 3


def test_a_store_that_answers_is_asked_in_one_thread(rig: Rig) -> None:
    store = rig.store()
    for _ in range(3):
        assert store.get_many(KEYS) == FOUND
    assert store.put_many([(KEYS[2], b"x")]) == 1
    assert store.get_many(KEYS[2:]) == [b"x"]
    store.close()
    store.close()
    assert [opened.is_closed for opened in rig.disk.opened] == [True]
    assert store.get_many(KEYS) == MISSED


def test_a_late_call_is_a_miss_and_nobody_asks_until_the_pause_is_over(
    rig: Rig, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    store = rig.store(0.02)
    rig.disk.well.clear()
    for _ in range(5):
        assert store.get_many(KEYS) == MISSED
    assert (store.late, store.left_behind) == (1, 1)
    assert "hangs, reading without it" in caplog.text
    rig.now = FIRST_PAUSE_S
    assert store.get_many(KEYS) == MISSED  # Another thread, which hangs as it opens the store.
    assert (store.late, store.left_behind) == (2, 2)
    rig.disk.well.set()
    until(lambda: store.left_behind == 0, "the threads")
    assert store.get_many(KEYS) == MISSED
    rig.now = LONGEST_PAUSE_S
    store = _with_patience(store)
    assert store.get_many(KEYS) == FOUND
    # It came back: no third thread.
    assert len(rig.disk.opened) == 2
    store.close()


def test_no_more_than_four_threads_are_left_behind(rig: Rig, until: Until) -> None:
    store = rig.store(0.02)
    rig.disk.well.clear()
    for turn in range(3 * MAX_LEFT_BEHIND):
        rig.now = turn * LONGEST_PAUSE_S
        assert store.get_many(KEYS) == MISSED
    assert (store.late, store.left_behind) == (MAX_LEFT_BEHIND, MAX_LEFT_BEHIND)
    rig.disk.well.set()
    until(lambda: store.left_behind == 0, "the threads")
    rig.now += LONGEST_PAUSE_S
    store = _with_patience(store)
    assert store.get_many(KEYS) == FOUND
    store.close()
    until(lambda: all(opened.is_closed for opened in rig.disk.opened), "all stores closed")


def _with_patience(store: BoundedStore) -> BoundedStore:
    # From now on it answers, and a busy machine must not make it late.
    store._timeout_s = 30.0
    return store


def test_closing_waits_for_no_thread_that_hangs(rig: Rig, until: Until) -> None:
    store = rig.store(0.02)
    rig.disk.well.clear()
    assert store.get_many(KEYS) == MISSED
    store.close()
    assert not rig.disk.opened[0].is_closed
    rig.disk.well.set()
    until(lambda: rig.disk.opened[0].is_closed, "a store that is closed after all")


def test_a_store_that_hangs_from_the_start_is_a_miss(rig: Rig) -> None:
    rig.disk.well.clear()
    store = rig.store(0.02)
    assert (store.late, store.left_behind) == (1, 1)
    assert store.get_many(KEYS) == MISSED
    store.close()


def test_a_store_that_cannot_be_opened_says_so(rig: Rig) -> None:
    rig.disk.error = PermissionError("not yours")
    with pytest.raises(PermissionError, match="not yours"):
        rig.store()


def test_a_store_that_fails_is_opened_anew_after_the_pause(
    rig: Rig, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    store = rig.store()
    # An error that is a time-out of the store's own is no hang.
    rig.disk.error = TimeoutError("the store's own")
    assert store.get_many(KEYS) == MISSED
    assert (store.late, store.left_behind) == (0, 0)
    assert "the store's own" in caplog.text
    rig.disk.error = None
    assert store.get_many(KEYS) == MISSED
    rig.now = FIRST_PAUSE_S
    assert store.get_many(KEYS) == FOUND
    assert len(rig.disk.opened) == 2
    until(lambda: rig.disk.opened[0].is_closed, "the first one closed")
    store.close()
