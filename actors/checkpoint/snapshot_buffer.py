"""Shared memory that a worker copies a snapshot into, and that the store writes to storage from.

A buffer is an anonymous file in memory (memfd_create(2)) of the store's process, which a worker of
the same node opens as `/proc/<pid>/fd/<n>`. It has no name that somebody must remove: the kernel
frees it when the last process that has it open or mapped is gone, however it ended. It counts
against the memory of the node, not against the size of /dev/shm, which containers set to 64 MB.

    0     token, 16 bytes: random, for a pid is used again
    16    state, attempt, step: int64 each; state 1 while a worker copies, 2 when all is there
    4096  the arrays, each at a multiple of 64

Its size is sealed: nobody can cut it under a process that has it mapped.
"""

import fcntl
import mmap
import os
import secrets
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eagleray.platform.errors import StorageError

_TOKEN_BYTES = 16
_HEADER = struct.Struct("<qqq")
_DATA = 4096
_ALIGN = 64
_FILLING, _COMPLETE = 1, 2
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_CGROUP = Path("/sys/fs/cgroup")


class NoRoomError(StorageError):
    """Memory has no room for a buffer."""


@dataclass(frozen=True)
class BufferName:
    """How another process of the node finds a buffer."""

    pid: int
    descriptor: int
    token: bytes
    num_bytes: int
    """Room for arrays."""


@dataclass(frozen=True)
class ArrayPlace:
    """Where an array lies among the arrays of a buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Placed:
    """Arrays that lie in a buffer instead of in the message that names it."""

    buffer: BufferName
    places: tuple[ArrayPlace, ...]


def lay_out(
    arrays: Iterable[tuple[str, np.dtype, tuple[int, ...]]],
) -> tuple[tuple[ArrayPlace, ...], int]:
    """Places for arrays one after the other, and the bytes that they take together."""
    places, offset = [], 0
    for name, dtype, shape in arrays:
        places.append(ArrayPlace(name, dtype.str, shape, offset))
        num_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        offset += -(-num_bytes // _ALIGN) * _ALIGN
    return tuple(places), offset


class SnapshotBuffer:
    """A buffer as one process has it mapped. Arrays that it gave keep the mapping after `close`."""

    def __init__(self, name: BufferName, descriptor: int, *, is_owner: bool) -> None:
        self.name, self._is_owner = name, is_owner
        self._data = mmap.mmap(descriptor, _DATA + name.num_bytes)

    @classmethod
    def create(cls, num_bytes: int, available: int | None = None) -> "SnapshotBuffer":
        """A new one, with all the room that it will take; `available` bytes are free for it.

        Raises:
            NoRoomError: It does not fit into memory.
        """
        available = available_bytes() if available is None else available
        if num_bytes + _DATA > available:
            raise _no_room(num_bytes, available)
        descriptor = os.memfd_create("eagleray-snapshot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Now and not when it is filled: what has no room must be an error here, not SIGBUS.
            os.posix_fallocate(descriptor, 0, _DATA + num_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            token = secrets.token_bytes(_TOKEN_BYTES)
            os.pwrite(descriptor, token, 0)
            name = BufferName(os.getpid(), descriptor, token, num_bytes)
            return cls(name, descriptor, is_owner=True)
        except OSError as error:
            os.close(descriptor)
            raise _no_room(num_bytes, available) from error

    @classmethod
    def attach(cls, name: BufferName) -> "SnapshotBuffer":
        """Map one that a process of this node made.

        Raises:
            OSError: It cannot be opened: that process is gone, or in another container.
            LookupError: Something else has its place by now.
        """
        descriptor = os.open(f"/proc/{name.pid}/fd/{name.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            if (size, os.pread(descriptor, _TOKEN_BYTES, 0)) != (
                _DATA + name.num_bytes,
                name.token,
            ):
                raise LookupError(f"/proc/{name.pid}/fd/{name.descriptor} is another file by now")
            return cls(name, descriptor, is_owner=False)
        finally:
            os.close(descriptor)

    @property
    def mapped_bytes(self) -> int:
        """Length of the mapping."""
        return len(self._data)

    @property
    def address(self) -> int:
        """Where it begins in this process."""
        return int(np.frombuffer(self._data, np.uint8).ctypes.data)

    def fill(self, attempt: int, step: int) -> None:
        """Say that a copy begins: what lies here is no state until `complete`."""
        _HEADER.pack_into(self._data, _TOKEN_BYTES, _FILLING, attempt, step)

    def complete(self, attempt: int, step: int) -> None:
        """Say that all of a state has been copied."""
        _HEADER.pack_into(self._data, _TOKEN_BYTES, _COMPLETE, attempt, step)

    def holds(self, attempt: int, step: int) -> bool:
        """Whether all of this state lies here."""
        held: tuple[int, ...] = _HEADER.unpack_from(self._data, _TOKEN_BYTES)
        return held == (_COMPLETE, attempt, step)

    def arrays(self, places: Iterable[ArrayPlace]) -> dict[str, np.ndarray]:
        """Views of the arrays here."""
        return {
            place.name: np.ndarray(
                place.shape, place.dtype, buffer=self._data, offset=_DATA + place.offset
            )
            for place in places
        }

    def close(self) -> None:
        """Let go of the file; memory is free when nothing has it mapped any more. Repeatable."""
        if self._is_owner:
            self._is_owner = False
            os.close(self.name.descriptor)


def placed_arrays(placed: Placed, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All arrays of a state of which some lie in a buffer of this node; raises as `attach`."""
    return {**SnapshotBuffer.attach(placed.buffer).arrays(placed.places), **arrays}


def available_bytes() -> int:
    """Memory that can still be taken: of the machine, and of the container if it has a limit."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    free = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
    except OSError:  # no limit, or the first version of cgroups
        return free
    return free if limit == "max" else min(free, int(limit) - used)


def _no_room(num_bytes: int, available: int) -> NoRoomError:
    return NoRoomError(
        f"a snapshot needs {num_bytes:,} bytes of shared memory, {max(available, 0):,} are free",
        "give the node more memory, or train a smaller model",
    )
