"""What a key may use: requests per second, requests at once, tokens per minute.

Each replica counts for itself. Rates are token buckets: a key that was silent may send a second's
requests, or use a minute's tokens, at once. Tokens are counted when an answer ends, prompt and
output, so the last one may overdraw; then the key waits until that is paid.
"""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from eagleray.serve.api.refusal import ApiError

_MINUTE_S = 60.0


@dataclass(frozen=True)
class KeyLimits:
    """Bounds of one key; None: none."""

    requests_per_s: float | None = None
    concurrency: int | None = None
    tokens_per_min: int | None = None

    def over(self, other: "KeyLimits") -> "KeyLimits":
        """These, and where they say nothing the other's."""
        return KeyLimits(
            other.requests_per_s if self.requests_per_s is None else self.requests_per_s,
            other.concurrency if self.concurrency is None else self.concurrency,
            other.tokens_per_min if self.tokens_per_min is None else self.tokens_per_min,
        )


class _Bucket:
    """Fills with time up to its size; may be overdrawn."""

    def __init__(self, now_s: float) -> None:
        self._level: float | None = None
        self._at_s = now_s

    def wait_s(self, now_s: float, per_s: float, size: float, need: float) -> float:
        """Seconds until it holds `need`; 0 if it does."""
        before = size if self._level is None else self._level
        self._level = min(size, before + per_s * max(0.0, now_s - self._at_s))
        self._at_s = now_s
        return max(0.0, (need - self._level) / per_s)

    def take(self, amount: float) -> None:
        """Take out what may be more than it holds; nothing as long as nobody asked."""
        if self._level is not None:
            self._level -= amount


class _Account:
    def __init__(self, now_s: float) -> None:
        self.requests, self.tokens = _Bucket(now_s), _Bucket(now_s)
        self.num_inside = 0


class Visit:
    """A request that was let in; it must leave once."""

    def __init__(self, leave: Callable[[int], None]) -> None:
        self._leave: Callable[[int], None] | None = leave

    def leave(self, num_tokens: int) -> None:
        """It has ended, with so many tokens; again: nothing happens."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave(num_tokens)


class Allowances:
    """Counts what keys use. May be called from any thread.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._accounts: dict[str, _Account] = {}

    def enter(self, name: str, limits: KeyLimits) -> Visit:
        """Let a request of a key in.

        Raises:
            ApiError: 429; the message names the limit, Retry-After when to come back.
        """
        with self._lock:
            now_s = self._clock()
            account = self._accounts.setdefault(name, _Account(now_s))
            self._check(name, limits, account, now_s)
            account.num_inside += 1
            if limits.requests_per_s is not None:
                account.requests.take(1)

        def leave(num_tokens: int) -> None:
            with self._lock:
                account.num_inside -= 1
                account.tokens.take(num_tokens)

        return Visit(leave)

    def _check(self, name: str, limits: KeyLimits, account: _Account, now_s: float) -> None:
        if limits.concurrency is not None and account.num_inside >= limits.concurrency:
            raise _refused(name, f"{limits.concurrency} requests at once", 1.0)
        if (rate := limits.requests_per_s) is not None:
            wait_s = account.requests.wait_s(now_s, rate, max(1.0, rate), 1.0)
            if wait_s:
                raise _refused(name, f"{rate:g} requests per second", wait_s)
        if (tokens := limits.tokens_per_min) is not None:
            # One token left is enough: nobody knows yet how many there will be.
            wait_s = account.tokens.wait_s(now_s, tokens / _MINUTE_S, tokens, 1.0)
            if wait_s:
                raise _refused(name, f"{tokens} tokens per minute", wait_s)


def _refused(name: str, what: str, wait_s: float) -> ApiError:
    return ApiError(
        429,
        f"the key {name!r} may use {what} on each replica: retry after {math.ceil(wait_s)} s",
        "rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(math.ceil(wait_s))},
    )
