"""Values in this process's memory, for when there is no Redis; a policy bounds their bytes."""

from collections.abc import Sequence

from eagleray.actors.cache.policies import EvictionPolicy, Scheduled
from eagleray.actors.cache.touches import Schedule


class MemoryStore:
    """A value store in a dictionary. Not for several threads.

    Args:
        policy: Decides what goes.
        max_bytes: Sum of the payloads that are kept.
    """

    def __init__(self, policy: EvictionPolicy, max_bytes: int) -> None:
        self._policy, self._max_bytes = policy, max_bytes
        self._payloads: dict[bytes, bytes] = {}

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The payload under each key digest; None where there is none."""
        found = [self._payloads.get(key) for key in keys]
        for key, payload in zip(keys, found, strict=True):
            if payload is not None:
                self._policy.touch(key, len(payload))
        return found

    def put_many(self, items: Sequence[tuple[bytes, bytes]]) -> int:
        """Keep payloads under key digests and evict down to the limit; how many were kept."""
        stored = 0
        for key, payload in items:
            size = len(payload)
            if size > self._max_bytes or not self._policy.admits(key, size):
                continue
            self._payloads[key] = payload
            self._policy.touch(key, size)
            while self._policy.total_bytes > self._max_bytes:
                victim = self._policy.victim()
                if victim is None:
                    break
                self._policy.remove(victim)
                del self._payloads[victim]
            stored += key in self._payloads
        return stored

    def expect(self, schedule: Schedule) -> None:
        """Note what will be looked up, if the policy goes by it."""
        if isinstance(self._policy, Scheduled):
            self._policy.follow(schedule.now, schedule.by_step())

    @property
    def total_bytes(self) -> int:
        """Sum of the payloads that are kept."""
        return self._policy.total_bytes

    def close(self) -> None:
        """Forget everything."""
        self._payloads.clear()
