"""Proves of the segment store in one process: right values or none, and never above the budget.

Real files in /dev/shm; a full file system is a limit on file sizes or a refused allocation.
"""

import errno
import os
import pickle
import random
import resource
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagleray.actors.cache.frame import digest_key
from eagleray.actors.cache.segment_folder import PREFIX, SegmentFolderError, sweep
from eagleray.actors.cache.segment_index import SegmentIndex
from eagleray.actors.cache.segment_plan import WorkingSetError
from eagleray.actors.cache.segments import SegmentStore

SEGMENT = 262_144
# Fifteen to a segment, and few enough for the index.
Opener = Callable[..., SegmentStore]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A name in /dev/shm that is free now and afterwards."""
    path = Path(f"/dev/shm/{PREFIX}test-{secrets.token_hex(8)}")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def opened(folder: Path) -> Iterator[Opener]:
    stores: list[SegmentStore] = []

    def open_store(segments: int = 4, path: Path = folder, **settings: object) -> SegmentStore:
        # The index takes 1/128 of the budget, and a page.
        size = int((segments + 0.2) * SEGMENT * 128 / 127) + 4096
        stores.append(SegmentStore(path, size, SEGMENT, **settings))  # type: ignore[arg-type]
        assert stores[-1].geometry.num_segments == segments
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


def key_of(number: int) -> bytes:
    return digest_key(b"%d" % number)


def value_of(number: int, size: int = 17_000) -> bytes:
    return random.Random(number).randbytes(size)


def taken(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_values_are_found_by_another_store_until_the_last_one_closes(
    folder: Path, opened: Opener
) -> None:
    one, other = opened(), opened()
    assert one.put_many([(key_of(n), value_of(n)) for n in range(5)]) == 5
    one.close()
    assert other.get_many([key_of(3), key_of(9)]) == [value_of(3), None]
    assert folder.stat().st_mode & 0o777 == 0o700
    other.close()
    other.close()
    assert other.get_many([key_of(3)]) == [None]
    assert other.put_many([(key_of(3), b"x")]) == 0
    assert not folder.exists()


def test_a_kept_folder_is_found_again(folder: Path, opened: Opener) -> None:
    opened(is_kept=True).put_many([(key_of(1), value_of(1))])
    opened(is_kept=True).close()
    assert opened(is_kept=True).get_many([key_of(1)]) == [value_of(1)]


def test_the_oldest_go_first_and_the_files_never_exceed_the_budget(
    folder: Path, opened: Opener
) -> None:
    store = opened()
    for number in range(300):
        assert store.put_many([(key_of(number), value_of(number))]) == 1
        assert taken(folder) == store.total_bytes <= store.geometry.max_bytes
    found = [value is not None for value in store.get_many([key_of(n) for n in range(300)])]
    assert found == sorted(found)
    assert 45 <= sum(found) <= 60
    assert store.counts.evicted == store.counts.copied + 300 // 15 - 4


def test_what_is_hit_gets_a_second_chance(opened: Opener) -> None:
    store = opened()
    for number in range(300):
        store.put_many([(key_of(number), value_of(number))])
        assert store.get_many([key_of(0)]) == [value_of(0)]
    assert store.counts.copied > 1
    for number in range(300, 450):
        store.put_many([(key_of(number), value_of(number))])
    assert store.get_many([key_of(0)]) == [None]


def test_if_all_is_hit_eviction_still_makes_room(opened: Opener) -> None:
    store = opened()
    for number in range(200):
        assert store.put_many([(key_of(number), value_of(number))]) == 1
        store.get_many([key_of(n) for n in range(number + 1)])
    assert store.counts.evicted > 10


def test_what_is_copied_forward_leaves_room_for_what_is_stored(
    folder: Path, opened: Opener
) -> None:
    store = opened(2)
    sizes = (SEGMENT // 3, SEGMENT // 3, SEGMENT * 3 // 4)
    for number, size in enumerate(sizes):
        store.put_many([(key_of(number), value_of(number, size))])
    store.get_many([key_of(0), key_of(1)])
    assert store.put_many([(key_of(3), value_of(3, sizes[2]))]) == 1
    assert store.get_many([key_of(3)]) == [value_of(3, sizes[2])]
    assert {path.stat().st_size for path in folder.glob("segment-*")} == {SEGMENT}


def test_a_view_is_read_only_and_keeps_its_bytes_after_eviction(opened: Opener) -> None:
    store = opened()
    store.put_many([(key_of(0), value_of(0))])
    (view,) = store.view_many([key_of(0)])
    assert view is not None
    assert view.readonly
    for number in range(1, 200):
        store.put_many([(key_of(number), value_of(number))])
    assert store.view_many([key_of(0)]) == [None]
    assert view == value_of(0)


def test_segments_that_were_removed_are_let_go_of(folder: Path, opened: Opener) -> None:
    reader, writer = opened(), opened()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(300):
        writer.put_many([(key_of(number), value_of(number))])
        reader.get_many([key_of(number)])
        reader.view_many([key_of(number)])
    # Four segments at most, each open once and mapped once.
    assert len(os.listdir("/proc/self/fd")) - before <= 8
    with open("/proc/self/maps") as maps:
        assert not [line for line in maps if folder.name in line and "(deleted)" in line]


@pytest.mark.parametrize("part", ["key", "checksum", "payload"])
def test_a_flipped_byte_is_a_miss_and_is_replaced(folder: Path, opened: Opener, part: str) -> None:
    store = opened()
    store.put_many([(key_of(1), value_of(1)), (key_of(2), value_of(2))])
    place = SegmentIndex(folder / "index").find(key_of(1))
    assert place is not None
    with (folder / f"segment-{place.segment:010d}").open("r+b") as file:
        at = place.offset + {"key": 5, "checksum": 21, "payload": 500}[part]
        byte = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 16]), at)
    assert store.get_many([key_of(1), key_of(2)]) == [None, value_of(2)]
    assert store.view_many([key_of(1)]) == [None]
    assert store.counts.rejected == 2
    assert store.put_many([(key_of(1), value_of(1))]) == 1
    assert store.get_many([key_of(1)]) == [value_of(1)]


def test_a_damaged_index_gives_misses_and_no_wrong_value(folder: Path, opened: Opener) -> None:
    store = opened()
    numbers = range(40)
    store.put_many([(key_of(n), value_of(n)) for n in numbers])
    draw = random.Random(3)
    size = (folder / "index").stat().st_size
    with (folder / "index").open("r+b") as file:
        for _ in range(400):
            os.pwrite(file.fileno(), draw.randbytes(3), draw.randrange(4096, size - 3))
    for number, value in zip(numbers, store.get_many([key_of(n) for n in numbers]), strict=True):
        assert value in (None, value_of(number))
    assert store.put_many([(key_of(n), value_of(n)) for n in numbers]) == 40


def test_a_segment_that_is_cut_short_or_gone_is_a_miss(folder: Path, opened: Opener) -> None:
    store = opened()
    store.put_many([(key_of(1), value_of(1))])
    (segment,) = folder.glob("segment-*")
    os.truncate(segment, 100)
    assert store.get_many([key_of(1)]) == [None]
    assert store.view_many([key_of(1)]) == [None]
    segment.unlink()
    assert opened().get_many([key_of(1)]) == [None]
    store.put_many([(key_of(1), value_of(1))])  # The active segment is gone: this one finds out.
    assert store.put_many([(key_of(1), value_of(1))]) == 1
    assert store.get_many([key_of(1)]) == [value_of(1)]


def test_pinned_segments_stay_and_nothing_is_stored_if_all_are(opened: Opener) -> None:
    store, other = opened(), opened()
    kept = [key_of(n) for n in range(60)]
    store.put_many([(key_of(n), value_of(n)) for n in range(60)])
    with store.pin([*kept, key_of(99)]) as pins:
        assert pins.keys == frozenset(kept)
        assert other.put_many([(key_of(n), value_of(n)) for n in range(100, 200)]) == 0
        assert other.counts.refused == 100
        assert None not in store.get_many(kept)
    pins.release()
    assert other.put_many([(key_of(n), value_of(n)) for n in range(100, 200)]) == 100


def test_a_working_set_above_the_budget_is_refused_with_what_it_needs(
    opened: Opener, folder: Path
) -> None:
    store = opened()
    store.check_fits([17_000] * 40)
    with pytest.raises(WorkingSetError, match=r"data\.cache\.shared_bytes") as caught:
        store.check_fits([17_000] * 400)
    error = caught.value
    assert error.max_bytes == store.geometry.max_bytes < error.needed_bytes < 10_000_000
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    enough = SegmentStore(folder.with_name(folder.name + "-2"), error.needed_bytes, SEGMENT)
    enough.check_fits([17_000] * 400)
    enough.close()
    with pytest.raises(WorkingSetError):
        store.check_fits([10**7])


def test_values_that_fit_in_no_segment_are_refused_alone(opened: Opener) -> None:
    store = opened()
    assert store.put_many([(key_of(1), bytes(SEGMENT)), (key_of(2), b"")]) == 1
    assert store.counts.refused == 1
    assert store.get_many([key_of(1), key_of(2)]) == [None, b""]


def test_a_budget_without_room_for_a_segment_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="max_bytes=10000 must hold the index"):
        SegmentStore(folder, 10_000, SEGMENT)
    assert not folder.exists()


def test_foreign_files_are_never_read_counted_or_removed(folder: Path, opened: Opener) -> None:
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "segment-0000000002").write_bytes(b"mine" * 100)
    store = opened()
    for number in range(300):
        store.put_many([(key_of(number), value_of(number))])
    store.close()
    names = {path.name for path in folder.iterdir()}
    assert names == {"notes.txt", "segment-0000000002"}


def test_a_folder_with_an_index_that_is_not_ours_is_refused(folder: Path, opened: Opener) -> None:
    folder.mkdir()
    (folder / "index").write_text("mine")
    with pytest.raises(SegmentFolderError, match="that is not ours"):
        opened()
    assert (folder / "index").read_text() == "mine"


def test_another_format_or_size_is_replaced_once_nobody_uses_it(
    folder: Path, opened: Opener
) -> None:
    store = opened(is_kept=True)
    store.put_many([(key_of(1), value_of(1))])
    joined = SegmentStore(folder, store.geometry.max_bytes * 2, SEGMENT, is_kept=True)
    assert joined.geometry == store.geometry
    joined.close()
    store.close()
    with (folder / "index").open("r+b") as file:
        file.seek(7)
        file.write(b"\x09")
    again = opened(is_kept=True)
    assert again.get_many([key_of(1)]) == [None]
    assert not list(folder.glob("segment-*"))
    assert opened(8, path=folder.with_name(folder.name + "-2")).total_bytes > 0


def test_a_folder_of_another_user_or_a_link_is_refused(
    folder: Path, opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.symlink_to(tmp_path)
    with pytest.raises(SegmentFolderError, match="is no folder of user"):
        opened()
    folder.unlink()
    folder.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    with pytest.raises(SegmentFolderError, match="is no folder of user 4242"):
        opened()


def test_a_full_file_system_stores_nothing_and_is_counted(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    store.put_many([(key_of(1), value_of(1))])

    def refuse(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refuse)
        assert store.put_many([(key_of(n), value_of(n)) for n in range(2, 40)]) == 14
        assert (store.counts.refused, store.counts.failed) == (24, 24)
        assert store.get_many([key_of(1)]) == [value_of(1)]
        with pytest.raises(SegmentFolderError, match="No space left"):
            opened(path=store._folder.path.with_name(f"{PREFIX}test-full"))
    assert not Path(f"/dev/shm/{PREFIX}test-full").exists()
    assert store.put_many([(key_of(n), value_of(n)) for n in range(40, 60)]) == 20


def test_a_limit_on_file_sizes_stores_nothing(opened: Opener) -> None:
    store = opened()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SEGMENT // 2, limits[1]))
    try:
        assert store.put_many([(key_of(1), value_of(1))]) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.counts.refused == 1
    assert store.put_many([(key_of(1), value_of(1))]) == 1


def test_a_writer_that_does_not_end_is_not_waited_for(folder: Path, opened: Opener) -> None:
    one, other = opened(), opened(lock_wait_s=0.01)
    with one._folder.writing() as is_writing:
        assert is_writing
        assert other.put_many([(key_of(1), value_of(1))]) == 0
    assert other.counts.busy == 1
    assert other.put_many([(key_of(1), value_of(1))]) == 1


def test_leftovers_are_swept_and_what_is_in_use_is_not(tmp_path: Path, opened: Opener) -> None:
    used = opened(path=tmp_path / f"{PREFIX}used")
    left = opened(path=tmp_path / f"{PREFIX}left", is_kept=True)
    left.put_many([(key_of(1), value_of(1))])
    left.close()
    # Whoever made an index anew was killed before it was whole.
    (tmp_path / f"{PREFIX}left" / "index.new").write_bytes(b"half of")
    (tmp_path / f"{PREFIX}foreign").mkdir()
    assert sweep(tmp_path) == 1
    assert {path.name for path in tmp_path.iterdir()} == {f"{PREFIX}used", f"{PREFIX}foreign"}
    assert used.put_many([(key_of(1), value_of(1))]) == 1


numbers = st.integers(0, 25)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.lists(numbers, max_size=6)),
        st.tuples(st.just("get"), st.lists(numbers, max_size=6)),
        st.tuples(st.just("view"), st.lists(numbers, max_size=6)),
        st.tuples(st.just("pin"), st.lists(numbers, max_size=2)),
    ),
    max_size=40,
)


@given(steps=steps, segments=st.integers(1, 4))
def test_against_a_dictionary_no_value_is_ever_wrong(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, list[int]]], segments: int
) -> None:
    path = Path(f"/dev/shm/{PREFIX}test-{secrets.token_hex(8)}")
    small = 4096
    size = int((segments + 0.2) * small * 128 / 127) + 4096 + 256
    stores = [SegmentStore(path, size, small) for _ in range(2)]
    # Lengths up to a segment, and keys whose digests are all in few buckets.
    known = {n: (n.to_bytes(16, "big"), value_of(n, (n * 173) % 4100)) for n in range(26)}
    put: set[int] = set()
    pins = None
    try:
        for turn, (action, asked) in enumerate(steps):
            store = stores[turn % 2]
            keys = [known[n][0] for n in asked]
            if action == "put":
                stored = store.put_many([known[n] for n in asked])
                assert 0 <= stored <= len(asked)
                put |= set(asked)
            elif action == "pin":
                if pins is not None:
                    pins.release()
                pins = store.pin(keys)
            else:
                for n, value in zip(
                    asked,
                    store.get_many(keys) if action == "get" else store.view_many(keys),
                    strict=True,
                ):
                    assert value is None or (n in put and value == known[n][1])
            assert taken(path) <= size
    finally:
        if pins is not None:
            pins.release()
        for store in stores:
            store.close()
    assert not path.exists()


def test_in_a_full_bucket_the_oldest_entry_goes(folder: Path, opened: Opener) -> None:
    store = opened()
    buckets = store.geometry.num_buckets
    keys = [(buckets * n).to_bytes(8, "little") + bytes(8) for n in range(9)]
    assert keys[0] == bytes(16)
    assert store.put_many([(key, key) for key in keys[:8]]) == 8
    assert store.get_many(keys[:8]) == keys[:8]
    store.put_many([(keys[8], keys[8])])
    assert sum(value is None for value in store.get_many(keys)) == 1
    assert store.get_many([keys[8]]) == [keys[8]]
