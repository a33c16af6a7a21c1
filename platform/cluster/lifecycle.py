"""Start, look at and stop the cluster of a project on this machine: `eagleray up, status, down`."""

import logging
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagleray.platform.cluster import guard
from eagleray.platform.cluster.dashboard import Dashboard
from eagleray.platform.cluster.head import Head, new_folder
from eagleray.platform.cluster.options import HeadOptions, new_options
from eagleray.platform.cluster.ports import is_free
from eagleray.platform.cluster.state import ClusterRecord, ClusterState, boot_id
from eagleray.platform.cluster.tokens import read_token, write_token
from eagleray.platform.cluster.versions import Versions
from eagleray.platform.config import LoadedConfig
from eagleray.platform.errors import EagleRayError, UsageError
from eagleray.platform.storage import Storage

logger = logging.getLogger(__name__)

_STARTS = 2
_GUARD_TIMEOUT_S = guard.END_TIMEOUT_S + 5.0
_STATUS_TIMEOUT_S = 5.0
_POLL_S = 0.05


@dataclass(frozen=True)
class ClusterStatus:
    """What `eagleray status` tells.

    `phase` is none (never started, or stopped), up, dead (recorded, but its processes are gone),
    silent (they live but do not answer), elsewhere (started on another machine).
    """

    phase: str
    state: ClusterState | None = None
    nodes: tuple[dict[str, Any], ...] = ()
    usage: dict[str, tuple[float, float]] | None = None
    """Used and total amount by resource; None until the cluster has reported it."""
    reason: str = ""


def up(loaded: LoadedConfig) -> tuple[ClusterState, bool]:
    """Start a cluster that outlives this process, unless the project's is running.

    An interrupt or failure on the way leaves nothing behind.

    Returns:
        The cluster, and whether this call started it.

    Raises:
        UsageError: It runs on another machine.
        ServiceError: Ray did not start; DeadlineExceededError if it took too long.
    """
    cluster = loaded.config.cluster
    record = ClusterRecord(Storage(loaded.storage_path))
    with record.locked(cluster.start_timeout_s):
        state = record.read()
        if state is not None:
            if state.is_alive:
                return state, False
            _refuse_foreign(state)
            _clean(record, state)
        return _start(loaded, record), True


def down(
    loaded: LoadedConfig, before_stop: Callable[[ClusterState], None] | None = None
) -> ClusterState | None:
    """Stop exactly what `up` started: every process, its shared memory, its folder, its token.

    Args:
        loaded: The project.
        before_stop: Called with the cluster, alive or dead, while its folder still exists.

    Returns:
        What was stopped or cleaned; None if there was nothing.

    Raises:
        UsageError: It runs on another machine.
    """
    record = ClusterRecord(Storage(loaded.storage_path))
    with record.locked(loaded.config.cluster.start_timeout_s):
        state = record.read()
        if state is None:
            return None
        _refuse_foreign(state)
        if before_stop is not None:
            before_stop(state)
        _clean(record, state)
        return state


def status(loaded: LoadedConfig) -> ClusterStatus:
    """How the project's cluster on this machine is; asks it, but never changes anything."""
    state = ClusterRecord(Storage(loaded.storage_path)).read()
    if state is None:
        return ClusterStatus("none")
    if not state.is_here:
        return ClusterStatus("elsewhere", state)
    if not state.is_alive:
        return ClusterStatus("dead", state)
    try:
        dashboard = open_dashboard(state, _STATUS_TIMEOUT_S)
        try:
            return ClusterStatus("up", state, tuple(dashboard.nodes()), dashboard.usage() or None)
        finally:
            dashboard.close()
    except EagleRayError as error:
        return ClusterStatus("silent", state, reason=error.what)


def open_dashboard(state: ClusterState, timeout_s: float = 20.0) -> Dashboard:
    """The dashboard of a recorded cluster, with its token.

    Raises:
        AuthenticationError: The token cannot be read.
    """
    return Dashboard(state.dashboard_url, read_token(Path(state.token_file)), timeout_s)


def _start(loaded: LoadedConfig, record: ClusterRecord) -> ClusterState:
    cluster = loaded.config.cluster
    for attempt in range(1, _STARTS + 1):
        options = new_options(cluster, is_lasting=True, shows_logs=True)
        try:
            return _start_once(record, options, cluster.start_timeout_s)
        except EagleRayError:
            # Between choosing a port and binding it somebody else may have taken it.
            if attempt == _STARTS or all(map(is_free, options.ports)):
                raise
            logger.warning("port was taken, trying others attempt=%d", attempt)
    raise AssertionError("the last attempt returns or raises")


def _start_once(record: ClusterRecord, options: HeadOptions, timeout_s: float) -> ClusterState:
    folder = new_folder()
    head = None
    try:
        write_token(record.token_file)
        head = Head.start(options, folder, record.token_file)
        head.wait_ready(timeout_s)
        state = _state_of(head)
        record.write(state)
        head.detach()
    except BaseException:  # Also at Ctrl-C: a half-started cluster must not stay.
        if head is not None:
            head.stop()
        shutil.rmtree(folder, ignore_errors=True)
        record.forget()
        raise
    return state


def _state_of(head: Head) -> ClusterState:
    return ClusterState(
        mark=head.mark,
        guard_pid=head.guard_pid,
        guard_start_ticks=guard.start_ticks(head.guard_pid) or 0,
        boot_id=boot_id(),
        host=socket.gethostname(),
        address=head.address,
        dashboard_url=head.dashboard_url,
        metrics_port=head.metrics_port,
        folder=str(head.folder),
        token_file=str(head.token_file),
        versions=Versions.here(),
        started_s=time.time(),
    )


def _clean(record: ClusterRecord, state: ClusterState) -> None:
    if state.is_alive:
        guard.end_process(state.guard_pid, state.guard_start_ticks, _GUARD_TIMEOUT_S)
    # The guard has done this already, unless it had been killed itself.
    if state.boot_id == boot_id():
        guard.end_family(state.mark)
    shutil.rmtree(state.folder, ignore_errors=True)
    record.forget()


def _refuse_foreign(state: ClusterState) -> None:
    if not state.is_here:
        raise UsageError(
            f"the cluster of this project was started on {state.host}, this is "
            f"{socket.gethostname()}",
            f"run `eagleray down` on {state.host}, or use another storage.uri",
        )
