"""A Ray head on this machine, under a guard: one folder, loopback only, token always on.

Nobody outside this machine can reach it: every process binds to 127.0.0.1. Its folder is short
because Ray puts unix sockets into it (limit: 107 characters), and holds everything that it writes.
"""

import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from eagleray.platform.cluster import guard
from eagleray.platform.cluster.dashboard import Dashboard, read_token
from eagleray.platform.cluster.ports import HOST, free_ports
from eagleray.platform.cluster.versions import VERSION_LABEL, Versions
from eagleray.platform.errors import DeadlineExceededError, ServiceError

logger = logging.getLogger(__name__)

# A report of a training worker is taken up at the controller's next look (0.1-0.2 s instead of 2 s),
# and a worker group that cannot be placed is tried again, smaller, after 10 s instead of 60 s.
TRAIN_VARIABLES = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",
}
# Ray replaces 127.0.0.1 by the machine's outer address, and binds to all interfaces then, unless it
# believes to be on a system where clusters have one node only. The variable's name misleads:
# ray/_private/services.py, get_node_ip_address.
LOOPBACK_VARIABLES = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_QUIET_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Each log file of Ray's: 20 MB, one older copy.
    "RAY_ROTATION_MAX_BYTES": "20000000",
    "RAY_ROTATION_BACKUP_COUNT": "1",
    # A stopped job's driver has this long to save what it wants to.
    "RAY_JOB_STOP_WAIT_TIME_S": "10",
}
# They would lead a new cluster to the one that this process itself belongs to.
_FOREIGN_VARIABLES = (
    "RAY_ADDRESS",
    "RAY_API_SERVER_ADDRESS",
    "RAY_AUTH_TOKEN",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_NAMESPACE",
)
_LONGEST_TEMP = 30
_USUAL_DASHBOARD_PORT = 8265
_PREFIX = "eagleray-"
_PRIVATE_NOTE = "private"
_POLL_S = 0.1
_STOP_TIMEOUT_S = guard.END_TIMEOUT_S + 5.0
_LOG_TAIL = 1500


@dataclass(frozen=True)
class HeadOptions:
    """What a head offers and where it listens; all on loopback."""

    num_cpus: int | None
    num_gpus: int | None
    object_store_bytes: int
    gcs_port: int
    dashboard_port: int
    metrics_port: int
    is_lasting: bool
    """False for a cluster that lives for one command: it does without the autoscaler's monitor."""

    @property
    def ports(self) -> tuple[int, ...]:
        """Every port that was chosen beforehand."""
        return (self.gcs_port, self.dashboard_port, self.metrics_port)


def start_command(options: HeadOptions, folder: Path) -> list[str]:
    """The `ray start` that makes a head."""
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        f"--temp-dir={folder}",
        f"--node-ip-address={HOST}",
        f"--port={options.gcs_port}",
        "--include-dashboard=true",
        f"--dashboard-host={HOST}",
        f"--dashboard-port={options.dashboard_port}",
        f"--metrics-export-port={options.metrics_port}",
        # Chosen by the kernel at bind time: nobody can be faster.
        *("--dashboard-agent-listen-port=0", "--dashboard-agent-grpc-port=0"),
        *("--runtime-env-agent-port=0", "--node-manager-port=0", "--object-manager-port=0"),
        *("--min-worker-port=0", "--max-worker-port=0"),
        f"--object-store-memory={options.object_store_bytes}",
        f"--labels={VERSION_LABEL}={Versions.here().eagleray}",
        "--disable-usage-stats",
    ]
    if options.num_cpus is not None:
        command.append(f"--num-cpus={options.num_cpus}")
    if options.num_gpus is not None:
        command.append(f"--num-gpus={options.num_gpus}")
    if not options.is_lasting:
        command.append("--no-monitor")
    return command


def start_environment(base: Mapping[str, str], mark: str, token_file: Path) -> dict[str, str]:
    """The environment of every process of a cluster."""
    kept = {name: value for name, value in base.items() if name not in _FOREIGN_VARIABLES}
    if "PYTHONPATH" in kept:
        # The head runs in another folder than we do.
        parts = [os.path.abspath(part) for part in kept["PYTHONPATH"].split(os.pathsep) if part]
        kept["PYTHONPATH"] = os.pathsep.join(parts)
    # `ray job submit -- eagleray ...` must find the scripts of this environment.
    scripts = str(Path(sys.executable).parent)
    return {
        **kept,
        **_QUIET_VARIABLES,
        **TRAIN_VARIABLES,
        **LOOPBACK_VARIABLES,
        "PATH": os.pathsep.join([scripts, kept.get("PATH", os.defpath)]),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        "RAY_START_HOOK": "eagleray.platform.cluster.start_hook.configure",
        guard.MARK_VARIABLE: mark,
    }


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
            env=start_environment(os.environ, mark, token_file),
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
        """Return when the node is registered and the State API answers.

        Raises:
            ServiceError: The head ended; the message holds the end of what it said.
            DeadlineExceededError: It was not ready in time.
        """
        deadline = clock() + timeout_s
        dashboard = Dashboard(self.dashboard_url, read_token(self.token_file), timeout_s=5.0)
        try:
            while not _has_node(dashboard):
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
    """A new folder of mode 0700 with a name short enough for unix sockets inside it."""
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


def new_options(
    num_cpus: int | None,
    num_gpus: int | None,
    object_store_bytes: int,
    *,
    is_lasting: bool,
) -> HeadOptions:
    """Options with free ports; a lasting cluster gets Ray's usual dashboard port if it is free."""
    gcs_port, dashboard_port, metrics_port = free_ports([None, _USUAL_DASHBOARD_PORT if is_lasting else None, None])
    return HeadOptions(
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        object_store_bytes=object_store_bytes,
        gcs_port=gcs_port,
        dashboard_port=dashboard_port,
        metrics_port=metrics_port,
        is_lasting=is_lasting,
    )


def _has_node(dashboard: Dashboard) -> bool:
    try:
        return bool(dashboard.nodes())
    except (ServiceError, KeyError, TypeError):
        # Not listening yet, or its parts do not know of each other yet.
        return False
