"""Evict what will be used last, where it is known when values will be used.

A loader's order is a function of its seed, so the keys that it will ask for are known. Among those
the policy is Belady's MIN with bypass: what is needed later than everything else is evicted, and a
value that would be needed later than all that is kept is not kept at all. Keys that nobody expects
go first, in the order of LRU-K.

Source: Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal 1966; for loaders, Dryden et al., "Clairvoyant prefetching", SC 2021 (arXiv:2101.08734).
"""

import heapq
from collections import deque
from collections.abc import Iterable

from eagleray.actors.cache.policies.lru_k import LruK
from eagleray.actors.cache.policies.policy import Residents

_MAX_HISTORY = 4096


class Scheduled(Residents):
    """Exact next use inside the schedule, LRU-K outside it.

    Args:
        max_bytes: The budget.
        k: K of LRU-K.
    """

    def __init__(self, max_bytes: int, k: int = 2) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self._unexpected = LruK(k, _MAX_HISTORY)
        self._expected: dict[bytes, deque[int]] = {}
        self._position = 0
        # (minus position of the next use, key); an entry is stale once that use is over.
        self._heap: list[tuple[int, bytes]] = []

    def expect(self, keys: Iterable[bytes]) -> None:
        """Say which keys will be touched next, after those that were said before."""
        for key in keys:
            self._position += 1
            uses = self._expected.setdefault(key, deque())
            uses.append(self._position)
            if len(uses) == 1 and key in self:
                self._place(key)

    def touch(self, key: bytes, size: int) -> None:
        """Note a reference; the key is resident from now on, with this size in bytes."""
        self._use(key)
        self._resize(key, size)
        self._place(key)

    def admits(self, key: bytes, size: int) -> bool:
        """Whether there is room, or something else is needed later."""
        if self.total_bytes + size <= self._max_bytes or len(self._unexpected):
            return True
        uses = self._expected.get(key, deque())
        latest = self._latest()
        # The first use is the present one; the one after it decides.
        if latest is None or (len(uses) > 1 and uses[1] < self._next(latest)):
            return True
        self._use(key)
        return False

    def victim(self) -> bytes | None:
        """The key to evict next; None if nothing is resident."""
        return self._unexpected.victim() or self._latest()

    def remove(self, key: bytes) -> None:
        """Make a key not resident. Unknown keys are ignored."""
        self._release(key)
        self._unexpected.remove(key)

    def _use(self, key: bytes) -> None:
        uses = self._expected.get(key)
        if uses:
            uses.popleft()
            if not uses:
                del self._expected[key]

    def _place(self, key: bytes) -> None:
        if key not in self._expected:
            self._unexpected.touch(key, self.size(key))
            return
        self._unexpected.remove(key)
        heapq.heappush(self._heap, (-self._next(key), key))
        if len(self._heap) > 2 * len(self) + 64:
            self._heap = [(-self._next(k), k) for k in self if k in self._expected]
            heapq.heapify(self._heap)

    def _latest(self) -> bytes | None:
        """The resident key whose next use comes last."""
        while self._heap:
            position, key = self._heap[0]
            if key in self and key in self._expected and self._next(key) == -position:
                return key
            heapq.heappop(self._heap)
        return None

    def _next(self, key: bytes) -> int:
        return self._expected[key][0]
