"""Token shards: the only on-disk form of training text.

A shard is a header, little-endian token ids, and a CRC-32 per block of ids; every byte of the file
is under one checksum or another. Layout and version: docs/formats.md#token-shard.

Blocks are checked when they are first touched, once per open shard, so reading starts at once and
no damaged token is ever returned. One that fails is fetched from storage again a few times, past
the page cache: on a network file system a bad read need not be a bad file. Reads are views of the
memory map, or of what was fetched again: no copy of a sound block, and not writable.
"""

import logging
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from eagleray.actors.data.activity import Reading
from eagleray.platform.errors import DataError, IntegrityError

logger = logging.getLogger(__name__)

TokenArray = npt.NDArray[np.unsignedinteger[Any]]

MAGIC = b"EAGLTOKS"
VERSION = 1
HEADER_BYTES = 128
BLOCK_TOKENS = 16_384
"""32 or 64 KB: one value of the feature cache, and some 20 us of checking on first touch."""

_FIELDS = struct.Struct("<8sIIQQII32s")
_CRC = struct.Struct("<I")
_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_REFETCH_PAUSES_S = (0.01, 0.1, 0.5)
_RESTORE = "restore the file from a copy, or remove the dataset's folder and build it again"


@dataclass(frozen=True)
class ShardHeader:
    """What a shard says about itself.

    `first_token` is the position of its first token in the split; `itemsize` is 2 or 4 bytes.
    """

    itemsize: int
    num_tokens: int
    first_token: int
    block_tokens: int
    vocab_size: int
    tokenizer_sha256: bytes

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the ids on disk."""
        return _DTYPES[self.itemsize]

    @property
    def num_blocks(self) -> int:
        """Blocks, the last one perhaps shorter."""
        return -(-self.num_tokens // self.block_tokens)

    def pack(self) -> bytes:
        """The header's bytes, its own CRC-32 last."""
        fields = _FIELDS.pack(
            MAGIC, VERSION, self.itemsize, self.num_tokens, self.first_token,
            self.block_tokens, self.vocab_size, self.tokenizer_sha256,
        )  # fmt: skip
        padded = fields.ljust(HEADER_BYTES - _CRC.size, b"\0")
        return padded + _CRC.pack(zlib.crc32(padded))

    @classmethod
    def unpack(cls, data: bytes, path: Path) -> Self:
        """Read a header.

        Raises:
            IntegrityError: It is no shard, of another version, or damaged.
        """
        if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
            raise IntegrityError(f"shard {path.name} has no shard header ({path})", _RESTORE)
        (crc,) = _CRC.unpack_from(data, HEADER_BYTES - _CRC.size)
        if zlib.crc32(data[: HEADER_BYTES - _CRC.size]) != crc:
            raise IntegrityError(f"shard {path.name}: its header is damaged ({path})", _RESTORE)
        _, version, *fields = _FIELDS.unpack_from(data)
        if version != VERSION:
            raise IntegrityError(
                f"shard {path.name} has format version {version}, this program reads {VERSION} "
                f"({path})",
                "use the program that wrote it, or build the dataset again",
            )
        return cls(*fields)


