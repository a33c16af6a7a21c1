"""A Ray head on this machine, under a guard: one folder, loopback only, token always on.

Nobody outside this machine can reach it: every process binds to 127.0.0.1. Its folder holds
everything that it writes, and only this user may enter it: Ray opens its own folders to everybody.
"""

import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from eagleray.platform.cluster import guard
from eagleray.platform.cluster.dashboard import Dashboard
from eagleray.platform.cluster.gcs import has_node
from eagleray.platform.cluster.options import HeadOptions, start_command, start_environment
from eagleray.platform.cluster.ports import HOST
from eagleray.platform.cluster.tokens import read_token
from eagleray.platform.errors import DeadlineExceededError, ServiceError

logger = logging.getLogger(__name__)

# Ray puts sockets of up to 88 characters below it; the system allows 107.
_LONGEST_TEMP = 16
_PREFIX = "eagleray-"
_PRIVATE_NOTE = "private"
_POLL_S = 0.1
_STOP_TIMEOUT_S = guard.END_TIMEOUT_S + 5.0
_LOG_TAIL = 1500


class Head:
    """A head that was started: first ours, then, if we detach, on its own.

    Until `detach` the head ends when this process does, however that happens.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        options: HeadOptions,
        mark: str,
        folder: Path,
        token_file: Path,
        log: IO[bytes],
    ) -> None:
        self._process, self._log = process, log
        self.mark, self.folder, self.token_file = mark, folder, token_file
        self.address = f"{HOST}:{options.gcs_port}"
        self.dashboard_url = f"http://{HOST}:{options.dashboard_port}"
        self.metrics_port = options.metrics_port
        self._has_dashboard = options.has_dashboard

    @classmethod
    def start(cls, options: HeadOptions, folder: Path, token_file: Path) -> "Head":
        """Start one; it is not ready yet.

        Args:
            options: What it offers.
            folder: From `new_folder`; the guard removes it.
            token_file: Holds the secret that every process of the cluster must present.
        """
        mark = secrets.token_hex(8)
        log = (folder / "head.log").open("w+b")
        process = subprocess.Popen(
            [
                *(sys.executable, "-I", guard.__file__, mark, str(folder)),
                *start_command(options, folder),
            ],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd=folder,
            env=start_environment(os.environ, options, mark, folder, token_file),
            # A Ctrl-C at the terminal is for the owner; it decides what becomes of the cluster.
            start_new_session=True,
        )
        if not options.is_lasting:
            note = f"{mark} {process.pid} {guard.start_ticks(process.pid)}"
            (folder / _PRIVATE_NOTE).write_text(note)
        return cls(process, options, mark, folder, token_file, log)

    @property
    def guard_pid(self) -> int:
        """The process that everything else of the cluster descends from."""
        return self._process.pid

    def wait_ready(
        self,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Return when the node is registered and the dashboard, if there is one, knows of it.

        Raises:
            ServiceError: The head ended; the message holds the end of what it said.
            DeadlineExceededError: It was not ready in time.
        """
        deadline, token = clock() + timeout_s, read_token(self.token_file)
        dashboard = Dashboard(self.dashboard_url, token, timeout_s=5.0)
        try:
            while not (
                _has_node(dashboard)
                if self._has_dashboard
                else has_node(self.address, token, timeout_s=5.0)
            ):
                if self._process.poll() is not None:
                    raise ServiceError(
                        f"the Ray head ended while it started:\n{self._said()}",
                        "correct what it complains about",
                    )
                if clock() >= deadline:
                    raise DeadlineExceededError(
                        f"the Ray head was not ready in {timeout_s:.0f} s:\n{self._said()}",
                        "raise cluster.start_timeout_s if the machine is busy",
                    )
                sleep(_POLL_S)
        finally:
            dashboard.close()

    def detach(self) -> None:
        """Let the head live on after this process."""
        stdin = self._process.stdin
        if stdin is not None:
            stdin.write(guard.DETACH)
            stdin.close()
        self._log.close()
        # It outlives us on purpose; Popen would warn that it still runs.
        self._process.returncode = 0

    def stop(self) -> None:
        """End every process of the cluster and remove its folder; safe to call again."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("guard of the cluster did not end pid=%d", self._process.pid)
            self._process.kill()
            self._process.wait()
        guard.end_family(self.mark)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._log.close()

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-_LOG_TAIL:].strip()


def new_folder() -> Path:
    """A new folder that nobody else may enter, short enough for Ray's unix sockets inside it."""
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_base()))


def remove_abandoned() -> None:
    """Remove what private clusters left whose guard was killed, which nothing could prevent."""
    for note in _base().glob(f"{_PREFIX}*/{_PRIVATE_NOTE}"):
        try:
            if note.stat().st_uid != os.getuid():
                continue
            mark, pid, started = note.read_text().split()
        except (OSError, ValueError):  # being made or removed right now
            continue
        if str(guard.start_ticks(int(pid))) != started:
            logger.info("removing an abandoned cluster folder=%s", note.parent)
            guard.end_family(mark)
            shutil.rmtree(note.parent, ignore_errors=True)


def _base() -> Path:
    base = tempfile.gettempdir()
    return Path(base if len(base) <= _LONGEST_TEMP else "/tmp")


def _has_node(dashboard: Dashboard) -> bool:
    try:
        return bool(dashboard.nodes())
    except (ServiceError, KeyError, TypeError):
        # Not listening yet, or its parts do not know of each other yet.
        return False
