"""Putting a model on a connected Ray cluster, and taking it off.

The caller is connected to the cluster already. What is deployed stays when the caller goes: Ray
Serve's controller keeps it.
"""

import ipaddress
import logging
import socket
import time
from dataclasses import dataclass

import httpx
import ray
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.schema import ApplicationStatus, ServeStatus

from eagleray.platform.config import LoadedConfig, ServeConfig
from eagleray.platform.errors import (
    DeadlineExceededError,
    InfeasibleError,
    PortInUseError,
    ServiceError,
    UsageError,
)
from eagleray.platform.storage import Storage
from eagleray.serve.api.keys import KeyStore
from eagleray.serve.app import application
from eagleray.serve.backend import resolve

logger = logging.getLogger(__name__)

APPLICATION = "eagleray"
_READY_TIMEOUT_S = 300.0
_ANSWER_TIMEOUT_S = 30.0
_POLL_S = 0.5
_PROBE_TIMEOUT_S = 5.0
# The proxy cuts a request off only after the engine should have ended it.
_PROXY_GRACE_S = 30.0


@dataclass(frozen=True)
class Endpoint:
    """A model that answers.

    Attributes:
        url: Its base, without a path.
        model: `name@version`.
        digest: Of the model's record.
    """

    url: str
    model: str
    digest: str


def deploy(
    loaded: LoadedConfig, model: str | None = None, timeout_s: float = _READY_TIMEOUT_S
) -> Endpoint:
    """Serve a model on the connected cluster, or replace the one that is served.

    Returns when the new model answers. Requests under way during a replacement end on the old one.

    Args:
        loaded: The project.
        model: Which model; None: `serve.model`, else the project's own.
        timeout_s: How long the model may take until it answers.

    Raises:
        NotFoundError: There is no such model.
        PortInUseError: Something else listens on `serve.port`; nothing was started.
        InfeasibleError: The cluster has too few CPUs.
        ServiceError: The replica could not start; the message has its reason.
        DeadlineExceededError: It did not answer in time; the message has its state.
    """
    spec = resolve(loaded, model)
    config = spec.config
    _check_exposure(config)
    _check_capacity(config)
    is_running = bool(serve.status().proxies)
    if not is_running:
        _check_port(config)
        options = HTTPOptions(
            host=config.host,
            port=config.port,
            request_timeout_s=config.request_timeout_s + _PROXY_GRACE_S,
        )
        serve.start(proxy_location="HeadOnly", http_options=options)
    serve.run_many(
        [serve.RunTarget(application(spec), name=APPLICATION, route_prefix="/")],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )
    endpoint = Endpoint(
        f"http://{_bracketed(config.host)}:{config.port}",
        f"{spec.name}@{spec.version}",
        spec.record,
    )
    _await_ready(endpoint, time.monotonic() + timeout_s, timeout_s)
    logger.info("deployed model=%s url=%s", endpoint.model, endpoint.url)
    return endpoint


def undeploy() -> None:
    """Take the model off; Ray Serve stops too if it has nothing else to do."""
    serve.delete(APPLICATION)
    if not serve.status().applications:
        serve.shutdown()  # type: ignore[no-untyped-call]  # Ray leaves it unannotated


def first_key(loaded: LoadedConfig) -> str | None:
    """Make the first API key of a storage that has none; None if there are keys or none is needed.

    It cannot be shown again.
    """
    keys = KeyStore(Storage(loaded.storage_path))
    if not loaded.config.serve.require_key or keys.all():
        return None
    return keys.create("first")


def _check_exposure(config: ServeConfig) -> None:
    if config.require_key or config.host == "localhost":
        return
    try:
        is_loopback = ipaddress.ip_address(config.host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise UsageError(
            f"serve.require_key is off and serve.host {config.host} is reachable from elsewhere",
            "set serve.host to 127.0.0.1, or serve.require_key to true",
        )


def _check_capacity(config: ServeConfig) -> None:
    needed = config.num_replicas * config.cpus_per_replica
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]  # Ray leaves it unannotated
    offered = resources.get("CPU", 0.0)
    if needed > offered:
        raise InfeasibleError(
            f"{config.num_replicas} replicas of {config.cpus_per_replica:g} CPUs need {needed:g}; "
            f"the cluster has {offered:g}",
            "lower serve.num_replicas or serve.cpus_per_replica, or enlarge the cluster",
        )


def _check_port(config: ServeConfig) -> None:
    if not _is_bindable(config.host, config.port):
        raise PortInUseError(
            f"something else listens on {config.host}:{config.port}",
            "stop it, or choose another with serve.port=8001",
        )


def _is_bindable(host: str, port: int) -> bool:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do, so that a port in TIME_WAIT counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError:
        return False
    return True


def _await_ready(endpoint: Endpoint, deadline_s: float, timeout_s: float) -> None:
    state = "not started"
    running_since_s = None
    while time.monotonic() < deadline_s:
        status = serve.status()
        state = _state(status)
        found = status.applications.get(APPLICATION)
        if found and found.status == ApplicationStatus.DEPLOY_FAILED:
            raise ServiceError(
                f"{endpoint.model} could not be served: {state}",
                "see the replica's log in the Ray dashboard",
            )
        if found and found.status == ApplicationStatus.RUNNING:
            running_since_s = running_since_s or time.monotonic()
            if _answers(endpoint):
                return
            if time.monotonic() > running_since_s + _ANSWER_TIMEOUT_S:
                raise ServiceError(
                    f"{endpoint.model} runs, but {endpoint.url} does not lead to it: Ray Serve was "
                    "started earlier with another address",
                    "use that address for serve.host and serve.port, or restart the cluster",
                )
        time.sleep(_POLL_S)
    raise DeadlineExceededError(
        f"{endpoint.model} does not answer at {endpoint.url} after {timeout_s:g} s: {state}",
        "see `eagleray ps` for what holds the cluster's CPUs, and the replica's log",
    )


def _answers(endpoint: Endpoint) -> bool:
    try:
        answer = httpx.get(f"{endpoint.url}/readyz", timeout=_PROBE_TIMEOUT_S, trust_env=False)
    except httpx.TransportError:
        return False
    return answer.status_code == 200 and answer.headers.get("x-model-digest") == endpoint.digest


def _state(status: ServeStatus) -> str:
    found = status.applications.get(APPLICATION)
    if found is None:
        return "unknown to Ray Serve"
    messages = [found.message, *(part.message for part in found.deployments.values())]
    return " ".join([found.status, *(message.strip() for message in messages if message)])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
