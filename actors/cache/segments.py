"""Values in files that all processes of a node share: L1 in /dev/shm, L3 on a disk.

Values are appended to segments of fixed size, under one lock for all writers; readers take none. A
segment is never written in place again and its number never used again, so whoever has it open or
mapped goes on reading the same bytes, also after it was removed: there is no lease to break.

Eviction removes the oldest segment, for whole segments cost one unlink where single values would
leave holes, a free list and moving bytes (Segcache: Yang et al., NSDI 2021). Values of it that were
hit since they were written are copied forward once, up to half a segment: FIFO with lazy promotion,
as in CLOCK and S3-FIFO (Yang et al., SOSP 2023).

The files never take more than the budget. Memory may for a moment: what was removed is freed when
the last process lets go of it, at its next look-up, or with its last view.
"""

import fcntl
import mmap
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from eagleray.actors.cache.frame import OVERHEAD_BYTES, is_frame_of, unwrap, wrap
from eagleray.actors.cache.segment_folder import HEADER_BYTES, SegmentFolder
from eagleray.actors.cache.segment_index import Place
from eagleray.actors.cache.segment_plan import aligned, check_fits, geometry_for

_MAX_OPEN = 128
"""Segments that a process keeps open; more would meet the limit on open files."""
_COPY_SHARE = 0.5


@dataclass
class SegmentCounts:
    """What this process met.

    `evicted` segments were removed and `copied` values of them kept; `rejected` values failed their
    check; `refused` found no room, as all is pinned, the file system is full or they are too large;
    `busy` were not stored as another process did not stop writing; `failed` operations met an error
    of the system.
    """

    evicted: int = 0
    copied: int = 0
    rejected: int = 0
    refused: int = 0
    busy: int = 0
    failed: int = 0


class Pins:
    """Segments that are not evicted until they are released; `keys` are those that lie in them."""

    def __init__(self, keys: frozenset[bytes], descriptors: list[int]) -> None:
        self.keys, self._descriptors = keys, descriptors

    def release(self) -> None:
        """Let them be evicted again. Repeatable."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def __enter__(self) -> "Pins":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _Segment:
    """A segment that is open for reading; mapped once a view is asked for."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor, self._num_bytes = descriptor, num_bytes
        self._view: memoryview | None = None

    def read(self, place: Place) -> bytes:
        # Not through a mapping: what fails is an error here, and SIGBUS there.
        return os.pread(self._descriptor, place.length, place.offset)

    def view(self, place: Place) -> memoryview:
        if self._view is None:
            self._view = memoryview(
                mmap.mmap(self._descriptor, self._num_bytes, prot=mmap.PROT_READ)
            )
        return self._view[place.offset : place.offset + place.length]

    def close(self) -> None:
        os.close(self._descriptor)
        self._view = None  # Views that were given keep the mapping until they go.


