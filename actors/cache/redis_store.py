"""Values in Redis, read straight from it by each process; every fault of Redis is a miss.

Nothing here is retried: a value can always be computed again, and sooner than a sick server
answers.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from eagleray.actors.cache.breaker import Breaker
from eagleray.actors.cache.framed_values import KEY_PREFIX, FramedValues, RedisCounts
from eagleray.actors.cache.redis_link import Command, RedisLink
from eagleray.actors.cache.touches import TouchSink

logger = logging.getLogger(__name__)

_VALUES_PER_CALL = 16


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
        self._values = FramedValues(sink, clock)
        self.breaker = Breaker(clock)

    @property
    def counts(self) -> RedisCounts:
        """What went wrong."""
        return self._values.counts

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The payload under each key digest; None where there is none to be had."""
        values: list[Any] = []
        for start in range(0, len(keys), _VALUES_PER_CALL):
            part = keys[start : start + _VALUES_PER_CALL]
            replies = self._call([("MGET", *(KEY_PREFIX + key for key in part))])
            got = replies[0] if replies and isinstance(replies[0], list) else None
            if got is None or len(got) != len(part):
                break
            values += got
        found, damaged = self._values.unwrapped(keys[: len(values)], values)
        if damaged:
            self._call([("UNLINK", *(KEY_PREFIX + key for key in damaged))])
        return found + [None] * (len(keys) - len(found))

    def put_many(self, items: Sequence[tuple[bytes, bytes]]) -> int:
        """Store payloads under key digests where there is room; how many were stored."""
        stored = 0
        for start in range(0, len(items), _VALUES_PER_CALL):
            part = items[start : start + _VALUES_PER_CALL]
            replies = self._call(self._values.commands(part))
            if replies is None:
                break
            stored += self._values.stored(part, replies)
        return stored

    def close(self) -> None:
        """Hand over the touches and close the connection."""
        self._values.flush()
        self._link.close()

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
