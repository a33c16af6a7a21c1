"""Redis Cluster, spoken to node by node: each command goes to the node that owns its key's slot.

A batch is cut by node and sent to all of them before the first reply is read, so it takes as long
as the slowest node and not as long as all of them; nodes that say nothing are waited for together.
Every fault concerns one node or one command:

    MOVED       asked again where the reply says; the map of slots is read anew before the next one
    ASK         asked again there, after ASKING, this once
    TRYAGAIN, CLUSTERDOWN, LOADING and the like
                stand in the reply's place: for a cache, a miss
    no answer   `Away` stands in the reply's place; after some of those in a row the node is left
                alone for a while (breaker.py), and the map is read anew from another one

Nothing is retried but what was redirected, and that once. Keys are used as they are: slots follow
the cluster specification, https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from redis.crc import key_slot
from redis.exceptions import AskError, MovedError, RedisError, ResponseError

from eagleray.actors.cache.breaker import Breaker
from eagleray.actors.cache.exchange import exchange
from eagleray.actors.cache.redis_link import Command, RedisLink

logger = logging.getLogger(__name__)

SCHEMES = {"redis-cluster": "redis", "rediss-cluster": "rediss"}
NUM_SLOTS = 16_384
_REFRESH_S = 0.5
"""The map is read at most so often, however many replies say that it is old."""

Address = tuple[str, int]
KeyedCommand = tuple[bytes, Command]


class Away(Exception):
    """Stands for the reply of a node that gave none."""


def is_cluster_url(url: str) -> bool:
    """Whether a URL names a cluster: redis-cluster:// or rediss-cluster://."""
    return urlsplit(url).scheme in SCHEMES


@dataclass
class _Node:
    link: RedisLink
    breaker: Breaker


@dataclass
class ClusterCounts:
    """What happened: commands that were redirected, maps that were read, calls that failed."""

    redirected: int = 0
    refreshed: int = 0
    failed_calls: int = 0
    by_node: dict[Address, int] = field(default_factory=dict)
    """Failed calls of each node."""


