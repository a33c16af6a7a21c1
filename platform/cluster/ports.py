"""Free TCP ports on loopback, below those that the kernel hands to outgoing connections."""

import random
import socket
from collections.abc import Sequence
from pathlib import Path

from eagleray.platform.errors import PortInUseError

HOST = "127.0.0.1"
_FIRST, _LAST = 10_000, 65_535
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 1000


def free_ports(preferred: Sequence[int | None]) -> list[int]:
    """One free port for each entry: the preferred one if it is free, else a random one.

    Nothing reserves them: whoever binds must be prepared to find one taken meanwhile. Ports of the
    kernel's own range are avoided, so that only another server could take them.

    Raises:
        PortInUseError: No free ports were found.
    """
    lowest = int(_EPHEMERAL.read_text().split()[0])
    last = lowest - 1 if lowest > 2 * _FIRST else _LAST
    chosen: list[int] = []
    for wish in preferred:
        candidates = [wish] if wish else []
        candidates += [random.randint(_FIRST, last) for _ in range(_TRIES)]
        port = next((c for c in candidates if c not in chosen and is_free(c)), None)
        if port is None:
            raise PortInUseError(
                f"no free port between {_FIRST} and {last} on {HOST} in {_TRIES} tries",
                "stop what listens there",
            )
        chosen.append(port)
    return chosen


def is_free(port: int) -> bool:
    """Whether a server could listen on this port of loopback now."""
    with socket.socket() as probe:
        # As servers do, so that a port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def is_listening(host: str, port: int, timeout_s: float) -> bool:
    """Whether something accepts connections there."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False
