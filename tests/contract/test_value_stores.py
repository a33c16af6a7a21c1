"""Proves the laws of `ValueStore` for every store that needs no server, and of levels over them."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagleray.actors.cache import ValueStore
from eagleray.actors.cache.frame import digest_key
from eagleray.actors.cache.levels import Level, LeveledStore
from eagleray.actors.cache.memory_store import MemoryStore
from eagleray.actors.cache.policies import Lru
from eagleray.actors.cache.segment_folder import PREFIX
from eagleray.actors.cache.segments import SegmentStore


def in_memory() -> ValueStore:
    return MemoryStore(Lru(), 300_000)


def in_segments() -> SegmentStore:
    path = Path(f"/dev/shm/{PREFIX}test-{secrets.token_hex(8)}")
    return SegmentStore(path, 300_000, 65_536)


def in_levels() -> ValueStore:
    return LeveledStore([Level("l1", in_segments()), Level("l2", in_memory())])


MAKERS = {"memory": in_memory, "segments": in_segments, "levels": in_levels}
each_store = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
keys = st.integers(0, 12).map(lambda number: digest_key(b"%d" % number))
steps = st.lists(st.tuples(st.booleans(), st.lists(keys, max_size=5)), max_size=25)


def value_of(key: bytes) -> bytes:
    return key * (key[0] * 20)  # Up to 80 KB, which does not fit everywhere.


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not list(Path("/dev/shm").glob(f"{PREFIX}test-*"))


@each_store
@given(steps=steps)
def test_what_is_found_was_stored_under_its_key(
    make: Callable[[], ValueStore], steps: list[tuple[bool, list[bytes]]]
) -> None:
    store, stored = make(), set[bytes]()
    for is_put, asked in steps:
        if is_put:
            assert 0 <= store.put_many([(key, value_of(key)) for key in asked]) <= len(asked)
            stored |= set(asked)
            continue
        found = store.get_many(asked)
        assert len(found) == len(asked)
        for key, value in zip(asked, found, strict=True):
            assert value is None or (key in stored and value == value_of(key))
    store.close()


@each_store
def test_what_fits_is_found_and_counted(make: Callable[[], ValueStore]) -> None:
    store = make()
    items = [(digest_key(b"%d" % n), bytes([n]) * n * 100) for n in range(5)]
    assert store.put_many(items) == 5
    assert store.put_many(items) == 5
    assert store.get_many([key for key, _ in items]) == [value for _, value in items]
    assert store.put_many([]) == 0
    assert store.get_many([]) == []
    store.close()


@each_store
def test_what_can_never_fit_is_not_stored(make: Callable[[], ValueStore]) -> None:
    store = make()
    assert store.put_many([(digest_key(b"a"), bytes(400_000))]) == 0
    assert store.get_many([digest_key(b"a")]) == [None]
    store.close()


@each_store
def test_a_closed_store_has_nothing_and_may_be_closed_again(
    make: Callable[[], ValueStore],
) -> None:
    store = make()
    store.put_many([(digest_key(b"a"), b"x")])
    store.close()
    store.close()
    assert store.get_many([digest_key(b"a")]) == [None]
