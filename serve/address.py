"""Where an endpoint listens: whether it may, whether it can, and what is there already.

Light: neither Ray nor torch, so that a taken port is seen before anything is started.
"""

import ipaddress
import socket

import httpx

from eagleray.platform.config import ServeConfig
from eagleray.platform.errors import PortInUseError, UsageError

DIGEST_HEADER = "x-model-digest"
_PROBE_TIMEOUT_S = 5.0


def base_url(config: ServeConfig) -> str:
    """The endpoint's address as a URL without a path."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{config.port}"


def check_exposure(config: ServeConfig) -> None:
    """Refuse to let everybody in where everybody can come.

    Raises:
        UsageError: No key is required and the address is not loopback.
    """
    if config.require_key or _is_loopback(config.host):
        return
    raise UsageError(
        f"serve.require_key is off and serve.host {config.host} is reachable from elsewhere",
        "set serve.host to 127.0.0.1, or serve.require_key to true",
    )


def check_port(config: ServeConfig, *, may_be_ours: bool) -> None:
    """Refuse an address that something else has.

    Args:
        config: Host and port.
        may_be_ours: An endpoint of ours that listens there is no obstacle.

    Raises:
        PortInUseError: Something listens there.
    """
    if _is_bindable(config.host, config.port):
        return
    if may_be_ours and served_digest(base_url(config)) is not None:
        return
    raise PortInUseError(
        f"something else listens on {config.host}:{config.port}",
        f"stop it, or choose another port with serve.port={config.port + 1}",
    )


def served_digest(url: str) -> str | None:
    """The digest of the model that is ready at an endpoint; None if none is."""
    try:
        answer = httpx.get(f"{url}/readyz", timeout=_PROBE_TIMEOUT_S, trust_env=False)
    except httpx.TransportError:
        return None
    digest: str | None = answer.headers.get(DIGEST_HEADER)
    return digest if answer.status_code == httpx.codes.OK else None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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
