"""Commands on one key each, to one Redis or to the nodes of a cluster, whichever the URL names.

Nothing is raised: what did not come stands in the reply's place.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from redis.exceptions import RedisError

from eagleray.actors.cache.breaker import Breaker
from eagleray.actors.cache.cluster_link import Away, ClusterLink, KeyedCommand, is_cluster_url
from eagleray.actors.cache.redis_link import RedisLink

logger = logging.getLogger(__name__)


class KeyedLink(Protocol):
    """Answers in bounded time. Not for several threads."""

    def pipeline(self, commands: Sequence[KeyedCommand]) -> list[Any]:
        """The replies in order; a refusal is a ResponseError, a silent server `Away`."""
        ...

    def close(self) -> None:
        """Let go of connections; the next call opens new ones."""
        ...


class SingleLink:
    """One Redis, which is left alone for a while after some failures in a row.

    Args:
        url: redis://, rediss:// or unix://.
        timeout_s: For connecting, and for each wait on the server.
        clock: Seconds that only grow.
    """

    def __init__(
        self, url: str, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._link, self._breaker = RedisLink(url, timeout_s), Breaker(clock)

    def pipeline(self, commands: Sequence[KeyedCommand]) -> list[Any]:
        """The replies in order; a refusal is a ResponseError, a silent server `Away`."""
        if commands and self._breaker.allows():
            try:
                replies = self._link.pipeline([command for _, command in commands])
            except (RedisError, OSError) as error:
                logger.debug("redis did not answer error=%s", error)
                self._breaker.failed()
            else:
                self._breaker.succeeded()
                return replies
        return [Away("the server does not answer")] * len(commands)

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        self._link.close()


def keyed_link(url: str, timeout_s: float) -> KeyedLink:
    """A link to what a URL names."""
    return (ClusterLink if is_cluster_url(url) else SingleLink)(url, timeout_s)
