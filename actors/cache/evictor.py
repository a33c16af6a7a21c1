"""Keeps the values in Redis within a byte budget, from the references that readers report.

The server itself evicts nothing (`noeviction`): its own policies keep no K-th reference. Between
the budget and 85 % of it the evictor unlinks a few keys at a time, so that no reader waits long.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from redis.exceptions import RedisError, ResponseError

from eagleray.actors.cache.cluster_link import Address, ClusterLink
from eagleray.actors.cache.framed_values import ENTRY_OVERHEAD_BYTES, KEY_PREFIX
from eagleray.actors.cache.policies import EvictionPolicy, Scheduled
from eagleray.actors.cache.redis_link import Command, RedisLink
from eagleray.actors.cache.touches import Schedule, TouchBatch

logger = logging.getLogger(__name__)

LOW_MARK = 0.85
CHUNK_KEYS = 16
_SCAN_COUNT = 512
_MAX_SCANNED = 2_000_000

Unlink = Callable[[Sequence[bytes]], None]


@dataclass(frozen=True)
class EvictorStats:
    """Keys and bytes believed resident; touches taken and keys evicted since the start.

    `expected` are the look-ups that it knows will come.
    """

    keys: int
    bytes: int
    touches: int
    evicted: int
    expected: int = 0


class Evictor:
    """Decides what goes; a `TouchSink`. Not for several threads.

    A touch that arrives after its key was evicted makes it count as resident again: it is then
    evicted once more, which does nothing.

    Args:
        policy: Decides what goes.
        max_bytes: The budget, with what Redis adds to each value.
        unlink: Removes values by key digest. If it raises, they stay counted and are tried again
            later.
    """

    def __init__(self, policy: EvictionPolicy, max_bytes: int, unlink: Unlink) -> None:
        self._policy, self._max_bytes, self._unlink = policy, max_bytes, unlink
        self._touches = 0
        self._evicted = 0

    def touch(self, batch: TouchBatch) -> None:
        """Note references, then evict if the budget is exceeded."""
        for key, size in batch.pairs():
            self._policy.touch(key, size)
        self._touches += len(batch)
        if self._policy.total_bytes > self._max_bytes:
            self._evict()

    def expect(self, schedule: Schedule) -> None:
        """Note what will be referenced, if the policy goes by it."""
        if isinstance(self._policy, Scheduled):
            self._policy.follow(schedule.now, schedule.by_step())

    def stats(self) -> EvictorStats:
        """Figures since the start."""
        policy = self._policy
        expected = policy.num_expected if isinstance(policy, Scheduled) else 0
        return EvictorStats(len(policy), policy.total_bytes, self._touches, self._evicted, expected)

    def _evict(self) -> None:
        while self._policy.total_bytes > LOW_MARK * self._max_bytes:
            chunk: list[tuple[bytes, int]] = []
            excess = self._policy.total_bytes - LOW_MARK * self._max_bytes
            while len(chunk) < CHUNK_KEYS and sum(size for _, size in chunk) < excess:
                victim = self._policy.victim()
                if victim is None:
                    break
                chunk.append((victim, self._policy.size(victim)))
                self._policy.remove(victim)
            if not chunk:
                return
            try:
                self._unlink([key for key, _ in chunk])
            except (RedisError, OSError) as error:
                # They stay counted, as if just referenced; nothing grows while Redis is away.
                logger.debug("eviction failed keys=%d error=%s", len(chunk), error)
                for key, size in chunk:
                    self._policy.touch(key, size)
                return
            self._evicted += len(chunk)


def unlink_in(link: RedisLink | ClusterLink) -> Unlink:
    """Unlinks in one Redis or in a cluster."""

    def unlink(keys: Sequence[bytes]) -> None:
        names = [KEY_PREFIX + key for key in keys]
        if isinstance(link, RedisLink):
            link.call("UNLINK", *names)
            return
        replies = link.pipeline([(name, ("UNLINK", name)) for name in names])
        if failed := [reply for reply in replies if isinstance(reply, Exception)]:
            raise RedisError(f"{len(failed)} of {len(names)} keys not reached: {failed[0]}")

    return unlink


def resident_in(link: RedisLink | ClusterLink) -> TouchBatch:
    """What lies in Redis already, least recently used first: what a restarted evictor starts from.

    Of a cluster, what lies on the nodes that answer.

    Raises:
        RedisError: The server does not answer.
        OSError: The connection failed.
    """
    found: list[tuple[int, bytes, int]] = []
    if isinstance(link, RedisLink):
        found = _scan(link.pipeline)
    else:
        for address in link.nodes():
            with suppress(RedisError):
                found += _scan(partial(_on_node, link, address))
    found.sort(reverse=True)
    return TouchBatch(b"".join(key for _, key, _ in found), tuple(size for _, _, size in found))


def _on_node(link: ClusterLink, address: Address, commands: Sequence[Command]) -> list[Any]:
    replies = link.on_node(address, commands)
    if replies is None:
        raise RedisError(f"node {address[0]}:{address[1]} does not answer")
    return replies


def _scan(ask: Callable[[Sequence[Command]], list[Any]]) -> list[tuple[int, bytes, int]]:
    """(idle seconds, key digest, bytes) of each value on one server."""
    found: list[tuple[int, bytes, int]] = []
    cursor: bytes | int = 0
    while len(found) < _MAX_SCANNED:
        (reply,) = ask([("SCAN", cursor, "MATCH", KEY_PREFIX + b"*", "COUNT", _SCAN_COUNT)])
        if isinstance(reply, ResponseError):
            raise reply
        cursor, names = reply
        commands: list[Command] = [
            command
            for name in names
            for command in (("OBJECT", "IDLETIME", name), ("STRLEN", name))
        ]
        replies = ask(commands) if commands else []
        for name, idle, size in zip(names, replies[::2], replies[1::2], strict=True):
            if isinstance(idle, int) and isinstance(size, int):
                found.append((idle, name.removeprefix(KEY_PREFIX), size + ENTRY_OVERHEAD_BYTES))
        if cursor in (b"0", 0):
            break
    return found
