"""What every store in Redis does with values, wherever it reads them from: frames, touches, counts.

key in Redis = "eagleray:v:" + 16-byte key digest;  value = frame (see frame.py)
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import OutOfMemoryError

from eagleray.actors.cache.frame import OVERHEAD_BYTES, unwrap, wrap
from eagleray.actors.cache.touches import TouchBuffer, TouchSink

logger = logging.getLogger(__name__)

KEY_PREFIX = b"eagleray:v:"
# What Redis adds to a value of this size: entry, object headers, key string (measured, 7.0 and
# 9.1).
ENTRY_OVERHEAD_BYTES = OVERHEAD_BYTES + 120

Item = tuple[bytes, bytes]


@dataclass
class RedisCounts:
    """What went wrong: values damaged, values refused for lack of room, calls that failed."""

    damaged: int = 0
    refused: int = 0
    failed_calls: int = 0


class FramedValues:
    """Turns replies into payloads and payloads into commands. Not for several threads.

    Args:
        sink: Learns of each hit and each stored value; None: nobody evicts.
        clock: Seconds that only grow.
    """

    def __init__(self, sink: TouchSink | None, clock: Callable[[], float]) -> None:
        self._touches = TouchBuffer(sink, clock) if sink else None
        self.counts = RedisCounts()

    def unwrapped(
        self, keys: Sequence[bytes], replies: Sequence[Any]
    ) -> tuple[list[bytes | None], list[bytes]]:
        """The payload in each reply, None where there is none; and the keys of damaged values."""
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
        return found, damaged

    def commands(self, items: Sequence[Item]) -> list[tuple[str, bytes, bytes]]:
        """What stores payloads under key digests."""
        return [("SET", KEY_PREFIX + key, wrap(key, payload)) for key, payload in items]

    def stored(self, items: Sequence[Item], replies: Sequence[Any]) -> int:
        """How many of them the replies say were stored."""
        count = 0
        for (key, payload), reply in zip(items, replies, strict=True):
            if reply == b"OK":
                count += 1
                self._touch(key, payload)
            elif isinstance(reply, OutOfMemoryError):
                self.counts.refused += 1
        return count

    def flush(self) -> None:
        """Hand over the touches."""
        if self._touches:
            self._touches.flush()

    def _touch(self, key: bytes, payload: bytes) -> None:
        if self._touches:
            self._touches.add(key, len(payload) + ENTRY_OVERHEAD_BYTES)
