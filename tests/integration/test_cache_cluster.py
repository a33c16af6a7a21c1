"""The feature cache on a real Redis Cluster of three masters and three replicas."""

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.crc import key_slot
from redis.exceptions import RedisError

from eagleray.actors.cache import FeatureCache, open_cache
from eagleray.actors.cache.breaker import FAILURES
from eagleray.actors.cache.cluster_link import ClusterLink
from eagleray.actors.cache.cluster_store import ClusterStore
from eagleray.actors.cache.evictor import Evictor, resident_in, unlink_in
from eagleray.actors.cache.frame import digest_key
from eagleray.actors.cache.framed_values import KEY_PREFIX
from eagleray.actors.cache.policies import LruK
from eagleray.actors.cache.redis_link import RedisLink
from eagleray.platform.config import FeatureCacheConfig, RedisConfig
from eagleray.platform.redis_server import RedisServer, _binaries

pytestmark = pytest.mark.timeout(240)
Until = Callable[..., None]
NUM_MASTERS = 3
KEYS = [digest_key(b"%d" % number) for number in range(256)]
# Longer than the product's 50 ms: a test's machine may be busy.
TIMEOUT_S = 0.5


def value_of(key: bytes) -> bytes:
    return key * 9


class Cluster:
    """Servers of our own, each with a process that a test may kill."""

    def __init__(self, folder: Path, node_timeout_ms: int) -> None:
        self._folder, self._node_timeout_ms = folder, node_timeout_ms
        self.ports = free_ports(2 * NUM_MASTERS)
        self.processes = {port: self._start(port) for port in self.ports}
        self.clients = {port: Redis("127.0.0.1", port, socket_timeout=10) for port in self.ports}
        self.links = {port: RedisLink(f"redis://127.0.0.1:{port}", 10) for port in self.ports}
        self.url = f"redis-cluster://127.0.0.1:{self.ports[0]}"

    def _start(self, port: int) -> "subprocess.Popen[bytes]":
        folder = self._folder / str(port)
        folder.mkdir(exist_ok=True)
        words = {
            "port": port, "cluster-port": port + 1, "bind": "127.0.0.1", "dir": folder,
            "cluster-enabled": "yes", "cluster-node-timeout": self._node_timeout_ms,
            "save": "", "appendonly": "no",
            "maxmemory": "64mb", "maxmemory-policy": "noeviction", "protected-mode": "no",
            "repl-diskless-sync-delay": 0, "repl-ping-replica-period": 1,
        }  # fmt: skip
        options = [part for name, value in words.items() for part in (f"--{name}", str(value))]
        with (folder / "log").open("ab") as log:
            return subprocess.Popen([next(iter(_binaries())), *options], stdout=log, stderr=log)

    def join(self, until: Until) -> None:
        """Make one cluster of the servers: the first three own all slots, each has a replica."""
        for port, client in self.clients.items():
            until(lambda client=client: _pings(client), f"the server at {port}", 60)
        masters, replicas = self.ports[:NUM_MASTERS], self.ports[NUM_MASTERS:]
        for number, port in enumerate(masters):
            first = number * 16384 // NUM_MASTERS
            last = (number + 1) * 16384 // NUM_MASTERS - 1
            self._ask(port, "CLUSTER", "ADDSLOTSRANGE", first, last)
            self._ask(port, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for port in self.ports[1:]:
            self._ask(self.ports[0], "CLUSTER", "MEET", "127.0.0.1", port, port + 1)
        until(lambda: all(self._knows(port) for port in self.ports), "all nodes at each node", 60)
        for master, replica in zip(masters, replicas, strict=True):
            self._ask(replica, "CLUSTER", "REPLICATE", self.node_id(master))
        until(lambda: all(self.is_ok(port) for port in self.ports), "a cluster that is well", 60)
        until(lambda: all(map(self._is_synced, replicas)), "replicas that have caught up", 60)

    def node_id(self, port: int) -> str:
        return str(self._ask(port, "CLUSTER", "MYID"), "ascii")

    def is_ok(self, port: int) -> bool:
        return b"cluster_state:ok" in self._ask(port, "CLUSTER", "INFO")

    def owner(self, key: bytes) -> int:
        """Port of the master that holds a key, as any node that answers knows it."""
        slot = key_slot(KEY_PREFIX + key)
        for port in self.ports:
            with contextlib.suppress(RedisError, OSError):
                for first, last, master, *_ in self._ask(port, "CLUSTER", "SLOTS"):
                    if first <= slot <= last:
                        return int(master[1])
        raise AssertionError("no node knows who owns the slot")

    def move(self, slot: int, source: int, target: int) -> None:
        """Move a slot with its keys while both nodes go on answering."""
        self._ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", self.node_id(source))
        self._ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", self.node_id(target))
        while keys := self._ask(source, "CLUSTER", "GETKEYSINSLOT", slot, 10):
            self._ask(source, "MIGRATE", "127.0.0.1", target, "", 0, 5000, "KEYS", *keys)
        for port in (target, source):
            self._ask(port, "CLUSTER", "SETSLOT", slot, "NODE", self.node_id(target))

    def stop(self) -> None:
        for port in self.ports:
            self.clients[port].close()
            self.links[port].close()
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()

    def _ask(self, port: int, *command: Any) -> Any:
        return self.links[port].call(*command)

    def _knows(self, port: int) -> bool:
        lines = self._ask(port, "CLUSTER", "NODES").splitlines()
        return len(lines) == len(self.ports) and b"handshake" not in b"".join(lines)

    def _is_synced(self, port: int) -> bool:
        return b"master_link_status:up" in self._ask(port, "INFO", "replication")


def _pings(client: "Redis[bytes]") -> bool:
    try:
        return bool(client.ping())
    except RedisError:
        return False


def free_ports(count: int) -> list[int]:
    """Ports of which the next one is free as well, for the cluster's own talk."""
    found: list[int] = []
    for port in range(21_000, 29_000, 2):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for each in (port, port + 1):
                probe = stack.enter_context(socket.socket())
                probe.bind(("127.0.0.1", each))
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports")


@pytest.fixture
def cluster(tmp_path: Path, until: Until, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster in which a replica takes over from a master that is silent for a second."""
    made = Cluster(tmp_path, getattr(request, "param", 1000))
    try:
        made.join(until)
        yield made
    finally:
        made.stop()


@pytest.fixture
def store(cluster: Cluster) -> Iterator[ClusterStore]:
    """A store that holds a value under each of KEYS."""
    made = ClusterStore(cluster.url, TIMEOUT_S)
    assert made.put_many([(key, value_of(key)) for key in KEYS]) == len(KEYS)
    yield made
    made.close()


def look(store: ClusterStore, keys: Sequence[bytes] = KEYS) -> int:
    """How many values are found; each of them must be right."""
    found = store.get_many(keys)
    for key, value in zip(keys, found, strict=True):
        assert value is None or value == value_of(key)
    return sum(value is not None for value in found)


def test_values_are_spread_over_the_nodes_and_come_back_in_order(
    cluster: Cluster, store: ClusterStore
) -> None:
    assert look(store, KEYS[::-1]) == len(KEYS)
    sizes = [cluster.clients[port].dbsize() for port in cluster.ports[:NUM_MASTERS]]
    assert sum(sizes) == len(KEYS)
    assert min(sizes) > len(KEYS) // 6
    assert sorted(port for _, port in store.link.nodes()) == sorted(cluster.ports[:NUM_MASTERS])
    assert store.put_many([(KEYS[0], bytes(2_000_000))]) == 0
    assert look(store) == len(KEYS)


def test_damaged_and_exchanged_values_are_misses(cluster: Cluster, store: ClusterStore) -> None:
    key = KEYS[0]
    client = cluster.clients[cluster.owner(key)]
    name = KEY_PREFIX + key
    client.set(name, b"\0" + bytes(client.get(name) or b"")[1:])
    assert store.get_many([key]) == [None]
    assert client.get(name) is None
    assert store.counts.damaged == 1


def test_slots_that_move_during_20000_reads_cost_no_wrong_value_and_no_error(
    cluster: Cluster, store: ClusterStore
) -> None:
    slots = sorted({key_slot(KEY_PREFIX + key) for key in KEYS})
    ended = threading.Event()

    def move() -> None:
        try:
            for slot in slots[::3]:
                key = next(key for key in KEYS if key_slot(KEY_PREFIX + key) == slot)
                source = cluster.owner(key)
                others = [p for p in cluster.ports[:NUM_MASTERS] if p != source]
                cluster.move(slot, source, others[slot % 2])
        finally:
            ended.set()

    mover = threading.Thread(target=move)
    mover.start()
    reads, missed = 0, 0
    while reads < 20_000 or not ended.is_set():
        missed += len(KEYS) - look(store)
        reads += len(KEYS)
    mover.join()
    assert store.link.counts.redirected > 0
    assert store.link.counts.failed_calls == 0
    # A command on a key that is on its way may be told to try again: a miss.
    assert missed < reads / 100
    assert look(store) == len(KEYS)


def test_a_killed_master_costs_its_keys_until_its_replica_takes_over(
    cluster: Cluster, store: ClusterStore, until: Until
) -> None:
    victim = cluster.owner(KEYS[0])
    cluster.processes[victim].kill()
    lost = len(KEYS) - look(store)
    assert 0 < lost < len(KEYS) * 2 / 3
    until(lambda: look(store) == len(KEYS), "all values from the replica", 60)
    assert cluster.owner(KEYS[0]) != victim
    assert store.put_many([(KEYS[0], value_of(KEYS[0]))]) == 1


# No replica takes over: what is tried is the patience of the reader.
@pytest.mark.parametrize("cluster", [600_000], indirect=True)
def test_a_stopped_master_holds_nobody_up_once_its_breaker_is_open(
    cluster: Cluster, store: ClusterStore, until: Until
) -> None:
    victim = cluster.owner(KEYS[0])
    calm = _seconds(store)
    os.kill(cluster.processes[victim].pid, signal.SIGSTOP)
    for _ in range(FAILURES):
        look(store)
    node = store.link._nodes["127.0.0.1", victim]
    assert node.breaker.times_opened == 1
    # No answer is waited for: far less than the time that one would be given.
    assert _seconds(store) < calm + TIMEOUT_S / 2
    assert 0 < look(store) < len(KEYS)
    os.kill(cluster.processes[victim].pid, signal.SIGCONT)
    until(lambda: look(store) == len(KEYS), "all values", 60)


def _seconds(store: ClusterStore) -> float:
    started = time.monotonic()
    look(store)
    return time.monotonic() - started


def test_a_node_that_takes_connections_and_never_answers_is_left_alone(
    cluster: Cluster, store: ClusterStore
) -> None:
    victim = cluster.owner(KEYS[0])
    others = [key for key in KEYS if cluster.owner(key) != victim][:20]
    cluster.processes[victim].kill()
    cluster.processes[victim].wait()
    with socket.create_server(("127.0.0.1", victim)):
        fresh = ClusterStore(f"redis-cluster://127.0.0.1:{cluster.ports[1]}", TIMEOUT_S)
        with contextlib.closing(fresh):
            for _ in range(2 * FAILURES):
                assert look(fresh, others) == len(others)


def test_an_interrupt_between_sending_and_reading_mixes_up_no_replies(
    store: ClusterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = RedisLink.receive
    for interrupted_at in range(NUM_MASTERS):
        reads = 0

        def failing(self: RedisLink, count: int, at: int = interrupted_at) -> list[Any]:
            nonlocal reads
            reads += 1
            if reads == at + 1:
                raise KeyboardInterrupt
            return receive(self, count)

        with monkeypatch.context() as patched:
            patched.setattr(RedisLink, "receive", failing)
            with pytest.raises(KeyboardInterrupt):
                store.get_many(KEYS)
        assert look(store, KEYS[::-1]) == len(KEYS)


def test_the_evictor_keeps_its_budget_over_all_nodes(cluster: Cluster, store: ClusterStore) -> None:
    link = ClusterLink(cluster.url, 5)
    found = resident_in(link)
    assert {key for key, _ in found.pairs()} == set(KEYS)
    total = sum(found.sizes)
    evictor = Evictor(LruK(2, 1000), total // 2, unlink_in(link))
    evictor.touch(found)
    assert evictor.stats().bytes <= total // 2
    assert look(store) == evictor.stats().keys
    link.close()


def test_the_configuration_opens_a_cluster(cluster: Cluster, tmp_path: Path) -> None:
    config = RedisConfig.model_validate({"url": cluster.url})
    server = RedisServer.start(config, tmp_path)
    assert server is not None
    cache = open_cache(FeatureCacheConfig(timeout_s=TIMEOUT_S), server.url)
    assert isinstance(cache, FeatureCache)
    assert isinstance(cache.store, ClusterStore)
    for _ in range(2):
        values = cache.get_or_compute_many(KEYS, lambda at: [value_of(KEYS[i]) for i in at])
        assert values == [value_of(key) for key in KEYS]
    assert cache.stats.hits == len(KEYS)
    cache.close()
