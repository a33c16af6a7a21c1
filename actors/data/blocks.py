"""Files of fixed-width items in blocks: what token shards and row shards have in common.

A file is a header, little-endian items, and a CRC-32 per block of items; every byte of the file is
under one checksum or another. Layouts and versions: docs/formats.md.

Blocks are checked when they are first touched, once per open file, so reading starts at once and
no damaged item is ever returned. One that fails is fetched from storage again a few times, past
the page cache: on a network file system a bad read need not be a bad file. Reads are views of the
memory map, or of what was fetched again: no copy of a sound block, and not writable.
"""

import logging
import mmap
import os
import struct
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from eagleray.actors.data.activity import Reading
from eagleray.platform.errors import IntegrityError

logger = logging.getLogger(__name__)

ItemArray = npt.NDArray[Any]

HEADER_BYTES = 128

_FIELDS = struct.Struct("<8sIIQQII32s")
_CRC = struct.Struct("<I")
_REFETCH_PAUSES_S = (0.01, 0.1, 0.5)
_RESTORE = "restore the file from a copy, or remove the dataset's folder and build it again"


@dataclass(frozen=True)
class BlockHeader(ABC):
    """What a file says about itself.

    A kind of file names six fields: u32 bytes per item, u64 length, u64 position of its first
    entry, u32 entries per block, u32 of its own, and the 32 bytes of a digest.
    """

    MAGIC: ClassVar[bytes]
    VERSION: ClassVar[int]
    ENTRIES: ClassVar[str]
    """What the file is counted in, for messages."""

    @property
    @abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """Type of an item on disk."""

    @property
    @abstractmethod
    def num_entries(self) -> int:
        """Entries in the file."""

    @property
    @abstractmethod
    def block_entries(self) -> int:
        """Entries in a block, the last one perhaps shorter."""

    @property
    def width(self) -> int:
        """Items of an entry."""
        return 1

    @property
    def num_items(self) -> int:
        """Items in the file."""
        return self.num_entries * self.width

    @property
    def block_items(self) -> int:
        """Items in a block, the last one perhaps shorter."""
        return self.block_entries * self.width

    @property
    def num_blocks(self) -> int:
        """Blocks, the last one perhaps shorter."""
        return -(-self.num_entries // self.block_entries)

    def pack(self) -> bytes:
        """The header's bytes, its own CRC-32 last."""
        values = (getattr(self, field.name) for field in fields(self))
        padded = _FIELDS.pack(self.MAGIC, self.VERSION, *values)
        padded = padded.ljust(HEADER_BYTES - _CRC.size, b"\0")
        return padded + _CRC.pack(zlib.crc32(padded))

    @classmethod
    def unpack(cls, data: bytes, path: Path) -> Self:
        """Read a header.

        Raises:
            IntegrityError: It is no shard of this kind, of another version, or damaged.
        """
        if len(data) < HEADER_BYTES or not data.startswith(cls.MAGIC):
            raise IntegrityError(f"shard {path.name} has no shard header ({path})", _RESTORE)
        (crc,) = _CRC.unpack_from(data, HEADER_BYTES - _CRC.size)
        if zlib.crc32(data[: HEADER_BYTES - _CRC.size]) != crc:
            raise IntegrityError(f"shard {path.name}: its header is damaged ({path})", _RESTORE)
        _, version, *values = _FIELDS.unpack_from(data)
        if version != cls.VERSION:
            raise IntegrityError(
                f"shard {path.name} has format version {version}, this program reads {cls.VERSION} "
                f"({path})",
                "use the program that wrote it, or build the dataset again",
            )
        return cls(*values)


H = TypeVar("H", bound=BlockHeader)


class BlockWriter(ABC):
    """Writes one file; as a context manager, a failed one is left without a header.

    `num_entries` is how many there are by now.
    """

    def __init__(self, path: Path, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._pending = bytearray()
        self._crcs: list[int] = []
        self.num_entries = 0
        self._file = path.open("wb")
        self._file.write(bytes(HEADER_BYTES))

    @abstractmethod
    def append(self, entries: ItemArray) -> None:
        """Add entries at the end.

        Raises:
            DataError: One does not fit what the file was declared with.
        """

    def close(self) -> None:
        """Write what is left, the checksums and, last, the header."""
        if self._pending:
            self._write_block(bytes(self._pending))
        table = np.array(self._crcs, dtype="<u4").tobytes()
        self._file.write(table + _CRC.pack(zlib.crc32(table)))
        self._file.seek(0)
        self._file.write(self._header().pack())
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._file.close()

    @abstractmethod
    def _header(self) -> BlockHeader: ...

    def _add(self, data: bytes, num_entries: int) -> None:
        self._pending += data
        self.num_entries += num_entries
        whole = len(self._pending) // self._block_bytes * self._block_bytes
        for start in range(0, whole, self._block_bytes):
            self._write_block(bytes(self._pending[start : start + self._block_bytes]))
        del self._pending[:whole]

    def _write_block(self, block: bytes) -> None:
        self._crcs.append(zlib.crc32(block))
        self._file.write(block)


class BlockFile(Generic[H]):
    """An open file. Safe for several threads: a block may be checked twice, never too seldom.

    Args:
        path: The file.
        kind: Its header.
        sleep: Waits before a block that failed is fetched again.

    Raises:
        IntegrityError: On opening: not a shard, damaged header or checksums, or not as long as the
            header says. On reading: a touched block is damaged; the message names shard and block.
    """

    def __init__(
        self, path: Path, kind: type[H], sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.path, self._sleep = path, sleep
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise IntegrityError(
                f"shard {path.name} cannot be opened: {error} ({path})", _RESTORE
            ) from error
        self.header = kind.unpack(self._map[:HEADER_BYTES], path)
        end = HEADER_BYTES + self.header.num_items * self.header.dtype.itemsize
        table_bytes = 4 * self.header.num_blocks
        want = end + table_bytes + _CRC.size
        if len(self._map) != want:
            raise IntegrityError(
                f"shard {path.name} holds {len(self._map)} bytes, its header promises {want} "
                f"({path})",
                _RESTORE,
            )
        table = self._map[end : end + table_bytes]
        if zlib.crc32(table) != _CRC.unpack_from(self._map, end + table_bytes)[0]:
            raise IntegrityError(f"shard {path.name}: its checksums are damaged ({path})", _RESTORE)
        self.crcs = np.frombuffer(table, dtype="<u4")
        self._items: ItemArray = np.frombuffer(
            self._map, dtype=self.header.dtype, count=self.header.num_items, offset=HEADER_BYTES
        )
        self._is_checked = np.zeros(self.header.num_blocks, dtype=np.bool_)
        self._windows: tuple[int, ItemArray] | None = None
        self._refetched: dict[int, ItemArray] = {}

    def read(self, start: int, stop: int) -> ItemArray:
        """Items [start, stop) of this file, as a read-only view of it."""
        size = self.header.block_items
        first, last = start // size, (stop - 1) // size
        for block in range(first, last + 1):
            if not self._is_checked[block]:
                self._check(block)
        if self._refetched and not self._refetched.keys().isdisjoint(range(first, last + 1)):
            whole = np.concatenate([self._block(block) for block in range(first, last + 1)])
            whole.flags.writeable = False
            return whole[start - first * size : stop - first * size]
        return self._items[start:stop]

    def gather(self, starts_N: npt.NDArray[np.int64], length: int) -> ItemArray:
        """Stretches of equal length, of a block at most: [N, length], a new array."""
        size = self.header.block_items
        blocks = np.concatenate([starts_N // size, (starts_N + (length - 1)) // size])
        if not self._is_checked[blocks].all():
            for block in np.unique(blocks[~self._is_checked[blocks]]).tolist():
                self._check(block)
        if self._refetched:
            return np.stack([self.read(start, start + length) for start in starts_N.tolist()])
        # Kept: to make the view takes as long as to take a batch from it.
        if self._windows is None or self._windows[0] != length:
            view = np.lib.stride_tricks.sliding_window_view(self._items, length)
            self._windows = length, view
        with Reading(f"shard {self.path.name}"):
            taken: ItemArray = self._windows[1][starts_N]
        return taken

    def read_block(self, block: int) -> ItemArray:
        """All items of one block, as a read-only view of the file."""
        start = block * self.header.block_items
        return self.read(start, min(start + self.header.block_items, self.header.num_items))

    def is_sound(self, block: int) -> bool:
        """Check a block of the file against its checksum now."""
        start = block * self.header.block_items
        items = self._items[start : start + self.header.block_items]
        return zlib.crc32(items.data) == int(self.crcs[block])

    def damaged_blocks(self) -> Iterator[int]:
        """Every block that fails its checksum now."""
        return (block for block in range(self.header.num_blocks) if not self.is_sound(block))

    def _check(self, block: int) -> None:
        with Reading(f"block {block} of shard {self.path.name}"):
            if not self.is_sound(block):
                self._refetched[block] = self._refetch(block)
        self._is_checked[block] = True

    def _block(self, block: int) -> ItemArray:
        start = block * self.header.block_items
        return self._refetched.get(block, self._items[start : start + self.header.block_items])

    def _refetch(self, block: int) -> ItemArray:
        """A block that failed its checksum, from storage itself."""
        header = self.header
        first = block * header.block_items
        num_bytes = min(header.block_items, header.num_items - first) * header.dtype.itemsize
        offset = HEADER_BYTES + first * header.dtype.itemsize
        reason = ""
        for pause_s in _REFETCH_PAUSES_S:
            self._sleep(pause_s)
            try:
                data = _read_past_cache(self.path, offset, num_bytes)
            except OSError as error:
                reason = f", and cannot be read again: {error.strerror or error}"
                continue
            if len(data) == num_bytes and zlib.crc32(data) == int(self.crcs[block]):
                logger.warning("block was read again shard=%s block=%d", self.path.name, block)
                return np.frombuffer(data, dtype=header.dtype)
        raise IntegrityError(
            f"shard {self.path.name}: block {block} ({header.ENTRIES} from "
            f"{first // header.width}, bytes from {offset}) fails its checksum{reason} "
            f"({self.path})",
            _RESTORE,
        )


def _read_past_cache(path: Path, offset: int, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), offset, num_bytes, os.POSIX_FADV_DONTNEED)
        return os.pread(file.fileno(), num_bytes, offset)
