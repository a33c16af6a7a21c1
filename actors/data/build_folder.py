"""Where a build works until its dataset is published: a hidden folder that survives a kill."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from eagleray.platform.errors import DataError, StorageError
from eagleray.platform.storage import Storage


@contextmanager
def building(storage: Storage, name: str, on_wait: Callable[[], None]) -> Iterator[Path]:
    """The folder of one build, for one process at a time.

    It stays if the build may be continued: not if it succeeded, nor if files or settings must
    change, for then it is another build. Each running build holds the lock of all shared; one that
    is alone removes what others left.

    Args:
        storage: Gets `datasets/.build-<name>/`.
        name: The same for builds that give the same units.
        on_wait: Called if another process is at this build.

    Raises:
        StorageError: It cannot be made.
    """
    root = storage.path("datasets")
    folder = root / f".build-{name}"
    with ExitStack() as stack:
        with named_failure(root):
            root.mkdir(parents=True, exist_ok=True)
            shared = stack.enter_context((root / ".building.lock").open("w"))
            with suppress(BlockingIOError):
                fcntl.flock(shared, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Folders only: a temporary file may be another process writing a pointer right now.
                for path in [*root.glob(".tmp-*/"), *root.glob(".build-*/")]:
                    if path != folder:
                        shutil.rmtree(path, ignore_errors=True)
            fcntl.flock(shared, fcntl.LOCK_SH)
            stack.enter_context(_owned(folder, on_wait))
        try:
            yield folder
        except DataError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _owned(folder: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """The lock of a build's folder, which is made for it."""
    with ExitStack() as stack:
        while True:
            folder.mkdir(exist_ok=True)
            # The one before may remove the folder at any moment, and a third make it anew.
            with suppress(FileNotFoundError):
                lock = stack.enter_context((folder / ".lock").open("w"))
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    on_wait()
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if os.path.samestat(os.fstat(lock.fileno()), (folder / ".lock").stat()):
                    break
        yield


@contextmanager
def named_failure(folder: Path) -> Iterator[None]:
    """Says which folder an error of the system was met in."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"storage cannot write {folder}: {error.strerror or error}",
            "check that it is writable and has room",
        ) from error
