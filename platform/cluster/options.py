"""What a Ray head is told: its command line and the environment of everything that it starts."""

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from eagleray.platform.cluster import guard, start
from eagleray.platform.cluster.ports import HOST, free_ports
from eagleray.platform.cluster.versions import VERSION_LABEL, Versions
from eagleray.platform.config import ClusterConfig

# A report of a training worker is taken up at the controller's next look, every 0.2 s instead of
# 2 s, and a worker group that cannot be placed is tried again, smaller, after 10 s instead of 60 s.
TRAIN_VARIABLES = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",
}
# A node whose raylet was killed is missed after 3 s instead of 15 s.
HEALTH_VARIABLES = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "6",
}
# Ray replaces 127.0.0.1 by the machine's outer address, and binds to all interfaces then, unless it
# believes to be on a system where clusters have one node only. The variable's name misleads:
# ray/_private/services.py, get_node_ip_address.
LOOPBACK_VARIABLES = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# A stopped job's driver has this long to save what it wants to.
STOP_VARIABLES = {"RAY_JOB_STOP_WAIT_TIME_S": "20"}
_QUIET_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Each log file of Ray's: 20 MB, one older copy.
    "RAY_ROTATION_MAX_BYTES": "20000000",
    "RAY_ROTATION_BACKUP_COUNT": "1",
}
# They would lead a new cluster to the one that this process itself belongs to.
_FOREIGN_VARIABLES = (
    "RAY_ADDRESS",
    "RAY_API_SERVER_ADDRESS",
    "RAY_AUTH_TOKEN",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_NAMESPACE",
    "RAY_START_HOOK",
)
_USUAL_DASHBOARD_PORT = 8265


@dataclass(frozen=True)
class HeadOptions:
    """What a head offers and where it listens; all on loopback."""

    num_cpus: int | None
    num_gpus: int | None
    object_store_bytes: int
    gcs_port: int
    dashboard_port: int
    metrics_port: int
    dashboard_metrics_port: int
    monitor_metrics_port: int
    is_lasting: bool
    """False for a cluster that lives for one command: it does without the autoscaler's monitor."""
    has_dashboard: bool = True
    shows_logs: bool = True
    """Whether drivers can be shown what workers print; that takes one more process."""

    @property
    def ports(self) -> tuple[int, ...]:
        """Every port that was chosen beforehand."""
        return (
            self.gcs_port,
            self.dashboard_port,
            self.metrics_port,
            self.dashboard_metrics_port,
            self.monitor_metrics_port,
        )


def plain_interpreter(folder: Path) -> str:
    """This interpreter by a path that a shell takes as one word.

    Ray hands the interpreter's path to bash unquoted (ray/_private/runtime_env/context.py), so no
    worker starts from a folder whose name has a space or another character that bash reads.
    """
    if shlex.quote(sys.executable) == sys.executable:
        return sys.executable
    # Not the interpreter itself: a venv's pyvenv.cfg is looked for beside it.
    home = Path(sys.executable).parent.parent
    link = folder / "env"
    link.symlink_to(home, target_is_directory=True)
    return str(link / Path(sys.executable).relative_to(home))


def start_command(options: HeadOptions, folder: Path) -> list[str]:
    """The `ray start` that makes a head."""
    command = [
        # -P: the modules beside start.py must not be found as top-level ones.
        *(plain_interpreter(folder), "-P", start.__file__, "start", "--head", "--block"),
        f"--temp-dir={folder / 'r'}",
        f"--node-ip-address={HOST}",
        f"--port={options.gcs_port}",
        f"--include-dashboard={str(options.has_dashboard).lower()}",
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
    if not options.shows_logs:
        command.append("--include-log-monitor=false")
    return command


def start_environment(
    base: Mapping[str, str], options: HeadOptions, mark: str, folder: Path, token_file: Path
) -> dict[str, str]:
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
        **STOP_VARIABLES,
        **TRAIN_VARIABLES,
        **HEALTH_VARIABLES,
        **LOOPBACK_VARIABLES,
        "PATH": os.pathsep.join([scripts, kept.get("PATH", os.defpath)]),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        **_temporary(kept, folder),
        # Fixed ports by default, which two clusters on one machine cannot share.
        "AUTOSCALER_METRIC_PORT": str(options.monitor_metrics_port),
        "DASHBOARD_METRIC_PORT": str(options.dashboard_metrics_port),
        guard.MARK_VARIABLE: mark,
    }


def _temporary(kept: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The folder for temporary files: what a killed process leaves is removed with the cluster.

    A user's own choice counts: only there may be room for large files.
    """
    chosen = kept.get("TMPDIR")
    is_theirs = chosen is not None and Path(chosen) != folder.parent
    return {} if is_theirs else {"TMPDIR": str(folder)}


def new_options(cluster: ClusterConfig, *, is_lasting: bool, shows_logs: bool) -> HeadOptions:
    """Options with free ports; a lasting cluster gets Ray's usual dashboard port if it is free."""
    usual = _USUAL_DASHBOARD_PORT if is_lasting else None
    gcs, dashboard, *metrics = free_ports([None, usual, None, None, None])
    return HeadOptions(
        num_cpus=cluster.num_cpus,
        num_gpus=cluster.num_gpus,
        object_store_bytes=cluster.object_store_bytes,
        gcs_port=gcs,
        dashboard_port=dashboard,
        metrics_port=metrics[0],
        dashboard_metrics_port=metrics[1],
        monitor_metrics_port=metrics[2],
        is_lasting=is_lasting,
        # `eagleray up` is for jobs as well, and they go through it.
        has_dashboard=is_lasting or bool(cluster.dashboard),
        shows_logs=shows_logs,
    )
