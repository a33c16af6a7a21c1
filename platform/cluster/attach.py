"""Attach this process to the cluster that its work should run on, for as long as a block lasts.

Which cluster, in this order:
    1. the one that this process already talks to (a session inside a session, a Ray worker);
    2. inside a Ray job, that job's;
    3. `cluster.address` of the configuration;
    4. the one that `eagleray up` started for this project;
    5. a private one on this machine, which ends with the block, and when the process is killed.

A job comes before the configuration: its code and packages exist on its own cluster only.
"""

import contextlib
import logging
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray._private.services as services
import ray._private.state as ray_state
import ray._private.worker as ray_worker

from eagleray.platform.cluster.driver import driver_settings, raylet_messages_logged
from eagleray.platform.cluster.gcs import look, split_address
from eagleray.platform.cluster.head import Head, new_folder, remove_abandoned
from eagleray.platform.cluster.options import new_options
from eagleray.platform.cluster.resources import (
    Demand,
    NodeResources,
    check_feasible,
    wait_for_resources,
)
from eagleray.platform.cluster.state import ClusterRecord
from eagleray.platform.cluster.tokens import Access, write_token
from eagleray.platform.cluster.versions import VERSION_LABEL, Versions, check_same
from eagleray.platform.config import ClusterConfig, LoadedConfig
from eagleray.platform.errors import ServiceError, UsageError
from eagleray.platform.storage import Storage

logger = logging.getLogger(__name__)

NAMESPACE = "eagleray"
NOTHING = Demand(0)
_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_LOOK_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ClusterInfo:
    """The cluster that a session is attached to."""

    address: str
    dashboard_url: str | None
    is_private: bool
    place_timeout_s: float

    def nodes(self) -> list[NodeResources]:
        """All resources of the nodes that are alive."""
        return [_node(node["NodeID"], node["Resources"]) for node in _ray_nodes() if node["Alive"]]

    def free(self) -> list[NodeResources]:
        """What is free on each node now, as far as the GCS has heard."""
        by_node = ray_state.available_resources_per_node()  # type: ignore[no-untyped-call]
        return [_node(name, amounts) for name, amounts in by_node.items()]

    def check_feasible(self, demand: Demand) -> None:
        """Refuse at once what can never be placed here.

        Raises:
            InfeasibleError: It says what was asked and what there is.
        """
        check_feasible(demand, self.nodes())

    def wait_for_resources(self, demand: Demand, timeout_s: float | None = None) -> None:
        """Wait until a demand fits, at most `cluster.place_timeout_s`.

        Raises:
            InfeasibleError: It never will.
            DeadlineExceededError: Others held the resources all the time.
        """
        self.check_feasible(demand)
        wait_for_resources(
            demand, self.free, self.place_timeout_s if timeout_s is None else timeout_s
        )


@dataclass(frozen=True)
class _Target:
    """Where to attach, and by which token."""

    address: str
    access: Access
    is_job: bool = False


@contextlib.contextmanager
def session(
    loaded: LoadedConfig,
    need: Demand = NOTHING,
    *,
    log_to_driver: bool = False,
    meanwhile: Callable[[], None] = lambda: None,
) -> Iterator[ClusterInfo]:
    """Attach to a cluster while the block runs.

    Args:
        loaded: The project.
        need: What the block will want at the same time; refused at once if it can never be placed.
        log_to_driver: Show what the workers print.
        meanwhile: Called while a private cluster starts, which takes seconds: imports, for example.

    Raises:
        InfeasibleError: The cluster has less than is needed, or runs other versions.
        AuthenticationError: It refused the token.
        ServiceError: It cannot be reached, or a private one did not start.
    """
    cluster = loaded.config.cluster
    with contextlib.ExitStack() as stack:
        if ray.is_initialized():
            info = attached(cluster)
        elif (target := _target(loaded)) is not None:
            info = stack.enter_context(_driver(target, cluster, log_to_driver))
        else:
            target = stack.enter_context(_private_head(cluster, need, log_to_driver, meanwhile))
            info = stack.enter_context(_driver(target, cluster, log_to_driver, is_private=True))
        info.check_feasible(need)
        yield info


def _target(loaded: LoadedConfig) -> _Target | None:
    """The cluster that is there already; None if a private one must be made."""
    if _JOB_VARIABLE in os.environ and (address := os.environ.get("RAY_ADDRESS")):
        return _Target(address, Access.from_environment(), is_job=True)
    if loaded.config.cluster.address is not None:
        return _Target(loaded.config.cluster.address, Access.from_environment())
    state = ClusterRecord(Storage(loaded.storage_path)).read()
    if state is None or (state.is_here and not state.is_alive):
        return None
    if not state.is_here:
        raise UsageError(
            f"the cluster of this project runs on {state.host} and listens on its loopback only",
            f"work on {state.host}, or set cluster.address to one that this machine can reach",
        )
    check_same(state.versions, Versions.here(), state.address)
    return _Target(state.address, Access.from_file(Path(state.token_file)))


