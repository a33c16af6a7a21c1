"""A file of a checkpoint as it is written: its SHA-256 is taken on the way, its pace is held.

So no byte is read back to be digested, and the digest is that of what was meant to be written.

A large file goes around the system's page cache (O_DIRECT, see open(2)): filling the cache takes
the CPU longer than all else that is done here, and pushes out what training reads.
"""

import contextlib
import errno
import fcntl
import hashlib
import io
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_CHUNK_BYTES = 1 << 20
_BLOCK_BYTES = 4096
"""What writes around the page cache are aligned to: no disk has larger blocks."""
_CHUNKS_PER_S = 10
"""Of a paced writer, so that it neither bursts nor wakes all the time."""
_NICE = 10


class WrittenFile(NamedTuple):
    """What a manifest says of a file."""

    bytes: int
    sha256: str


class Pacer:
    """Holds the writes of all threads together to so many bytes per second; None: to no pace.

    Args:
        bytes_per_s: The pace, kept over any time but for a chunk of each thread.
        clock: Seconds, monotonic.
        sleep: Waits for seconds.
    """

    def __init__(
        self,
        bytes_per_s: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    @property
    def chunk_bytes(self) -> int:
        """Most bytes that should be written between two waits."""
        if self.bytes_per_s is None:
            return _CHUNK_BYTES
        return max(1, min(_CHUNK_BYTES, self.bytes_per_s // _CHUNKS_PER_S))

    def wait(self, num_bytes: int) -> None:
        """Return when it is time to write so many bytes."""
        if self.bytes_per_s is None:
            return
        with self._lock:
            now_s = self._clock()
            begin_s = max(now_s, self._free_at_s)
            self._free_at_s = begin_s + num_bytes / self.bytes_per_s
        if begin_s > now_s:
            self._sleep(begin_s - now_s)


class ShardFile(io.RawIOBase):
    """A new file, written once from its beginning to its end, and durable when it is closed.

    It is opened by the first write. A paced one reaches the disk at its pace as well, not all at
    its end out of the system's memory.
    """

    def __init__(self, path: Path, pacer: Pacer) -> None:
        self._path, self._pacer = path, pacer
        self._descriptor = -1
        self._sha256 = hashlib.sha256()
        self._chunk = mmap.mmap(-1, _CHUNK_BYTES)  # begins at a page: aligned
        self._num_waiting = 0  # bytes of the chunk that are not written yet
        self._num_bytes = self._num_synced = 0
        self._is_direct: bool | None = None  # not known yet
        self.error: OSError | None = None

    def writable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Bytes given so far."""
        return self._num_bytes + self._num_waiting

    def write(self, data: "ReadableBuffer", /) -> int:
        """Take the beginning of `data`; it is written when a chunk is full, or at the end.

        Returns:
            How many bytes were taken.

        Raises:
            OSError: The system refused; `error` keeps it, as callers in C++ lose it.
        """
        most = self._pacer.chunk_bytes
        taken = memoryview(data).cast("B")[: most - self._num_waiting]
        self._chunk[self._num_waiting : self._num_waiting + len(taken)] = taken
        self._num_waiting += len(taken)
        if self._num_waiting == most:
            with self._kept():
                if self._is_direct is None:
                    self._go_direct(is_direct=most == _CHUNK_BYTES)
                self._write_out(most)
        return len(taken)

    def _write_out(self, num_bytes: int) -> None:
        """Write the beginning of the chunk, and keep the rest."""
        with memoryview(self._chunk) as chunk:
            self._pacer.wait(num_bytes)
            written = 0
            while written < num_bytes:
                written += self._written(chunk[written:num_bytes])
            self._sha256.update(chunk[:num_bytes])
            rest = self._num_waiting - num_bytes
            chunk[:rest] = chunk[num_bytes : self._num_waiting]
        self._num_bytes, self._num_waiting = self._num_bytes + num_bytes, rest
        pace = self._pacer.bytes_per_s
        if pace is not None and self._num_bytes - self._num_synced >= pace:
            os.fdatasync(self._descriptor)
            self._num_synced = self._num_bytes

    def _opened(self) -> int:
        if self._descriptor < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o666)
        return self._descriptor

    def _written(self, data: memoryview) -> int:
        try:
            return os.write(self._opened(), data)
        except OSError as error:
            # A file system that goes direct in larger blocks only.
            if not self._is_direct or error.errno != errno.EINVAL:
                raise
            self._go_direct(is_direct=False)
            return os.write(self._descriptor, data)

    def _go_direct(self, *, is_direct: bool) -> None:
        """Go around the page cache, or through it, from now on; where one cannot, through it."""
        self._is_direct = False
        flag = getattr(os, "O_DIRECT", 0)
        descriptor = self._opened()
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~flag
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | flag if is_direct else flags)
            self._is_direct = is_direct
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """Keep the error that is raised in the context."""
        try:
            yield
        except OSError as error:
            self.error = error
            raise

    def close(self) -> None:
        """Make it durable and close it.

        Raises:
            OSError: The system refused; nobody knows then what of it is on the disk.
        """
        if self.closed:
            return
        super().close()
        try:
            if self.error is None:
                with self._kept():
                    self._end()
        finally:
            if self._descriptor >= 0:
                os.close(self._descriptor)

    def _end(self) -> None:
        if self._num_waiting:
            if self._is_direct:
                self._write_out(self._num_waiting // _BLOCK_BYTES * _BLOCK_BYTES)
                self._go_direct(is_direct=False)
            self._write_out(self._num_waiting)
        if self._descriptor >= 0:
            os.fsync(self._descriptor)

    def written(self) -> WrittenFile:
        """What it holds."""
        return WrittenFile(self._num_bytes, self._sha256.hexdigest())


def give_way() -> None:
    """Let this thread, and those that it starts, yield the CPU and the disk to all others.

    Linux derives the priority of a thread's input and output from its niceness, unless told.
    """
    if sys.platform == "linux":  # where niceness is a thread's own
        thread = threading.get_native_id()
        nice = max(os.getpriority(os.PRIO_PROCESS, thread), _NICE)
        os.setpriority(os.PRIO_PROCESS, thread, nice)
