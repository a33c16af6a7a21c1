"""The index of node-shared segments: key digest -> place, in one mapped file of fixed size.

    header    magic | folder id (16) | max_bytes u64 | segment_bytes u64 | buckets u64 | CRC-32
    counters  generation, next number, active segment, bytes used in it: u64 each, at 2048
    buckets   from 4096 on: 8 entries of key (16) | segment u32 | offset u32 | length u32 | hit u32

Set-associative, so that a look-up is one copy of 256 bytes, and no Python object exists per entry.
Readers take no lock and writers overwrite entries under their eyes, or die in the middle. So an
entry is only ever a hint: it counts once the frame that it points to proves to be that of the key
(frame.py). A torn entry points to something else, and is a miss.

One entry per 4 KB of the budget: with values of 8 KB, buckets are half full, and one in fifty
overflows and drops its oldest value. Smaller values run out of entries before they run out of
bytes.
"""

import mmap
import os
import secrets
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from eagleray.actors.cache.frame import KEY_BYTES
from eagleray.platform.errors import StorageError

_MAGIC, _VERSION = b"EVSEGIX", 1
_HEADER = struct.Struct("<7sB16sQQQ")
_COUNTERS_AT, _BUCKETS_AT = 2048, 4096
_GENERATION, _NEXT, _ACTIVE, _USED = range(4)
_ENTRY = struct.Struct(f"<{KEY_BYTES}sIIII")
_PLACE = struct.Struct("<IIII")
_WAYS = 8
_BUCKET_BYTES = _WAYS * _ENTRY.size
_HIT_AT = _ENTRY.size - 4
_BYTES_PER_ENTRY = 4096
_ENTRIES = np.dtype(
    [("key", "V16"), ("segment", "<u4"), ("offset", "<u4"), ("length", "<u4"), ("hit", "<u4")]
)


class IndexFormatError(StorageError):
    """An index cannot be used: another format, damaged, or no index at all."""


class Place(NamedTuple):
    """Where the frame of a key lies, and where in the index that stands."""

    slot: int
    segment: int
    offset: int
    length: int
    hit: int


