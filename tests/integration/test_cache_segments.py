"""Proves that processes share segments: no wrong value and no error, whoever is killed whenever.

Readers check every value against what its number says; a killed process leaves nothing that holds
up, misleads or outlives the others.
"""

import multiprocessing as mp
import os
import random
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from eagleray.actors.cache.frame import digest_key
from eagleray.actors.cache.segment_folder import PREFIX, sweep
from eagleray.actors.cache.segments import SegmentStore

SEGMENT = 1 << 20
BUDGET = 2 * SEGMENT + 64_000
NUM_KEYS = 200
Until = Callable[..., None]
# As clean as a new process, and it comes at once.
_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["eagleray.actors.cache.segments", "psutil", "pytest"])


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(f"/dev/shm/{PREFIX}test-{secrets.token_hex(8)}")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def key_of(number: int) -> bytes:
    return digest_key(b"%d" % number)


@cache
def value_of(number: int) -> bytes:
    return digest_key(b"value %d" % number) * (600 + number * 8)


def write(folder: Path, seed: int, talk: Connection) -> None:
    """Store values until told to stop, or killed."""
    store, draw = SegmentStore(folder, BUDGET, SEGMENT), random.Random(seed)
    talk.send("ready")
    while not talk.poll():
        numbers = [draw.randrange(NUM_KEYS) for _ in range(8)]
        store.put_many([(key_of(n), value_of(n)) for n in numbers])
    talk.send((store.counts.failed, store.counts.evicted))
    store.close()


def read(folder: Path, seed: int, count: int, talk: Connection) -> None:
    """Look values up and say what was found: hits, wrong values, errors, growth in bytes."""
    store, draw = SegmentStore(folder, BUDGET, SEGMENT), random.Random(seed)
    hits = wrong = early = 0
    for number in range(NUM_KEYS):
        value_of(number)  # What is remembered must not pass for growth.
    talk.send("ready")
    for turn in range(count):
        number = draw.randrange(NUM_KEYS)
        look = store.get_many if turn % 2 else store.view_many
        (value,) = look([key_of(number)])
        hits += value is not None
        wrong += value is not None and value != value_of(number)
        if turn == count // 2:
            early = psutil.Process().memory_full_info().uss
    growth = psutil.Process().memory_full_info().uss - early
    talk.send((hits, wrong, store.counts.failed, growth))
    store.close()


def own(folder: Path, talk: Connection) -> None:
    """Hold a folder and a pin until killed."""
    store = SegmentStore(folder, BUDGET, SEGMENT)
    store.put_many([(key_of(1), value_of(1))])
    store.pin([key_of(1)])
    talk.send("ready")
    talk.recv()


def fill(folder: Path, talk: Connection) -> None:
    """Store one value after the other on a disk, and tell how many there are, until killed."""
    store = SegmentStore(folder, BUDGET, SEGMENT, is_kept=True)
    for number in range(NUM_KEYS // 3):  # They all fit.
        store.put_many([(key_of(number), value_of(number))])
        talk.send(number + 1)
    talk.recv()


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[mp.Process, Connection]]]:
    """Starts processes with a pipe to each; all end with the test."""
    started: list[mp.Process] = []

    def start_one(target: Callable[..., None], *args: object) -> tuple[mp.Process, Connection]:
        ours, theirs = _context.Pipe()
        process = _context.Process(target=target, args=(*args, theirs), daemon=True)
        process.start()
        theirs.close()
        started.append(process)  # type: ignore[arg-type]
        return process, ours  # type: ignore[return-value]

    yield start_one
    for process in started:
        process.kill()
        process.join()


def ready(talk: Connection) -> None:
    assert talk.poll(30)
    assert talk.recv() == "ready"


def test_four_readers_and_two_writers_in_two_segments_meet_no_error_and_no_wrong_value(
    folder: Path, start: Callable[..., tuple[mp.Process, Connection]]
) -> None:
    writers = [start(write, folder, seed) for seed in (1, 2)]
    readers = [start(read, folder, seed, 5_000) for seed in (3, 4, 5, 6)]
    for _, talk in (*writers, *readers):
        ready(talk)
    for process, talk in readers:
        assert talk.poll(50)
        hits, wrong, failed, growth = talk.recv()
        assert hits > 100
        assert (wrong, failed) == (0, 0)
        # Not more than what it may have mapped at once, over hundreds of evictions. Its own memory:
        # what it shares with its siblings would seem to grow as they end.
        assert growth < 2 * BUDGET
        process.join()
    evicted = 0
    for process, talk in writers:
        talk.send("stop")
        assert talk.poll(30)
        failed, by_this = talk.recv()
        assert failed == 0
        evicted += by_this
        process.join()
    assert evicted > 10
    assert not folder.exists()


def test_a_writer_killed_ten_times_leaves_what_others_go_on_with(
    folder: Path, start: Callable[..., tuple[mp.Process, Connection]]
) -> None:
    store = SegmentStore(folder, BUDGET, SEGMENT)
    draw = random.Random(11)
    for seed in range(10):
        process, talk = start(write, folder, seed)
        ready(talk)
        # A random moment: after so many looks of ours, while it writes.
        for _ in range(draw.randrange(1, 150)):
            for n, value in enumerate(store.get_many([key_of(n) for n in range(20)])):
                assert value is None or value == value_of(n)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert sum(path.stat().st_size for path in folder.iterdir()) <= BUDGET
        # Of ours alone, and less than a segment: nothing of it can go for the rest.
        own = range(NUM_KEYS + 8 * seed, NUM_KEYS + 8 * seed + 8)
        assert store.put_many([(key_of(n), value_of(n)) for n in own]) == 8
        assert store.get_many([key_of(n) for n in own]) == [value_of(n) for n in own]
    assert (store.counts.failed, store.counts.busy) == (0, 0)
    store.close()
    assert not folder.exists()


def test_whatever_a_process_stored_on_a_disk_before_it_was_killed_is_found_by_the_next(
    tmp_path: Path, start: Callable[..., tuple[mp.Process, Connection]]
) -> None:
    process, talk = start(fill, tmp_path)
    stored = 0
    while stored < 40:
        assert talk.poll(30)
        stored = talk.recv()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    store = SegmentStore(tmp_path, BUDGET, SEGMENT, is_kept=True)
    # It was not through with its pass, and all that it had told of is there.
    assert store.get_many([key_of(n) for n in range(stored)]) == [
        value_of(n) for n in range(stored)
    ]
    assert store.put_many([(key_of(stored), value_of(stored))]) == 1
    store.close()


def test_what_a_killed_owner_left_is_removed_by_the_next(
    folder: Path, start: Callable[..., tuple[mp.Process, Connection]]
) -> None:
    process, talk = start(own, folder)
    ready(talk)
    sweep(folder.parent)
    assert folder.exists()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert list(folder.glob("segment-*"))
    assert sweep(folder.parent) >= 1
    assert not folder.exists()
