"""The settings of this process under which `ray.init` finds a cluster and its token."""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import ray._private.ray_constants as ray_constants
import ray._private.services as services
import ray._private.worker as ray_worker
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from eagleray.platform.cluster.gcs import split_address
from eagleray.platform.cluster.options import TRAIN_VARIABLES
from eagleray.platform.cluster.ports import HOST, is_listening
from eagleray.platform.cluster.tokens import Access

logger = logging.getLogger(__name__)

_TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_LISTEN_TIMEOUT_S = 2.0


@contextlib.contextmanager
def driver_settings(access: Access, address: str) -> Iterator[None]:
    """Make `ray.init` of this process use an access, and undo that afterwards.

    Ray reads its token once per process, so its cache is dropped whenever the token changes.
    """
    changed = {**TRAIN_VARIABLES, **dict.fromkeys(_TOKEN_VARIABLES, ""), **access.variables}
    before = {name: os.environ.get(name) for name in changed}
    one_machine = _is_loopback_only(address)
    # See LOOPBACK_VARIABLES: the driver would look for a loopback cluster at the outer address.
    clusters_allowed = ray_constants.ENABLE_RAY_CLUSTER
    try:
        _set_variables(changed)
        ray_constants.ENABLE_RAY_CLUSTER = clusters_allowed and not one_machine
        _reload_token()
        yield
    finally:
        _set_variables(before)
        ray_constants.ENABLE_RAY_CLUSTER = clusters_allowed
        _reload_token()


@contextlib.contextmanager
def raylet_messages_logged() -> Iterator[None]:
    """Log what the cluster tells its drivers, instead of printing it over whatever is shown.

    A worker that dies is told in a paragraph of possible causes on standard output; Ray has no
    switch for that. What becomes of the death is the business of whoever runs the work.
    """
    printed = ray_worker.print_to_stdstream

    def logged(data: Mapping[str, Any], ignore_prefix: bool = False) -> None:
        for line in data["lines"]:
            logger.info("%s: %s", data.get("pid", "ray"), line)

    ray_worker.print_to_stdstream = logged
    try:
        yield
    finally:
        ray_worker.print_to_stdstream = printed


def _is_loopback_only(address: str) -> bool:
    """Whether a cluster listens on this machine's loopback but not at its outer address."""
    host, port = split_address(address)
    if host not in (HOST, "localhost"):
        return False
    outer = services.get_node_ip_address()  # type: ignore[no-untyped-call]
    return outer == HOST or not is_listening(outer, port, _LISTEN_TIMEOUT_S)


def _set_variables(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)


def _reload_token() -> None:
    # In this order: a thread of the last session that still ends must not look for a token in
    # token mode after its file is gone; Ray aborts the process then.
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