class SegmentStore:
    """A value store in a folder. Not for several threads; any number may have one each.

    Args:
        path: The folder.
        max_bytes: What its files take at most, the index included.
        segment_bytes: Size of a segment; None: a sixteenth of the budget within 8 and 64 MiB, at
            most a quarter of it.
        is_kept: Whether the folder outlives its last user.
        setting: What sets the budget, for error messages.
        lock_wait_s: A writer that holds the lock for longer is not waited for.
        sleep: Waits so many seconds.

    Raises:
        SegmentFolderError: The folder belongs to somebody else, or cannot be made.
        ValueError: The budget does not hold one segment.
    """

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        segment_bytes: int | None = None,
        *,
        is_kept: bool = False,
        setting: str = "data.cache.shared_bytes",
        lock_wait_s: float = 0.05,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        geometry = geometry_for(max_bytes, segment_bytes)
        if geometry.segment_bytes <= HEADER_BYTES or geometry.num_segments < 1:
            raise ValueError(
                f"max_bytes={max_bytes} must hold the index, {geometry.index_bytes} bytes, and a "
                f"segment of {geometry.segment_bytes} bytes, which must be above {HEADER_BYTES}"
            )
        self._segment_bytes = segment_bytes
        self._folder = SegmentFolder(path, geometry, is_kept, lock_wait_s, sleep)
        self._index = self._folder.index
        self.geometry = self._index.geometry
        self._setting = setting
        self._generation = self._index.generation
        self._open: OrderedDict[int, _Segment] = OrderedDict()
        self._is_closed = False
        self.counts = SegmentCounts()

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The payload under each key digest; None where there is none to be had."""
        self._refresh()
        return [self._get(key) for key in keys]

    def view_many(self, keys: Sequence[bytes]) -> list[memoryview | None]:
        """As `get_many`, without a copy: read-only views, valid as long as they are held.

        For segments in memory: a disk that fails under a mapping ends the process (SIGBUS).
        """
        self._refresh()
        return [self._view(key) for key in keys]

    def put_many(self, items: Sequence[tuple[bytes, bytes]]) -> int:
        """Store payloads under key digests; how many lie there now, those of others included."""
        if self._is_closed or not items:
            return 0
        self._refresh()
        stored = 0
        try:
            with self._folder.writing() as is_writing:
                if not is_writing:
                    self.counts.busy += len(items)
                    return 0
                for key, payload in items:
                    stored += self._get(key, is_hit=False) is not None or self._put(key, payload)
        except OSError:
            self.counts.failed += 1
        return stored

    def pin(self, keys: Sequence[bytes]) -> Pins:
        """Keep the segments of these keys from eviction, by any process, until released.

        Keys that are not there are left out of `Pins.keys`. A killed process holds no pins.
        """
        descriptors: dict[int, int] = {}
        pinned = set()
        for key in keys:
            place = None if self._is_closed else self._index.find(key)
            if place is None:
                continue
            if place.segment not in descriptors:
                descriptor = self._locked(place.segment)
                if descriptor is None:
                    continue
                descriptors[place.segment] = descriptor
            # It may have moved before the lock was there.
            now = self._index.find(key)
            if now is not None and now.segment == place.segment:
                pinned.add(key)
        return Pins(frozenset(pinned), list(descriptors.values()))

    def check_fits(self, sizes: Sequence[int]) -> None:
        """Refuse to plan with values, of these sizes in bytes, that cannot all be pinned at once.

        Raises:
            WorkingSetError: They and a segment to write into are more than the budget.
        """
        check_fits(sizes, self.geometry, self._segment_bytes, self._setting)

    @property
    def total_bytes(self) -> int:
        """What the files take."""
        taken = len(self._folder.numbers()) * self.geometry.segment_bytes
        return self.geometry.index_bytes + taken

    def close(self) -> None:
        """Let go of files and the folder; nothing is found or stored from now on. Repeatable."""
        self._is_closed = True
        for segment in self._open.values():
            segment.close()
        self._open.clear()
        with suppress(OSError):
            self._folder.close()

    def _get(self, key: bytes, *, is_hit: bool = True) -> bytes | None:
        for place, segment in self._found(key):
            with suppress(OSError):
                payload = unwrap(key, segment.read(place))
                if payload is None:
                    self.counts.rejected += 1
                elif is_hit and not place.hit:
                    self._index.mark_hit(place)
                return payload
            self.counts.failed += 1
        return None

    def _view(self, key: bytes) -> memoryview | None:
        for place, segment in self._found(key):
            # A file that was cut short cannot be mapped: ValueError.
            with suppress(OSError, ValueError):
                view = segment.view(place)
                if is_frame_of(key, view):
                    if not place.hit:
                        self._index.mark_hit(place)
                    return view[OVERHEAD_BYTES:]
                self.counts.rejected += 1
                return None
            self.counts.failed += 1
        return None

    def _found(self, key: bytes) -> Iterator[tuple[Place, _Segment]]:
        place = None if self._is_closed else self._index.find(key)
        # A torn entry may say anything.
        if place is None or place.offset + place.length > self.geometry.segment_bytes:
            return
        segment = self._open.get(place.segment) or self._opened(place.segment)
        if segment is not None:
            yield place, segment

    def _opened(self, number: int) -> _Segment | None:
        try:
            descriptor = os.open(self._folder.segment(number), os.O_RDONLY)
        except OSError:
            return None
        self._open[number] = _Segment(descriptor, self.geometry.segment_bytes)
        if len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)[1].close()
        return self._open[number]

    def _refresh(self) -> None:
        """Let go of segments that were removed since the last look-up, so that they are freed."""
        if self._is_closed or self._generation == self._index.generation:
            return
        self._generation = self._index.generation
        with suppress(OSError):
            there = set(self._folder.numbers())
            for number in self._open.keys() - there:
                self._open.pop(number).close()

    def _put(self, key: bytes, payload: bytes) -> bool:
        frame = wrap(key, payload)
        is_small = HEADER_BYTES + aligned(len(frame)) <= self.geometry.segment_bytes
        if is_small and (self._has_room(len(frame)) or self._rotate(len(frame))):
            return self._append(key, frame)
        self.counts.refused += 1
        return False

    def _has_room(self, num_bytes: int) -> bool:
        active, used = self._index.active
        return bool(active) and used + aligned(num_bytes) <= self.geometry.segment_bytes

    def _append(self, key: bytes, frame: bytes) -> bool:
        number, used = self._index.active
        # Counted first: a writer that dies leaves a gap, and not a place that is written twice.
        self._index.use(aligned(len(frame)))
        try:
            descriptor = os.open(self._folder.segment(number), os.O_WRONLY)
        except FileNotFoundError:
            self._index.begin(0, 0)
            raise
        try:
            written = os.pwrite(descriptor, frame, used)
        finally:
            os.close(descriptor)
        if written != len(frame):
            return False
        self._index.insert(key, number, used, len(frame))
        return True

    def _rotate(self, num_bytes: int) -> bool:
        """Begin a new segment with room for so much, in the place of the oldest ones if need be."""
        hot: list[tuple[bytes, bytes]] = []
        numbers = self._folder.numbers()
        excess = len(numbers) + 1 - self.geometry.num_segments
        for number in numbers:
            if excess <= 0:
                break
            excess -= self._evict(number, hot)
        if excess > 0:
            return False
        number = self._index.take_number()
        try:
            self._folder.create(number)
        except OSError:
            self.counts.failed += 1
            return False
        self._index.begin(number, HEADER_BYTES)
        size = self.geometry.segment_bytes
        room = min(_COPY_SHARE * size, size - HEADER_BYTES - aligned(num_bytes))
        for key, frame in hot:
            room -= aligned(len(frame))
            if room < 0:
                break
            self.counts.copied += self._append(key, frame)
        return True

    def _evict(self, number: int, hot: list[tuple[bytes, bytes]]) -> bool:
        """Remove a segment, unless it is pinned or foreign; what was hit is added to `hot`."""
        path = self._folder.segment(number)
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            return False
        try:
            if not self._folder.is_ours(number, descriptor):
                return False
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            limit = _COPY_SHARE * self.geometry.segment_bytes
            for key, offset, length, was_hit in self._index.places_in(number):
                if was_hit and limit >= aligned(length):
                    limit -= aligned(length)
                    frame = os.pread(descriptor, length, offset)
                    if unwrap(key, frame) is not None:
                        hot.append((key, frame))
            self._index.forget(number)
            path.unlink()
            self.counts.evicted += 1
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True

    def _locked(self, number: int) -> int | None:
        """A descriptor of a segment that is locked against eviction; None if it goes or is gone."""
        try:
            descriptor = os.open(self._folder.segment(number), os.O_RDONLY)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except OSError:
            pass
        os.close(descriptor)
        return None