@dataclass(frozen=True)
class Geometry:
    """What all processes that share a folder must agree on."""

    max_bytes: int
    segment_bytes: int

    @property
    def num_buckets(self) -> int:
        """Buckets of the index."""
        return max(1, self.max_bytes // (_BYTES_PER_ENTRY * _WAYS))

    @property
    def index_bytes(self) -> int:
        """Size of the index; it counts against the budget."""
        return _BUCKETS_AT + self.num_buckets * _BUCKET_BYTES

    @property
    def num_segments(self) -> int:
        """Segments that fit into the budget beside the index."""
        return max(0, self.max_bytes - self.index_bytes) // self.segment_bytes


class SegmentIndex:
    """A mapped index. Any number of readers; writers must exclude one another.

    Args:
        path: Its file.

    Raises:
        IndexFormatError: It cannot be used.
        OSError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            head = file.read(_HEADER.size + 4)
            _check(path, head)
            _, _, self.folder_id, max_bytes, segment_bytes, _ = _HEADER.unpack_from(head)
            self.geometry = Geometry(max_bytes, segment_bytes)
            if os.fstat(file.fileno()).st_size != self.geometry.index_bytes:
                raise IndexFormatError(f"index {path} has another size than its header says")
            self._map = mmap.mmap(file.fileno(), self.geometry.index_bytes)
        self._num_buckets = self.geometry.num_buckets
        # Aligned 8-byte stores: a writer that dies leaves the old number or the new one.
        self._counters = memoryview(self._map)[_COUNTERS_AT : _COUNTERS_AT + 32].cast("Q")
        self._entries: npt.NDArray[np.void] = np.frombuffer(self._map, _ENTRIES, offset=_BUCKETS_AT)

    @classmethod
    def create(cls, path: Path, geometry: Geometry) -> Self:
        """Make an empty index; it appears whole or not at all.

        Raises:
            OSError: There is no room for it.
        """
        head = _HEADER.pack(
            _MAGIC, _VERSION, secrets.token_bytes(16), geometry.max_bytes, geometry.segment_bytes,
            geometry.num_buckets,
        )  # fmt: skip
        temporary = path.with_name(path.name + ".new")
        with temporary.open("wb") as file:
            # Allocated now: writing to a hole of a full tmpfs through a mapping is SIGBUS.
            os.posix_fallocate(file.fileno(), 0, geometry.index_bytes)
            file.write(head + struct.pack("<I", zlib.crc32(head)))
            file.seek(_COUNTERS_AT)
            file.write(struct.pack("<4Q", 1, 1, 0, 0))
        temporary.rename(path)
        return cls(path)

    def find(self, key: bytes) -> Place | None:
        """Where a key may lie; a hint, as said above."""
        start = self._bucket(key)
        bucket = self._map[start : start + _BUCKET_BYTES]
        at = bucket.find(key)
        while at >= 0:
            if at % _ENTRY.size == 0:
                segment, offset, length, hit = _PLACE.unpack_from(bucket, at + KEY_BYTES)
                if segment:
                    return Place(start + at, segment, offset, length, hit)
            at = bucket.find(key, at + 1)
        return None

    def mark_hit(self, place: Place) -> None:
        """Note a hit, so that the value gets a second chance. One byte, without a lock."""
        self._map[place.slot + _HIT_AT] = 1

    def insert(self, key: bytes, segment: int, offset: int, length: int) -> None:
        """Let a key point to its frame; in a full bucket the oldest entry goes. For the writer."""
        start = self._bucket(key)
        bucket = self._map[start : start + _BUCKET_BYTES]
        entries = [_ENTRY.unpack_from(bucket, at) for at in range(0, _BUCKET_BYTES, _ENTRY.size)]
        # Its own entry, else an empty one (segment 0), else the oldest.
        way = min(range(_WAYS), key=lambda way: (entries[way][0] != key, entries[way][1]))
        slot = start + way * _ENTRY.size
        _ENTRY.pack_into(self._map, slot, key, segment, offset, length, 0)

    def places_in(self, segment: int) -> list[tuple[bytes, int, int, bool]]:
        """(key, offset, length, was hit) of the entries that point into a segment, as written."""
        found = self._entries[self._entries["segment"] == segment]
        rows = found[np.argsort(found["offset"], kind="stable")]
        return [
            (row["key"].tobytes(), int(row["offset"]), int(row["length"]), bool(row["hit"]))
            for row in rows
        ]

    def forget(self, segment: int) -> None:
        """Remove the entries of a segment and tell readers so. For the writer."""
        segments = self._entries["segment"]
        segments[segments == segment] = 0
        self._counters[_GENERATION] += 1

    @property
    def generation(self) -> int:
        """Grows when a segment goes."""
        return self._counters[_GENERATION]

    @property
    def active(self) -> tuple[int, int]:
        """The segment that is being filled, 0 if none, and the bytes used in it."""
        return self._counters[_ACTIVE], self._counters[_USED]

    def use(self, num_bytes: int) -> None:
        """Count bytes of the active segment as used. For the writer."""
        self._counters[_USED] += num_bytes

    def take_number(self) -> int:
        """A number for a new segment that none ever had. For the writer."""
        number = self._counters[_NEXT]
        self._counters[_NEXT] = number + 1
        return number

    def begin(self, segment: int, used: int) -> None:
        """Fill another segment from now on. For the writer."""
        # Nothing is active in between: a writer that dies here must not leave a mix.
        self._counters[_ACTIVE] = 0
        self._counters[_USED] = used
        self._counters[_ACTIVE] = segment

    def gave(self, segment: int) -> bool:
        """Whether a number was handed out."""
        return 0 < segment < self._counters[_NEXT]

    def _bucket(self, key: bytes) -> int:
        # A key digest is random already.
        return _BUCKETS_AT + int.from_bytes(key[:8], "little") % self._num_buckets * _BUCKET_BYTES


def bears_our_mark(path: Path) -> bool:
    """Whether a file is an index of ours, of whatever version."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def _check(path: Path, head: bytes) -> None:
    if len(head) < _HEADER.size + 4 or not head.startswith(_MAGIC):
        raise IndexFormatError(f"{path} is no index of segments")
    version = head[len(_MAGIC)]
    if version != _VERSION:
        raise IndexFormatError(
            f"index {path} has format {version}; this version reads format {_VERSION}"
        )
    if zlib.crc32(head[: _HEADER.size]) != struct.unpack_from("<I", head, _HEADER.size)[0]:
        raise IndexFormatError(f"the header of index {path} fails its checksum")
