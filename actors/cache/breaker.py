"""A circuit breaker: after some failures in a row a service is left alone for a while."""

from collections.abc import Callable

FAILURES = 3
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class Breaker:
    """Closed, it lets calls through; open, none, until its pause is over and one may try.

    Each failed try doubles the pause up to the longest; one success closes it. Not for several
    threads.

    `failures` are those in a row.

    Args:
        clock: Seconds that only grow.
        max_failures: So many in a row open it.
    """

    def __init__(self, clock: Callable[[], float], max_failures: int = FAILURES) -> None:
        self._clock, self._max_failures = clock, max_failures
        self.failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._open_until = 0.0
        self.times_opened = 0

    def allows(self) -> bool:
        """Whether a call may be made now."""
        return self.failures < self._max_failures or self._clock() >= self._open_until

    def succeeded(self) -> None:
        """Note a call that was answered in time."""
        self.failures, self._pause_s = 0, FIRST_PAUSE_S

    def failed(self) -> None:
        """Note a call that failed or came late."""
        self.failures += 1
        if self.failures >= self._max_failures:
            if self.failures > self._max_failures:
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._open_until = self._clock() + self._pause_s
            self.times_opened += 1