class ClusterLink:
    """Connections to the nodes of a cluster, opened when needed. Not for several threads.

    Args:
        url: redis-cluster:// or rediss-cluster://, of any node.
        timeout_s: For connecting, and for each wait on nodes, however many are silent.
        clock: Seconds that only grow.

    Raises:
        ValueError: The URL has another form.
    """

    def __init__(
        self, url: str, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES or not parts.hostname:
            raise ValueError(f"a cluster's URL begins with {' or '.join(SCHEMES)}://HOST")
        self._seed: Address = (parts.hostname, parts.port or 6379)
        login = f"{parts.username or ''}:{parts.password}@" if parts.password else ""
        self._prefix = f"{SCHEMES[parts.scheme]}://{login}"
        self._timeout_s, self._clock = timeout_s, clock
        self._nodes: dict[Address, _Node] = {}
        self._owners: list[Address | None] = [None] * NUM_SLOTS
        self._is_stale, self._read_s = True, float("-inf")
        self.counts = ClusterCounts()

    def pipeline(self, commands: Sequence[KeyedCommand]) -> list[Any]:
        """The replies to commands on one key each, in their order.

        A refusal stands in its place as a ResponseError, a node that did not answer as `Away`.
        """
        self._refresh()
        owners = [self._owners[key_slot(key)] for key, _ in commands]
        replies: list[Any] = [Away("no node owns the slot")] * len(commands)
        if None in owners:
            self._is_stale = True
        self._scatter(
            ((owner, at, (commands[at][1],)) for at, owner in enumerate(owners) if owner), replies
        )
        redirected: list[tuple[Address, int, tuple[Command, ...]]] = []
        for at, (reply, owner) in enumerate(zip(replies, owners, strict=True)):
            if not isinstance(reply, MovedError | AskError) or owner is None:
                continue
            is_moved = isinstance(reply, MovedError)
            self._is_stale = self._is_stale or is_moved
            # A node that does not know the other's address means its own host.
            target = (reply.host or owner[0], reply.port)
            command = commands[at][1]
            redirected.append((target, at, (command,) if is_moved else (("ASKING",), command)))
        if redirected:
            self.counts.redirected += len(redirected)
            self._scatter(redirected, replies)
        return replies

    def nodes(self) -> list[Address]:
        """The nodes that own slots now."""
        self._refresh()
        return list(dict.fromkeys(owner for owner in self._owners if owner))

    def on_node(self, address: Address, commands: Sequence[Command]) -> list[Any] | None:
        """The replies of one node to commands without a key; None if it did not answer."""
        replies: list[Any] = [Away()] * len(commands)
        self._scatter(((address, at, (c,)) for at, c in enumerate(commands)), replies)
        return None if any(isinstance(reply, Away) for reply in replies) else replies

    def close(self) -> None:
        """Close all connections; the next call opens new ones."""
        for node in self._nodes.values():
            node.link.close()

    def _scatter(
        self,
        wanted: Iterable[tuple[Address, int, tuple[Command, ...]]],
        replies: list[Any],
    ) -> None:
        """Send commands to their nodes; the reply to the last of each goes to its place."""
        by_node: dict[Address, list[tuple[int, tuple[Command, ...]]]] = {}
        for address, at, group in wanted:
            replies[at] = Away(f"{address[0]}:{address[1]} does not answer")
            by_node.setdefault(address, []).append((at, group))
        nodes = {address: self._node(address) for address in by_node}
        asked = {address: node for address, node in nodes.items() if node.breaker.allows()}
        # Whoever took over from a node that is left alone stands in the map.
        self._is_stale = self._is_stale or len(asked) < len(nodes)
        outcomes = exchange(
            [
                (node.link, [command for _, group in by_node[address] for command in group])
                for address, node in asked.items()
            ]
        )
        for (address, node), outcome in zip(asked.items(), outcomes, strict=True):
            if isinstance(outcome, Exception):
                self._failed(address, node, outcome)
                continue
            node.breaker.succeeded()
            end = 0
            for at, group in by_node[address]:
                end += len(group)
                replies[at] = outcome[end - 1]

    def _failed(self, address: Address, node: _Node, error: Exception) -> None:
        self._is_stale = True
        self.counts.failed_calls += 1
        self.counts.by_node[address] = self.counts.by_node.get(address, 0) + 1
        opened = node.breaker.times_opened
        node.breaker.failed()
        if node.breaker.times_opened == 1 and opened == 0:
            logger.warning(
                "cache node unavailable, reading without it node=%s:%d reason=%s: %s",
                *address, type(error).__name__, error,
            )  # fmt: skip

    def _node(self, address: Address) -> _Node:
        if address not in self._nodes:
            host, port = address
            url = f"{self._prefix}{f'[{host}]' if ':' in host else host}:{port}"
            self._nodes[address] = _Node(RedisLink(url, self._timeout_s), Breaker(self._clock))
        return self._nodes[address]

    def _refresh(self) -> None:
        """Read the map of slots anew if it is old, from the first node that gives it.

        Nodes that failed last are asked last, and none once the time-out is over.
        """
        if not self._is_stale or self._clock() - self._read_s < _REFRESH_S:
            return
        self._read_s = self._clock()
        give_up_s = time.monotonic() + self._timeout_s
        known = {address: self._node(address) for address in [*self._owning(), self._seed]}
        for address, node in sorted(known.items(), key=lambda each: each[1].breaker.failures):
            if not node.breaker.allows():
                continue
            if time.monotonic() >= give_up_s:
                return
            try:
                ranges = node.link.call("CLUSTER", "SLOTS")
            except (RedisError, OSError) as error:
                if not isinstance(error, ResponseError):
                    self._failed(address, node, error)
                continue
            node.breaker.succeeded()
            self._take(ranges, address)
            self._is_stale = False
            self.counts.refreshed += 1
            return

    def _take(self, ranges: Sequence[Any], asked: Address) -> None:
        owners: list[Address | None] = [None] * NUM_SLOTS
        for first, last, master, *_ in ranges:
            # A node that does not know its own address gives none.
            host = master[0].decode() if master[0] else asked[0]
            owners[first : last + 1] = [(host, int(master[1]))] * (last - first + 1)
        self._owners = owners
        for address in self._nodes.keys() - set(owners) - {self._seed}:
            self._nodes.pop(address).link.close()

    def _owning(self) -> list[Address]:
        return list(dict.fromkeys(owner for owner in self._owners if owner))