@contextlib.contextmanager
def _private_head(
    cluster: ClusterConfig, need: Demand, log_to_driver: bool, meanwhile: Callable[[], None]
) -> Iterator[_Target]:
    """A head that ends with the block."""
    offered = NodeResources(
        "this machine",
        cluster.num_cpus or os.cpu_count() or 1,
        need.count * need.gpus if cluster.num_gpus is None else cluster.num_gpus,
    )
    check_feasible(need, [offered])
    remove_abandoned()
    options = new_options(cluster, is_lasting=False, shows_logs=log_to_driver)
    folder = new_folder()
    head = None
    try:
        write_token(folder / "token")
        head = Head.start(options, folder, folder / "token")
        meanwhile()
        head.wait_ready(cluster.start_timeout_s)
        yield _Target(head.address, Access.from_file(head.token_file))
    finally:
        if head is not None:
            head.stop()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _driver(
    target: _Target, cluster: ClusterConfig, log_to_driver: bool, *, is_private: bool = False
) -> Iterator[ClusterInfo]:
    """This process as a driver of a running cluster."""
    sight = look(target.address, target.access.token, _LOOK_TIMEOUT_S)
    check_same(sight.versions, Versions.here(), target.address)
    info = ClusterInfo(target.address, sight.dashboard_url, is_private, cluster.place_timeout_s)
    quiet = contextlib.nullcontext() if log_to_driver else raylet_messages_logged()
    with driver_settings(target.access, target.address), _sigterm_kept() as put_back, quiet:
        try:
            _init(target, log_to_driver)
            put_back()
            yield info
        finally:
            ray.shutdown()


def _init(target: _Target, log_to_driver: bool) -> None:
    try:
        ray.init(
            address=target.address,
            namespace=NAMESPACE,
            log_to_driver=log_to_driver,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        raise ServiceError(
            f"cannot attach to the Ray cluster at {target.address}: {error}",
            "see `eagleray status`",
        ) from error
    if target.is_job:
        return  # A job brings its own Eagleray to every node.
    for node in _ray_nodes():
        label = node.get("Labels", {}).get(VERSION_LABEL, "")
        check_same(Versions("", "", label), Versions.here(), target.address)


def attached(cluster: ClusterConfig) -> ClusterInfo:
    """The cluster that this process talks to already.

    Raises:
        UsageError: It is not the one that `cluster.address` names.
    """
    address = ray.get_runtime_context().gcs_address
    wanted = cluster.address
    # A job's driver and its workers are on their cluster, whatever name others know it by.
    is_inside = _JOB_VARIABLE in os.environ or ray_worker.global_worker.mode == ray.WORKER_MODE
    if wanted is not None and not is_inside and not _is_same(address, wanted):
        raise UsageError(
            f"this process already talks to the Ray cluster at {address}, "
            f"but cluster.address names {wanted}",
            "call ray.shutdown() first, or leave cluster.address empty",
        )
    return ClusterInfo(address, None, False, cluster.place_timeout_s)


def _is_same(address: str, other: str) -> bool:
    """Whether two addresses lead to one GCS; a loopback name stands for this machine."""
    (host, port), (other_host, other_port) = split_address(address), split_address(other)
    return port == other_port and not _ips(host).isdisjoint(_ips(other_host))


def _ips(host: str) -> set[str]:
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return {host}
    here = services.get_node_ip_address()  # type: ignore[no-untyped-call]
    return found | {here} if any(ip.startswith("127.") or ip == "::1" for ip in found) else found


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[Callable[[], None]]:
    """Ray replaces the process's SIGTERM handler for good; put the old one back.

    What it yields does so before the block ends, if the process has a handler of its own; without
    one, Ray's raises SystemExit, and the session ends in order.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = signal.getsignal(signal.SIGTERM)

    def put_back() -> None:
        if callable(before):
            signal.signal(signal.SIGTERM, before)

    try:
        yield put_back
    finally:
        signal.signal(signal.SIGTERM, before)


def _ray_nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def _node(name: str, amounts: dict[str, float]) -> NodeResources:
    return NodeResources(name, amounts.get("CPU", 0.0), amounts.get("GPU", 0.0))
