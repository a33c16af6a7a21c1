"""A Redis Cluster of our own on loopback, for tests and benchmarks: three masters, with replicas.

Its nodes can be killed, stopped and replaced by a port that never answers, and slots be moved
between them while they are read.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from redis.crc import key_slot
from redis.exceptions import RedisError, ResponseError

from eagleray.actors.cache.framed_values import KEY_PREFIX
from eagleray.actors.cache.redis_link import Command, RedisLink
from eagleray.platform.redis_server import _LAUNCHER, _binaries

NUM_MASTERS = 3
HOST = "127.0.0.1"
FAULTS = ("kill", "stop", "black hole")
_PORTS = range(21_000, 29_000, 2)


class RedisCluster:
    """Servers of our own, each with a process that may be killed; `join` makes one cluster of them.

    Args:
        node_timeout_ms: A master that is silent for so long is succeeded by its replica.
        has_replicas: One for each master.
    """

    def __init__(self, node_timeout_ms: int = 1000, *, has_replicas: bool = True) -> None:
        # In memory: a node syncs its map to a file at each change.
        self._folder = Path(tempfile.mkdtemp(prefix="eagleray-redis-cluster-", dir="/dev/shm"))
        self._node_timeout_ms = node_timeout_ms
        self.ports = _free_ports((1 + has_replicas) * NUM_MASTERS)
        self.masters = self.ports[:NUM_MASTERS]
        self.processes = {port: self._start(port) for port in self.ports}
        self.links = {port: RedisLink(f"redis://{HOST}:{port}", 10) for port in self.ports}
        self.url = f"redis-cluster://{HOST}:{self.ports[0]}"

    def join(self, until: Callable[..., None] | None = None) -> None:
        """Make one cluster: the first three own all slots, the others are their replicas.

        Args:
            until: Waits for a condition: `until(condition, "what it is", timeout_s)`, else fails.
        """
        until = until or _until
        for port in self.ports:
            until(lambda port=port: self._pings(port), f"the server at {port}", 60)
        for number, port in enumerate(self.masters):
            first = number * 16384 // NUM_MASTERS
            last = (number + 1) * 16384 // NUM_MASTERS - 1
            self.ask(port, "CLUSTER", "ADDSLOTSRANGE", first, last)
            self.ask(port, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for port in self.ports[1:]:
            self.ask(self.ports[0], "CLUSTER", "MEET", HOST, port, port + 1)
        until(lambda: all(map(self._knows_all, self.ports)), "all nodes at each node", 60)
        replicas = self.ports[NUM_MASTERS:]
        for master, replica in zip(self.masters, replicas, strict=False):
            self.ask(replica, "CLUSTER", "REPLICATE", self.node_id(master))
        until(lambda: all(map(self.is_ok, self.ports)), "a cluster that is well", 60)
        until(lambda: all(map(self._is_synced, replicas)), "replicas that have caught up", 60)

    def ask(self, port: int, *command: Any) -> Any:
        """The reply of one node."""
        return self.links[port].call(*command)

    def node_id(self, port: int) -> str:
        """What the cluster calls a node."""
        return str(self.ask(port, "CLUSTER", "MYID"), "ascii")

    def is_ok(self, port: int) -> bool:
        """Whether a node finds that all is well."""
        return b"cluster_state:ok" in self.ask(port, "CLUSTER", "INFO")

    def owner(self, key: bytes) -> int:
        """Port of the master that holds the value of a key, as a node that answers knows it."""
        return next(self._owners(key))

    def owners(self, key: bytes) -> set[int]:
        """The same, as each of the nodes that answer knows it: they learn of a change in turn."""
        return set(self._owners(key))

    def move(self, source: int, target: int, slots: Sequence[int]) -> None:
        """Move slots with their keys while both nodes go on answering.

        Returns when all masters know. A node that takes a slot before it has heard of the last
        epoch gives itself none, and whoever has that epoch may claim the slot back.
        """

        def set_slots(port: int, *how: str) -> None:
            self._ask_all(port, [("CLUSTER", "SETSLOT", slot, *how) for slot in slots])

        set_slots(target, "IMPORTING", self.node_id(source))
        set_slots(source, "MIGRATING", self.node_id(target))
        listing = [("CLUSTER", "GETKEYSINSLOT", slot, 10) for slot in slots]
        while any(found := self._ask_all(source, listing)):
            to = ("MIGRATE", HOST, target, "", 0, 5000, "KEYS")
            self._ask_all(source, [(*to, *keys) for keys in found if keys])
        for port in (target, source):
            set_slots(port, "NODE", self.node_id(target))
        while not self._agree(target, slots):
            time.sleep(0.001)

    def is_replicated(self, port: int) -> bool:
        """Whether the replica of a master has all that the master has now."""
        (replica,) = self._info(port, "slave0")
        offset = int(dict(part.split("=") for part in replica.split(","))["offset"])
        return offset >= int(self._info(port, "master_repl_offset")[0])

    @contextlib.contextmanager
    def faulty(self, port: int, fault: str) -> Iterator[None]:
        """A context in which a node is as one of FAULTS says; one that was stopped goes on then."""
        process = self.processes[port]
        if fault == "stop":
            process.send_signal(signal.SIGSTOP)
            try:
                yield
            finally:
                process.send_signal(signal.SIGCONT)
            return
        process.kill()
        process.wait()
        with contextlib.ExitStack() as stack:
            if fault == "black hole":
                stack.enter_context(socket.create_server((HOST, port)))
            yield

    def flush(self) -> None:
        """Remove all values."""
        for port in self.masters:
            self.ask(port, "FLUSHALL")

    def stop(self) -> None:
        """End all servers and remove what they wrote."""
        for link in self.links.values():
            link.close()
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
        shutil.rmtree(self._folder)

    def _start(self, port: int) -> "subprocess.Popen[bytes]":
        folder = self._folder / str(port)
        folder.mkdir()
        words = {
            "port": port, "cluster-port": port + 1, "bind": HOST, "dir": folder,
            "cluster-enabled": "yes", "cluster-node-timeout": self._node_timeout_ms,
            "save": "", "appendonly": "no",
            "maxmemory": "64mb", "maxmemory-policy": "noeviction", "protected-mode": "no",
            "repl-diskless-sync-delay": 0, "repl-ping-replica-period": 1,
        }  # fmt: skip
        options = [part for name, value in words.items() for part in (f"--{name}", str(value))]
        with (folder / "log").open("ab") as log:
            return subprocess.Popen(
                # They end with us, even if we are killed.
                [
                    *(sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())),
                    *(str(next(_binaries())), *options),
                ],
                stdout=log,
                stderr=log,
            )

    def _pings(self, port: int) -> bool:
        try:
            return bool(self.ask(port, "PING"))
        except (RedisError, OSError):
            return False

    def _ask_all(self, port: int, commands: Sequence[Command]) -> list[Any]:
        replies = self.links[port].pipeline(commands)
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise reply
        return replies

    def _owners(self, key: bytes) -> Iterator[int]:
        for port in self.ports:
            with contextlib.suppress(RedisError, OSError):
                yield from self._owners_at(port, [key_slot(KEY_PREFIX + key)])

    def _owners_at(self, port: int, slots: Sequence[int]) -> set[int]:
        """The owners of slots, as a node knows them."""
        ranges = self.ask(port, "CLUSTER", "SLOTS")
        return {
            int(master[1])
            for first, last, master, *_ in ranges
            if any(first <= slot <= last for slot in slots)
        }

    def _agree(self, owner: int, slots: Sequence[int]) -> bool:
        """Whether all masters say that these slots are the owner's, and know the same epoch."""
        owners = set().union(*(self._owners_at(port, slots) for port in self.masters))
        told = [self.ask(port, "CLUSTER", "INFO").splitlines() for port in self.masters]
        epochs = {line for lines in told for line in lines if b"cluster_current_epoch" in line}
        return owners <= {owner} and len(epochs) == 1

    def _info(self, port: int, name: str) -> list[str]:
        lines = str(self.ask(port, "INFO", "replication"), "ascii").splitlines()
        return [line.partition(":")[2] for line in lines if line.startswith(f"{name}:")]

    def _knows_all(self, port: int) -> bool:
        lines = self.ask(port, "CLUSTER", "NODES").splitlines()
        return len(lines) == len(self.ports) and b"handshake" not in b"".join(lines)

    def _is_synced(self, port: int) -> bool:
        return b"master_link_status:up" in self.ask(port, "INFO", "replication")


def _until(condition: Callable[[], object], what: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {timeout_s:g} s")
        time.sleep(0.01)


def _free_ports(count: int) -> list[int]:
    """Ports of which the next one is free as well, for the cluster's own talk."""
    found: list[int] = []
    # From a place of this process's own: others may be looking for ports as well.
    start = os.getpid() * 2 * count % len(_PORTS)
    for port in [*_PORTS[start:], *_PORTS[:start]]:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for each in (port, port + 1):
                probe = stack.enter_context(socket.socket())
                probe.bind((HOST, each))
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports")
