"""A file of a checkpoint as it is written: its SHA-256 is taken on the way, its pace is held.

So no byte is read back to be digested, and the digest is that of what was meant to be written.
"""

import hashlib
import io
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_CHUNK_BYTES = 1 << 20
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
        self._num_bytes = self._num_synced = 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Bytes written so far."""
        return self._num_bytes

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write the beginning of `data`.

        Returns:
            How many bytes were written.

        Raises:
            OSError: The system refused; `error` keeps it, as callers in C++ lose it.
        """
        chunk = memoryview(data).cast("B")[: self._pacer.chunk_bytes]
        self._pacer.wait(len(chunk))
        try:
            if self._descriptor < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._descriptor = os.open(self._path, flags, 0o666)
            written = os.write(self._descriptor, chunk)
            self._sha256.update(chunk[:written])
            self._num_bytes += written
            pace = self._pacer.bytes_per_s
            if pace is not None and self._num_bytes - self._num_synced >= pace:
                os.fdatasync(self._descriptor)
                self._num_synced = self._num_bytes
        except OSError as error:
            self.error = error
            raise
        return written

    def close(self) -> None:
        """Make it durable and close it.

        Raises:
            OSError: The system refused; nobody knows then what of it is on the disk.
        """
        if self.closed:
            return
        super().close()
        if self._descriptor < 0:
            return
        try:
            if self.error is None:
                os.fsync(self._descriptor)
        except OSError as error:
            self.error = error
            raise
        finally:
            os.close(self._descriptor)

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
