"""Who computes a value that several processes miss at once: whoever holds the lease of its key.

    SET eagleray:l:{<name of the value>} <token> NX PX <ms>

In a cluster the braces put a lease where its value is, so that both are away together: a lease of
what cannot be stored would have all compute it, but one after the other. (The few names with a
closing brace of their own lie elsewhere, which only then matters.)

A lease ends by itself when its holder dies, is renewed while the holder is at work, and is given
back only by who holds its token. It saves work and guards nothing: whoever waits too long computes
the value as well, which is the same value.

Nobody waits while holding a lease, so no two processes can wait for each other.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from eagleray.actors.cache.framed_values import KEY_PREFIX
from eagleray.actors.cache.keyed_link import KeyedLink, keyed_link

LEASE_PREFIX = b"eagleray:l:"
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end"
_RENEW = (
    "if redis.call('GET', KEYS[1]) == ARGV[1] then "
    "return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end"
)


def _name(key: bytes) -> bytes:
    """What the lease of a key digest is called in Redis."""
    return LEASE_PREFIX + b"{" + KEY_PREFIX + key + b"}"


class Leases(Protocol):
    """Hands out leases. Answers in bounded time; a fault hands out every lease asked for."""

    def take(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of the key digests are ours to compute now."""
        ...

    def held(self, keys: Sequence[bytes]) -> Any:
        """A context in which the leases of these keys are kept up, and given back at its end."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...


class RedisLeases:
    """Leases in the Redis, or the cluster, that holds the values. Not for several threads.

    Whatever a server that is away would have said, it hands out: then each computes for itself.

    Args:
        url: Where the server is, or a node of the cluster.
        timeout_s: A slower answer counts as none.
        lease_s: After so long without a word a holder counts as dead.
    """

    def __init__(self, url: str, timeout_s: float, lease_s: float = 5.0) -> None:
        self.lease_s = lease_s
        self._connect = partial(keyed_link, url, timeout_s)
        self._link = self._connect()
        self._token = secrets.token_bytes(16)
        self._ms = max(1, round(lease_s * 1000))

    def take(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of the key digests are ours to compute now."""
        names = [_name(key) for key in keys]
        replies = self._link.pipeline(
            [(name, ("SET", name, self._token, "NX", "PX", self._ms)) for name in names]
        )
        # None says that somebody else holds it; a refusal, that nobody can.
        return [reply is not None for reply in replies]

    @contextmanager
    def held(self, keys: Sequence[bytes]) -> Iterator[None]:
        """A context in which the leases of these keys are kept up, and given back at its end."""
        ended = threading.Event()
        renewer = threading.Thread(target=self._renew, args=(list(keys), ended), daemon=True)
        renewer.start()
        try:
            yield
        finally:
            ended.set()
            renewer.join()
            self._each(self._link, _RELEASE, keys)

    def close(self) -> None:
        """Close the connections; leases that are still held end by themselves."""
        self._link.close()

    def _renew(self, keys: Sequence[bytes], ended: threading.Event) -> None:
        link = self._connect()
        try:
            while not ended.wait(self.lease_s / 3):
                self._each(link, _RENEW, keys, self._ms)
        finally:
            link.close()

    def _each(self, link: KeyedLink, script: str, keys: Sequence[bytes], *more: int) -> None:
        # What is not reached ends by itself; at worst others wait for that long.
        names = [_name(key) for key in keys]
        link.pipeline([(name, ("EVAL", script, 1, name, self._token, *more)) for name in names])


class SingleFlight:
    """Computes what is missing, each value in one process at a time.

    Args:
        leases: Say who.
        look: Looks values up in the store that all processes share.
        keep: Puts computed values there.
        wait_s: After so long what others are still at is computed here as well.
        clock: Seconds that only grow.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        leases: Leases,
        look: Callable[[Sequence[bytes]], list[bytes | None]],
        keep: Callable[[Sequence[tuple[bytes, bytes]]], int],
        wait_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._leases, self._look, self._keep = leases, look, keep
        self._wait_s = wait_s
        self._clock, self._sleep = clock, sleep

    def fill(
        self, keys: Sequence[bytes], compute: Callable[[list[int]], list[bytes]]
    ) -> tuple[list[bytes], int]:
        """The value of each key digest, all of them missing a moment ago, and how many were kept.

        Args:
            keys: Different ones.
            compute: Given indices in `keys`, returns their values in that order.
        """
        values: dict[int, bytes] = {}
        stored = 0
        waiting = list(range(len(keys)))
        give_up_s = self._clock() + self._wait_s
        pause_s = 0.002
        while waiting:
            taken = self._leases.take([keys[i] for i in waiting])
            ours = [i for i, is_ours in zip(waiting, taken, strict=True) if is_ours]
            if not ours and self._clock() >= give_up_s:
                ours = list(waiting)
            if ours:
                stored += self._compute(ours, keys, compute, values)
                waiting = [i for i in waiting if i not in values]
                continue
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
            found = self._look([keys[i] for i in waiting])
            values.update(
                {i: value for i, value in zip(waiting, found, strict=True) if value is not None}
            )
            waiting = [i for i in waiting if i not in values]
        return [values[i] for i in range(len(keys))], stored

    def _compute(
        self,
        ours: list[int],
        keys: Sequence[bytes],
        compute: Callable[[list[int]], list[bytes]],
        values: dict[int, bytes],
    ) -> int:
        with self._leases.held([keys[i] for i in ours]):
            # Somebody may have stored it, and given its lease back, since it was looked up.
            found = self._look([keys[i] for i in ours])
            values.update({i: v for i, v in zip(ours, found, strict=True) if v is not None})
            missing = [i for i in ours if i not in values]
            if not missing:
                return 0
            computed = compute(missing)
            if len(computed) != len(missing):
                raise ValueError(f"compute gave {len(computed)} values for {len(missing)} keys")
            values.update(zip(missing, computed, strict=True))
            return self._keep([(keys[i], values[i]) for i in missing])
