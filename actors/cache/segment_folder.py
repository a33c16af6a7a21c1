"""The folder that the processes of a node share segments in: whose it is, who lives, who writes.

    alive   locked shared by each process that uses the folder, exclusively by who makes it or
            removes it
    lock    locked by the process that writes
    index   see segment_index.py
    segment-<number>   64 bytes of header, then frames; never written in place again

All locks are flock(2): the kernel releases them when a process dies, however it dies. Files with
other names, and segments with another header, are foreign: they are never read, counted or removed.
"""

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from eagleray.actors.cache.segment_index import (
    Geometry,
    IndexFormatError,
    SegmentIndex,
    bears_our_mark,
)
from eagleray.platform.errors import StorageError

PREFIX = "eagleray-segments-"
HEADER_BYTES = 64
_MAGIC = b"EVSEG\0\0\1"
_SEGMENT = re.compile(r"^segment-(\d{10})$")
_ALIVE, _LOCK, _INDEX = "alive", "lock", "index"
_TRIES = 100
_PAUSE_S = 0.001


class SegmentFolderError(StorageError):
    """A folder cannot be used for segments."""


class SegmentFolder:
    """A claimed folder. Not for several threads.

    Args:
        path: Made if it is not there, as its parents are.
        geometry: For a new folder; one that others use keeps its own.
        is_kept: Whether it outlives its last user.
        lock_wait_s: A writer that holds the lock for longer is not waited for.
        sleep: Waits so many seconds.

    Raises:
        SegmentFolderError: It belongs to somebody else, or cannot be made.
    """

    def __init__(
        self,
        path: Path,
        geometry: Geometry,
        is_kept: bool,
        lock_wait_s: float = 0.05,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.path, self._is_kept = path, is_kept
        self._lock_wait_s, self._sleep = lock_wait_s, sleep
        self._pid = os.getpid()
        try:
            self._alive, self.index = self._claim(geometry)
        except OSError as error:
            raise SegmentFolderError(
                f"{path} cannot hold segments of the feature cache: {error.strerror or error}",
                "free some room or choose another folder (`data.cache`)",
            ) from error

    def segment(self, number: int) -> Path:
        """The file of a segment."""
        return self.path / f"segment-{number:010d}"

    def numbers(self) -> list[int]:
        """The segments that are there, oldest first."""
        found = (_SEGMENT.match(name) for name in os.listdir(self.path))
        return sorted(n for match in found if match and self.index.gave(n := int(match[1])))

    def create(self, number: int) -> None:
        """Make the file of a segment, with all the room that it will take. For the writer.

        Raises:
            OSError: There is no room, or a file of this name.
        """
        path = self.segment(number)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Now and not when it is written: a full tmpfs must refuse, and not raise SIGBUS.
            os.posix_fallocate(descriptor, 0, self.index.geometry.segment_bytes)
            os.pwrite(descriptor, self._header(number), 0)
        except BaseException:  # Ctrl-C too: a file without its header would count as a segment.
            path.unlink()
            raise
        finally:
            os.close(descriptor)

    def is_ours(self, number: int, descriptor: int) -> bool:
        """Whether an open file is a segment that was made here."""
        head = os.pread(descriptor, HEADER_BYTES, 0)
        # Whoever made it may have died before the header: only then is it empty.
        return head == self._header(number) or not any(head)

    @contextmanager
    def writing(self) -> Iterator[bool]:
        """A context that one process at a time is in; gives False if another one stays in it."""
        # Opened each time: a lock belongs to the open file, which a fork would share.
        descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            yield self._locked(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Let go; the last user removes a folder that is not kept."""
        if self._alive < 0:
            return
        try:
            # A fork shares the lock with its parent and must not take it for its own.
            if not self._is_kept and os.getpid() == self._pid and _try_lock(self._alive):
                _remove(self.path)
        finally:
            os.close(self._alive)
            self._alive = -1

    def _claim(self, geometry: Geometry) -> tuple[int, SegmentIndex]:
        for _ in range(_TRIES):
            _make(self.path)
            try:
                alive = os.open(self.path / _ALIVE, os.O_RDWR | os.O_CREAT, 0o600)
            except FileNotFoundError:  # The last user has just removed the folder.
                continue
            try:
                if _try_lock(alive) and _is_at(alive, self.path / _ALIVE):
                    self._prepare(geometry)
                # From one lock to the other is not one step: somebody may have removed it all.
                if _try_lock(alive, fcntl.LOCK_SH) and _is_at(alive, self.path / _ALIVE):
                    return os.dup(alive), SegmentIndex(self.path / _INDEX)
            except FileNotFoundError:
                pass
            finally:
                os.close(alive)
            self._sleep(_PAUSE_S)
        raise SegmentFolderError(
            f"{self.path} is being made or removed by another process for too long",
            "end that process, or remove the folder",
        )

    def _prepare(self, geometry: Geometry) -> None:
        """Alone in the folder: make what is not there, and anew what does not fit."""
        index = self.path / _INDEX
        try:
            is_fit = SegmentIndex(index).geometry == geometry
        except FileNotFoundError:
            pass
        except IndexFormatError as error:
            if not bears_our_mark(index):
                raise SegmentFolderError(
                    f"{self.path} holds a file `{_INDEX}` that is not ours ({error.what})",
                    "choose another folder (`data.cache`)",
                ) from error
            _remove_files(self.path)
        else:
            if is_fit:
                return
            _remove_files(self.path)
        try:
            SegmentIndex.create(index, geometry)
        except OSError:
            _remove(self.path)
            raise

    def _header(self, number: int) -> bytes:
        head: bytes = _MAGIC + self.index.folder_id + number.to_bytes(8, "little")
        return head.ljust(HEADER_BYTES, b"\0")

    def _locked(self, descriptor: int) -> bool:
        give_up_s = time.monotonic() + self._lock_wait_s
        while not _try_lock(descriptor):
            if time.monotonic() >= give_up_s:
                return False
            self._sleep(_PAUSE_S)
        return True


def sweep(parent: Path) -> int:
    """Remove folders that nobody uses any more: their users were killed. How many there were."""
    removed = 0
    for path in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if not _is_private(path) or not bears_our_mark(path / _INDEX):
                continue
            alive = os.open(path / _ALIVE, os.O_RDWR)
            try:
                if _try_lock(alive) and _is_at(alive, path / _ALIVE):
                    _remove(path)
                    removed += 1
            finally:
                os.close(alive)
    return removed


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not _is_private(path):
        raise SegmentFolderError(
            f"{path} is no folder of user {os.getuid()}: another user could change what is read",
            "remove it, or choose another folder (`data.cache`)",
        )
    path.chmod(0o700)


def _is_private(path: Path) -> bool:
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one of this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
            return False
        raise
    return True


def _remove_files(path: Path) -> None:
    """Remove what was made here, but for the file that says who lives."""
    for name in os.listdir(path):
        file = path / name
        if _SEGMENT.match(name) and not _is_segment(file):
            continue
        if _SEGMENT.match(name) or name in (_LOCK, _INDEX, f"{_INDEX}.new"):
            file.unlink(missing_ok=True)


def _is_segment(file: Path) -> bool:
    with file.open("rb") as opened:
        head = opened.read(HEADER_BYTES)
    return head.startswith(_MAGIC[:5]) or not any(head)


def _remove(path: Path) -> None:
    _remove_files(path)
    (path / _ALIVE).unlink(missing_ok=True)
    # Not empty: something foreign is in it, or another process has begun anew.
    with suppress(OSError):
        path.rmdir()
