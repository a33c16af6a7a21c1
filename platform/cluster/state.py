"""What `eagleray up` leaves on storage, so that any later process finds its cluster again.

    <storage>/cluster/state.json    one cluster; replaced whole
                      token         its secret, mode 0600
                      lock          held while up or down work

A recorded cluster is alive only if its guard is: same boot, same pid, same start time, same folder
on its command line. A pid that the system used again is therefore never taken for ours.
"""

import contextlib
import fcntl
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from eagleray.platform.cluster.guard import start_ticks
from eagleray.platform.cluster.versions import Versions
from eagleray.platform.errors import DeadlineExceededError, NotFoundError, StorageError
from eagleray.platform.storage import Storage

FORMAT = 1
_FOLDER = "cluster"
_STATE, _TOKEN, _LOCK = (_FOLDER, "state.json"), (_FOLDER, "token"), (_FOLDER, "lock")
_LOCK_POLL_S = 0.1


@dataclass(frozen=True)
class ClusterState:
    """One cluster that `up` started."""

    mark: str
    guard_pid: int
    guard_start_ticks: int
    boot_id: str
    host: str
    address: str
    dashboard_url: str
    metrics_port: int
    folder: str
    token_file: str
    versions: Versions
    started_s: float

    @property
    def is_here(self) -> bool:
        """Whether it was started on this machine."""
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Whether its guard still runs on this machine."""
        return (
            self.is_here
            and self.boot_id == boot_id()
            and self.guard_start_ticks == start_ticks(self.guard_pid)
            and self.folder.encode() in _command_line(self.guard_pid)
        )


class ClusterRecord:
    """The record of one project's cluster."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    @property
    def token_file(self) -> Path:
        """Where the token is kept while the cluster runs."""
        return self._storage.path(*_TOKEN)

    def read(self) -> ClusterState | None:
        """The recorded cluster, alive or not; None if there is none.

        Raises:
            StorageError: The record is of another format.
        """
        try:
            content = self._storage.read_json(*_STATE)
        except NotFoundError:
            return None
        try:
            found = content.pop("format")
            if found == FORMAT:
                return ClusterState(**{**content, "versions": Versions(**content["versions"])})
        except (AttributeError, KeyError, TypeError) as error:
            found = f"unreadable ({error})"
        path = self._storage.path(*_STATE)
        raise StorageError(
            f"{path} has format {found}, this version reads {FORMAT}",
            "stop that cluster with the version that started it, or remove the file",
        )

    def write(self, state: ClusterState) -> None:
        """Record a cluster."""
        self._storage.put_json({"format": FORMAT, **asdict(state)}, *_STATE)

    def forget(self) -> None:
        """Remove the record and the token."""
        self._storage.remove(*_STATE)
        self._storage.remove(*_TOKEN)

    @contextlib.contextmanager
    def locked(
        self,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Iterator[None]:
        """Keep other `up` and `down` commands out.

        Raises:
            DeadlineExceededError: Another one held the lock all the time.
        """
        path = self._storage.path(*_LOCK)
        path.parent.mkdir(parents=True, exist_ok=True)
        deadline = clock() + timeout_s
        with path.open("w") as lock:
            while not _try_lock(lock.fileno()):
                if clock() >= deadline:
                    raise DeadlineExceededError(
                        f"another `up` or `down` has held {path} for {timeout_s:.0f} s",
                        "wait for it to end, or stop it",
                    )
                sleep(_LOCK_POLL_S)
            yield


def boot_id() -> str:
    """Names the time since this machine last started."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