class ShardWriter:
    """Writes one shard; as a context manager, a failed one is left without a header.

    Raises:
        DataError: An id does not fit the vocabulary.
    """

    def __init__(
        self, path: Path, *, vocab_size: int, tokenizer_sha256: bytes, first_token: int,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:  # fmt: skip
        self._vocab_size, self._tokenizer_sha256 = vocab_size, tokenizer_sha256
        self._first_token, self._block_tokens = first_token, block_tokens
        self._itemsize = 2 if vocab_size <= 2**16 else 4
        self._pending = bytearray()
        self._crcs: list[int] = []
        self.num_tokens = 0
        self._file = path.open("wb")
        self._file.write(bytes(HEADER_BYTES))

    def append(self, ids: npt.NDArray[np.integer[Any]]) -> None:
        """Add ids at the end."""
        if not ids.size:
            return
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self._vocab_size:
            raise DataError(
                f"token ids {low}..{high} do not fit vocab_size {self._vocab_size}",
                "use the tokenizer that the dataset was declared with",
            )
        self._pending += ids.astype(_DTYPES[self._itemsize], copy=False).tobytes()
        self.num_tokens += len(ids)
        block_bytes = self._block_tokens * self._itemsize
        whole = len(self._pending) // block_bytes * block_bytes
        for start in range(0, whole, block_bytes):
            self._write_block(bytes(self._pending[start : start + block_bytes]))
        del self._pending[:whole]

    def close(self) -> None:
        """Write what is left, the checksums and, last, the header."""
        if self._pending:
            self._write_block(bytes(self._pending))
        table = np.array(self._crcs, dtype="<u4").tobytes()
        self._file.write(table + _CRC.pack(zlib.crc32(table)))
        self._file.seek(0)
        self._file.write(
            ShardHeader(
                self._itemsize, self.num_tokens, self._first_token, self._block_tokens,
                self._vocab_size, self._tokenizer_sha256,
            ).pack()
        )  # fmt: skip
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

    def _write_block(self, block: bytes) -> None:
        self._crcs.append(zlib.crc32(block))
        self._file.write(block)


class Shard:
    """An open shard. Safe for several threads: a block may be checked twice, never too seldom.

    Args:
        path: The file.
        sleep: Waits before a block that failed is fetched again.

    Raises:
        IntegrityError: On opening: not a shard, damaged header or checksums, or not as long as the
            header says. On reading: a touched block is damaged; the message names shard and block.
    """

    def __init__(self, path: Path, sleep: Callable[[float], None] = time.sleep) -> None:
        self.path, self._sleep = path, sleep
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise IntegrityError(
                f"shard {path.name} cannot be opened: {error} ({path})", _RESTORE
            ) from error
        self.header = ShardHeader.unpack(self._map[:HEADER_BYTES], path)
        end = HEADER_BYTES + self.header.num_tokens * self.header.itemsize
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
        self._tokens: TokenArray = np.frombuffer(
            self._map, dtype=self.header.dtype, count=self.header.num_tokens, offset=HEADER_BYTES
        )
        self._is_checked = np.zeros(self.header.num_blocks, dtype=np.bool_)
        self._refetched: dict[int, TokenArray] = {}

    def read(self, start: int, stop: int) -> TokenArray:
        """Tokens [start, stop) of this shard, as a read-only view of the file."""
        size = self.header.block_tokens
        first, last = start // size, (stop - 1) // size
        for block in range(first, last + 1):
            if not self._is_checked[block]:
                self._check(block)
        if self._refetched and not self._refetched.keys().isdisjoint(range(first, last + 1)):
            whole = np.concatenate([self._block(block) for block in range(first, last + 1)])
            whole.flags.writeable = False
            return whole[start - first * size : stop - first * size]
        return self._tokens[start:stop]

    def gather(self, starts_N: npt.NDArray[np.int64], length: int) -> TokenArray:
        """Stretches of equal length, of a block at most: [N, length], a new array."""
        size = self.header.block_tokens
        blocks = np.concatenate([starts_N // size, (starts_N + (length - 1)) // size])
        if not self._is_checked[blocks].all():
            for block in np.unique(blocks[~self._is_checked[blocks]]).tolist():
                self._check(block)
        if self._refetched:
            return np.stack([self.read(start, start + length) for start in starts_N.tolist()])
        windows = np.lib.stride_tricks.sliding_window_view(self._tokens, length)
        with Reading(f"shard {self.path.name}"):
            taken: TokenArray = windows[starts_N]
        return taken

    def read_block(self, block: int) -> TokenArray:
        """All tokens of one block, as a read-only view of the file."""
        start = block * self.header.block_tokens
        return self.read(start, min(start + self.header.block_tokens, self.header.num_tokens))

    def is_sound(self, block: int) -> bool:
        """Check a block of the file against its checksum now."""
        start = block * self.header.block_tokens
        tokens = self._tokens[start : start + self.header.block_tokens]
        return zlib.crc32(tokens.data) == int(self.crcs[block])

    def damaged_blocks(self) -> Iterator[int]:
        """Every block that fails its checksum now."""
        return (block for block in range(self.header.num_blocks) if not self.is_sound(block))

    def _check(self, block: int) -> None:
        with Reading(f"block {block} of shard {self.path.name}"):
            if not self.is_sound(block):
                self._refetched[block] = self._refetch(block)
        self._is_checked[block] = True

    def _block(self, block: int) -> TokenArray:
        start = block * self.header.block_tokens
        return self._refetched.get(block, self._tokens[start : start + self.header.block_tokens])

    def _refetch(self, block: int) -> TokenArray:
        """A block that failed its checksum, from storage itself."""
        first = block * self.header.block_tokens
        count = min(self.header.block_tokens, self.header.num_tokens - first)
        offset = HEADER_BYTES + first * self.header.itemsize
        num_bytes = count * self.header.itemsize
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
                return np.frombuffer(data, dtype=self.header.dtype)
        raise IntegrityError(
            f"shard {self.path.name}: block {block} (tokens from {first}, bytes from {offset}) "
            f"fails its checksum{reason} ({self.path})",
            _RESTORE,
        )


def _read_past_cache(path: Path, offset: int, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), offset, num_bytes, os.POSIX_FADV_DONTNEED)
        return os.pread(file.fileno(), num_bytes, offset)
