"""Values in a Redis Cluster; every fault of a node is a miss, for the keys of that node alone.

Key and value are those of framed_values.py, so a value is found by whoever knows its key.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from eagleray.actors.cache.cluster_link import ClusterLink, KeyedCommand
from eagleray.actors.cache.framed_values import KEY_PREFIX, FramedValues, RedisCounts
from eagleray.actors.cache.touches import TouchSink

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
        self._values = FramedValues(sink, clock)

    @property
    def counts(self) -> RedisCounts:
        """What went wrong."""
        self._values.counts.failed_calls = self.link.counts.failed_calls
        return self._values.counts

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The payload under each key digest; None where there is none to be had."""
        names = [KEY_PREFIX + key for key in keys]
        replies = self._each([(name, ("GET", name)) for name in names])
        found, damaged = self._values.unwrapped(keys, replies)
        self._each([(name, ("UNLINK", name)) for name in (KEY_PREFIX + key for key in damaged)])
        return found

    def put_many(self, items: Sequence[tuple[bytes, bytes]]) -> int:
        """Store payloads under key digests where there is room; how many were stored."""
        small = [(key, payload) for key, payload in items if len(payload) <= MAX_VALUE_BYTES]
        self._values.counts.refused += len(items) - len(small)
        commands = [(command[1], command) for command in self._values.commands(small)]
        return self._values.stored(small, self._each(commands))

    def close(self) -> None:
        """Hand over the touches and close the connections."""
        self._values.flush()
        self.link.close()

    def _each(self, commands: Sequence[KeyedCommand]) -> list[Any]:
        replies: list[Any] = []
        for start in range(0, len(commands), _COMMANDS_PER_CALL):
            replies += self.link.pipeline(commands[start : start + _COMMANDS_PER_CALL])
        return replies
