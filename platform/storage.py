"""One folder that every node sees, and the few operations on it that cannot leave half a file.

Laws:
    * A reader sees a file as it was before or after a write, never in between: each write goes to
      a temporary name beside its target, is synced, and is renamed.
    * `put_if_absent` and `compare_and_set` are atomic between processes on this file system.
    * A folder is published whole: it is filled under a temporary name and renamed when complete.
    * What a call wrote survives a crash of the machine once it returned, the names above it too.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagleray.platform.errors import ConflictError, NotFoundError, StorageError

_TEMPORARY = ".tmp-"
_ASIDE = ".old-"


class Storage:
    """Atomic files and folders under one root.

    Args:
        root: The absolute folder; created on first write.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, *parts: str) -> Path:
        """Where something is kept; it need not exist.

        Raises:
            StorageError: The parts lead out of the root.
        """
        path = self.root.joinpath(*parts)
        if not path.resolve().is_relative_to(self.root.resolve()):
            raise StorageError(f"path {'/'.join(parts)!r} leads out of storage {self.root}")
        return path

    def probe(self) -> None:
        """Prove that the root can be written.

        Raises:
            StorageError: It cannot, with the system's reason.
        """
        with _named_failure(self.root):
            _make_folder(self.root)
            marker = self.root / f"{_TEMPORARY}{uuid.uuid4().hex}"
            marker.write_bytes(b"")
            marker.unlink()

    def read(self, *parts: str) -> bytes:
        """The bytes of a file.

        Raises:
            NotFoundError: There is none.
        """
        path = self.path(*parts)
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise NotFoundError(f"storage has no {'/'.join(parts)} under {self.root}") from None

    def read_json(self, *parts: str) -> Any:
        """A JSON file's value.

        Raises:
            NotFoundError: There is none.
            StorageError: It is not JSON.
        """
        data = self.read(*parts)
        try:
            return json.loads(data)
        except ValueError as error:
            raise StorageError(
                f"{self.path(*parts)} is not JSON: {error}", "restore it from a copy, or remove it"
            ) from error

    def put(self, data: bytes, *parts: str) -> None:
        """Write or replace a file atomically and durably."""
        path = self.path(*parts)
        with _named_failure(path), _temporary_beside(path) as temporary:
            _write_synced(temporary, data)
            temporary.replace(path)
            sync_folder(path.parent)

    def put_json(self, value: Any, *parts: str) -> None:
        """Write a value as JSON, atomically and durably."""
        self.put(canonical_json(value), *parts)

    def put_if_absent(self, data: bytes, *parts: str) -> bool:
        """Write a file unless it exists; tell whether this call wrote it."""
        path = self.path(*parts)
        with _named_failure(path), _temporary_beside(path) as temporary:
            _write_synced(temporary, data)
            try:
                # A hard link fails if the name exists; a rename would replace it.
                os.link(temporary, path)
            except FileExistsError:
                return False
            sync_folder(path.parent)
            return True

    def compare_and_set(self, expected: bytes | None, data: bytes, *parts: str) -> None:
        """Replace a file only if it still holds `expected` (None: does not exist).

        Raises:
            ConflictError: It holds something else by now.
        """
        path = self.path(*parts)
        with _named_failure(path), _locked(path):
            found = path.read_bytes() if path.exists() else None
            if found != expected:
                raise ConflictError(
                    f"{'/'.join(parts)} was changed by somebody else meanwhile",
                    "look again, then retry",
                )
            self.put(data, *parts)

    @contextlib.contextmanager
    def locked(self, *parts: str) -> Iterator[None]:
        """Exclude all others, of any process, that ask for the lock of this name."""
        path = self.path(*parts)
        with contextlib.ExitStack() as held:
            with _named_failure(path):
                held.enter_context(_locked(path))
            yield

    def names(self, *parts: str) -> list[str]:
        """Names inside a folder, sorted, without unfinished ones; none if it does not exist."""
        path = self.path(*parts)
        if not path.is_dir():
            return []
        return sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))

    @contextlib.contextmanager
    def staging_folder(self, *parts: str) -> Iterator[Path]:
        """An unseen folder under `parts` to fill; what is not published by the end is dropped."""
        parent = self.path(*parts)
        with _named_failure(parent), _temporary_beside(parent / "_") as temporary:
            temporary.mkdir()
            yield temporary

    def publish(self, folder: Path, *parts: str) -> None:
        """Make a staging folder appear, whole and durable, under a name.

        A folder that is already there stays: published folders are content-addressed or
        versioned, so the first complete one wins.
        """
        path = self.path(*parts)
        with _named_failure(path):
            _make_folder(path.parent)
            sync_tree(folder)
            try:
                folder.rename(path)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            sync_folder(path.parent)

    def replace(self, folder: Path, *parts: str) -> None:
        """Publish a staging folder in the place of one that may be there.

        No crash loses both: until the new one is there the old one lies aside, from where
        `remove_unfinished` brings it back.
        """
        path = self.path(*parts)
        aside = path.with_name(f"{_ASIDE}{path.name}")
        with _named_failure(path):
            if not path.exists():
                self.publish(folder, *parts)
                return
            sync_tree(folder)
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            sync_folder(path.parent)  # Some file systems do not keep the order of two renames.
            try:
                self.publish(folder, *parts)
            except BaseException:  # Also at Ctrl-C: the old folder must not stay aside.
                if not path.exists():
                    aside.rename(path)
                raise
            shutil.rmtree(aside, ignore_errors=True)

    @contextlib.contextmanager
    def publish_folder(self, *parts: str) -> Iterator[Path]:
        """Fill the folder that is given; it appears under its name when the block ends well."""
        with self.staging_folder(*parts[:-1]) as folder:
            yield folder
            self.publish(folder, *parts)

    def remove(self, *parts: str) -> None:
        """Remove a file or folder; it vanishes in one step, then its bytes are freed."""
        path = self.path(*parts)
        with _named_failure(path):
            if path.is_dir():
                doomed = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
                path.rename(doomed)
                # Else a crash might bring the name back, with some of its files.
                sync_folder(path.parent)
                shutil.rmtree(doomed, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def remove_unfinished(self, *parts: str) -> None:
        """Undo what killed writers left inside a folder; only where no other writes now."""
        path = self.path(*parts)
        with _named_failure(path):
            for aside in path.glob(f"{_ASIDE}*"):
                replaced = path / aside.name.removeprefix(_ASIDE)
                if replaced.exists():
                    shutil.rmtree(aside, ignore_errors=True)
                else:
                    aside.rename(replaced)
                    sync_folder(path)
            for left in path.glob(f"{_TEMPORARY}*"):
                if left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    left.unlink(missing_ok=True)

    def append(self, line: bytes, *parts: str) -> None:
        """Add a line to a file in one write, so that lines of several writers do not mix.

        It is not synced: a crash of the machine may lose the last lines. A line that a writer left
        unfinished is ended first, so it spoils no other.

        Raises:
            StorageError: It could not be written whole.
        """
        path = self.path(*parts)
        with _named_failure(path):
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                size = os.fstat(descriptor).st_size
                is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
                data = (b"\n" if is_torn else b"") + line + b"\n"
                if os.write(descriptor, data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(descriptor)


def canonical_json(value: Any) -> bytes:
    """The one byte form of a JSON value: sorted keys, no spaces, UTF-8 (after RFC 8785)."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def digest_bytes(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in bounded memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(path: Path) -> None:
    """Make the names inside a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Make every file and name below a folder durable."""
    for folder, _, files in os.walk(path):
        for name in files:
            descriptor = os.open(Path(folder) / name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(folder))


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _make_folder(path: Path) -> None:
    if path.is_dir():
        return
    _make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    _make_folder(path.parent)
    with (path.parent / f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _temporary_beside(path: Path) -> Iterator[Path]:
    _make_folder(path.parent)
    temporary = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
    try:
        yield temporary
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _named_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"storage cannot write {path}: {error.strerror or error}",
            "check that it is writable and has room, or set storage.uri to a folder that is",
        ) from error
