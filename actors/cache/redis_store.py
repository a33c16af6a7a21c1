"""Values in Redis, read straight from it by each process; every fault of Redis is a miss.

    key in Redis = "eagleray:v:" + 16-byte key digest;  value = frame (see frame.py)

Nothing here is retried: a value can always be computed again, and sooner than a sick server
answers.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from eagleray.actors.cache.breaker import Breaker
from eagleray.actors.cache.frame import OVERHEAD_BYTES, unwrap, wrap
from eagleray.actors.cache.redis_link import Command, RedisLink
from eagleray.actors.cache.touches import TouchBuffer, TouchSink

logger = logging.getLogger(__name__)

KEY_PREFIX = b"eagleray:v:"
# What Redis adds to a value of this size: entry, object headers, key string (measured, 7.0 and
# 9.1).
ENTRY_OVERHEAD_BYTES = OVERHEAD_BYTES + 120
_VALUES_PER_CALL = 16


@dataclass
class RedisCounts:
    """What went wrong: values damaged, values refused for lack of room, calls that failed."""

    damaged: int = 0
    refused: int = 0
    failed_calls: int = 0


class RedisStore:
    """A value store in Redis. Not for several threads.

    Args:
        url: Where the server is.
        timeout_s: A slower answer counts as a failure.
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
        self._link = RedisLink(url, timeout_s)
        self._timeout_s, self._clock = timeout_s, clock
        self._touches = TouchBuffer(sink, clock) if sink else None
        self.breaker = Breaker(clock)
        self.counts = RedisCounts()

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The payload under each key digest; None where there is none to be had."""
        found: list[bytes | None] = []
        damaged: list[bytes] = []
        for start in range(0, len(keys), _VALUES_PER_CALL):
            part = keys[start : start + _VALUES_PER_CALL]
            replies = self._call([("MGET", *(KEY_PREFIX + key for key in part))])
            values = replies[0] if replies and isinstance(replies[0], list) else None
            if values is None or len(values) != len(part):
                break
            for key, value in zip(part, values, strict=True):
                payload = unwrap(key, value) if isinstance(value, bytes) else None
                if payload is None and value is not None:
                    damaged.append(key)
                elif payload is not None:
                    self._touch(key, payload)
                found.append(payload)
        if damaged:
            self.counts.damaged += len(damaged)
            logger.warning("damaged cache values dropped count=%d", len(damaged))
            self._call([("UNLINK", *(KEY_PREFIX + key for key in damaged))])
        return found + [None] * (len(keys) - len(found))

    def put_many(self, items: Sequence[tuple[bytes, bytes]]) -> int:
        """Store payloads under key digests where there is room; how many were stored."""
        stored = 0
        for start in range(0, len(items), _VALUES_PER_CALL):
            part = items[start : start + _VALUES_PER_CALL]
            replies = self._call([("SET", KEY_PREFIX + key, wrap(key, p)) for key, p in part])
            if replies is None:
                break
            for (key, payload), reply in zip(part, replies, strict=True):
                if reply == b"OK":
                    stored += 1
                    self._touch(key, payload)
                elif isinstance(reply, OutOfMemoryError):
                    self.counts.refused += 1
        return stored

    def close(self) -> None:
        """Hand over the touches and close the connection."""
        if self._touches:
            self._touches.flush()
        self._link.close()

    def _touch(self, key: bytes, payload: bytes) -> None:
        if self._touches:
            self._touches.add(key, len(payload) + ENTRY_OVERHEAD_BYTES)

    def _call(self, commands: Sequence[Command]) -> list[Any] | None:
        """The replies, or None if the server failed or is being left alone."""
        if not self.breaker.allows():
            return None
        started = self._clock()
        try:
            replies = self._link.pipeline(commands)
        except (RedisError, OSError) as error:
            self._failed(f"{type(error).__name__}: {error}")
            return None
        refusals = [r for r in replies if isinstance(r, ResponseError)]
        if any(not isinstance(r, OutOfMemoryError) for r in refusals):
            self._failed(f"refused: {refusals[0]}")
        elif self._clock() - started > self._timeout_s:
            self._failed("late")
        else:
            self.breaker.succeeded()
        return replies

    def _failed(self, reason: str) -> None:
        self.counts.failed_calls += 1
        opened = self.breaker.times_opened
        self.breaker.failed()
        if self.breaker.times_opened == 1 and opened == 0:
            logger.warning("feature cache unavailable, reading without it reason=%s", reason)
