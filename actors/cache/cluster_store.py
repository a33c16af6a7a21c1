"""Values in a Redis Cluster; every fault of a node is a miss, for the keys of that node alone.

Key and value are those of redis_store.py, so a value is found by whoever knows its key.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import OutOfMemoryError

from eagleray.actors.cache.cluster_link import ClusterLink
from eagleray.actors.cache.frame import unwrap, wrap
from eagleray.actors.cache.redis_store import ENTRY_OVERHEAD_BYTES, KEY_PREFIX, RedisCounts
from eagleray.actors.cache.touches import TouchBuffer, TouchSink

logger = logging.getLogger(__name__)

MAX_VALUE_BYTES = 1_000_000
"""Larger values would hold up a node for others; they are not stored."""
_COMMANDS_PER_CALL = 64


class ClusterStore:
    """A value store in a cluster. Not for several threads.

    Args:
        url: redis-cluster:// or rediss-cluster://, of any node.
        timeout_s: A slower node counts as away.
        sink: Learns of each hit and each stored value; None: nobody evicts.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float,
        sink: TouchSink | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.link = ClusterLink(url, timeout_s, clock)
        self._touches = TouchBuffer(sink, clock) if sink else None
        self.counts = RedisCounts()

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The payload under each key digest; None where there is none to be had."""
        replies = self._each([("GET", KEY_PREFIX + key) for key in keys])
        found: list[bytes | None] = []
        damaged: list[bytes] = []
        for key, reply in zip(keys, replies, strict=True):
            payload = unwrap(key, reply) if isinstance(reply, bytes) else None
            if payload is not None:
                self._touch(key, payload)
            elif isinstance(reply, bytes):
                damaged.append(key)
            found.append(payload)
        if damaged:
            self.counts.damaged += len(damaged)
            logger.warning("damaged cache values dropped count=%d", len(damaged))
            self._each([("UNLINK", KEY_PREFIX + key) for key in damaged])
        return found

    def put_many(self, items: Sequence[tuple[bytes, bytes]]) -> int:
        """Store payloads under key digests where there is room; how many were stored."""
        small = [(key, payload) for key, payload in items if len(payload) <= MAX_VALUE_BYTES]
        self.counts.refused += len(items) - len(small)
        replies = self._each([("SET", KEY_PREFIX + key, wrap(key, p)) for key, p in small])
        stored = 0
        for (key, payload), reply in zip(small, replies, strict=True):
            if reply == b"OK":
                stored += 1
                self._touch(key, payload)
            elif isinstance(reply, OutOfMemoryError):
                self.counts.refused += 1
        return stored

    def close(self) -> None:
        """Hand over the touches and close the connections."""
        if self._touches:
            self._touches.flush()
        self.link.close()

    def _each(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The replies to commands whose first argument is their key."""
        replies: list[Any] = []
        for start in range(0, len(commands), _COMMANDS_PER_CALL):
            part = commands[start : start + _COMMANDS_PER_CALL]
            replies += self.link.pipeline([(command[1], command) for command in part])
        self.counts.failed_calls = self.link.counts.failed_calls
        return replies

    def _touch(self, key: bytes, payload: bytes) -> None:
        if self._touches:
            self._touches.add(key, len(payload) + ENTRY_OVERHEAD_BYTES)
