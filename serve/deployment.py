"""Putting a model on a connected Ray cluster, and taking it off.

The caller is connected to the cluster already. What is deployed stays when the caller goes: Ray
Serve's controller keeps it.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.schema import ApplicationStatus, ServeStatus

from eagleray.platform.cluster import Demand
from eagleray.platform.cluster.attach import attached
from eagleray.platform.config import LoadedConfig
from eagleray.platform.errors import DeadlineExceededError, ServiceError
from eagleray.platform.storage import Storage
from eagleray.serve.address import base_url, check_exposure, check_port, served_digest
from eagleray.serve.api.keys import KeyStore
from eagleray.serve.app import application
from eagleray.serve.spec import resolve

logger = logging.getLogger(__name__)

APPLICATION = "eagleray"
_READY_TIMEOUT_S = 300.0
_ANSWER_TIMEOUT_S = 30.0
_POLL_S = 0.5
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
    loaded: LoadedConfig,
    model: str | None = None,
    timeout_s: float = _READY_TIMEOUT_S,
    on_wait: Callable[[str], None] = lambda _: None,
) -> Endpoint:
    """Serve a model on the connected cluster, or replace the one that is served.

    Returns when the new model answers. Requests under way during a replacement end on the old one.

    Args:
        loaded: The project.
        model: Which model; None: `serve.model`, else the project's own.
        timeout_s: How long the model may take until it answers.
        on_wait: Told the state again and again meanwhile.

    Raises:
        NotFoundError: There is no such model.
        PortInUseError: Something else listens on `serve.port`; nothing was started.
        InfeasibleError: The cluster has too few CPUs.
        ServiceError: The replica could not start; the message has its reason.
        DeadlineExceededError: It did not answer in time; the message has its state.
    """
    spec = resolve(loaded, model)
    config = spec.config
    check_exposure(config)
    need = Demand(config.num_replicas, config.cpus_per_replica, what="replica")
    attached(loaded.config.cluster).check_feasible(need)
    # Its announcements are ours to make.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if not serve.status().proxies:
        check_port(config, may_be_ours=False)
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
    endpoint = Endpoint(base_url(config), f"{spec.name}@{spec.version}", spec.record)
    _await_ready(endpoint, timeout_s, on_wait)
    logger.info("deployed model=%s url=%s", endpoint.model, endpoint.url)
    return endpoint


def is_deployed() -> bool:
    """Whether the connected cluster serves a model of ours."""
    return APPLICATION in serve.status().applications


def undeploy() -> bool:
    """Take the model off; Ray Serve stops too if it has nothing else to do.

    Returns:
        Whether there was one.
    """
    was_deployed = is_deployed()
    if was_deployed:
        serve.delete(APPLICATION)
    status = serve.status()
    if status.proxies and not status.applications:
        serve.shutdown()  # type: ignore[no-untyped-call]  # Ray leaves it unannotated
    return was_deployed


def first_key(loaded: LoadedConfig) -> str | None:
    """Make the first API key of a storage that has none; None if there are keys or none is needed.

    It cannot be shown again.
    """
    keys = KeyStore(Storage(loaded.storage_path))
    if not loaded.config.serve.require_key or keys.all():
        return None
    return keys.create("first")


def _await_ready(endpoint: Endpoint, timeout_s: float, on_wait: Callable[[str], None]) -> None:
    deadline_s = time.monotonic() + timeout_s
    answers_by_s = None
    state = "not started"
    while time.monotonic() < deadline_s:
        status = serve.status()
        state = _state(status)
        on_wait(state)
        found = status.applications.get(APPLICATION)
        if found and found.status == ApplicationStatus.DEPLOY_FAILED:
            raise ServiceError(
                f"{endpoint.model} could not be served: {state}",
                "see the replica's log in the Ray dashboard",
            )
        if found and found.status == ApplicationStatus.RUNNING:
            answers_by_s = answers_by_s or time.monotonic() + _ANSWER_TIMEOUT_S
            if served_digest(endpoint.url) == endpoint.digest:
                return
            if time.monotonic() > answers_by_s:
                raise ServiceError(
                    f"{endpoint.model} runs, but {endpoint.url} does not lead to it: Ray Serve was "
                    "started earlier with another address",
                    "use that address for serve.host and serve.port, or restart the cluster",
                )
        time.sleep(_POLL_S)
    raise DeadlineExceededError(
        f"{endpoint.model} does not answer at {endpoint.url} after {timeout_s:g} s: {state}",
        "see what holds the cluster's CPUs, and the replica's log in the Ray dashboard",
    )


def _state(status: ServeStatus) -> str:
    found = status.applications.get(APPLICATION)
    if found is None:
        return "unknown to Ray Serve"
    messages = [found.message, *(part.message for part in found.deployments.values())]
    return " ".join([found.status, *(message.strip() for message in messages if message)])
