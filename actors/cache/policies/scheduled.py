"""Evict what will be used last, where it is known when values will be used.

A loader's order is a function of its seed, so the keys that it will ask for are known. Among those
the policy is Belady's MIN with bypass: what is needed later than everything else is evicted, and a
value that would be needed later than all that is kept is not kept at all. Keys that nobody expects
go first, in the order of LRU-K.

A use ends with the touch that it foretold, or, where that got lost or never came, when its position
is passed: a reader that died must not hold values here for ever.

Source: Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal 1966; for loaders, Dryden et al., "Clairvoyant prefetching", SC 2021 (arXiv:2101.08734).
"""

import heapq
from bisect import insort
from collections.abc import Iterable

from eagleray.actors.cache.policies.lru_k import LruK
from eagleray.actors.cache.policies.policy import Residents

_MAX_HISTORY = 4096
MAX_EXPECTED = 262_144
"""Uses that are kept in mind; later ones are not heard."""


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
        self._expected: dict[bytes, list[int]] = {}
        self.num_expected = self._position = 0
        # (position, key) of uses at given positions; stale once a touch has ended it.
        self._ahead: list[tuple[int, bytes]] = []
        # (minus position of the next use, key); an entry is stale once that use is over.
        self._heap: list[tuple[int, bytes]] = []

    def expect(self, keys: Iterable[bytes], position: int | None = None) -> None:
        """Say which keys will be touched.

        Args:
            keys: In the order of their touches.
            position: Of all of them; None: one after the other, after those that were said before.
        """
        for key in keys:
            self._position = self._position + 1 if position is None else position
            if self.num_expected >= MAX_EXPECTED:
                return
            self.num_expected += 1
            uses = self._expected.setdefault(key, [])
            insort(uses, self._position)
            if position is not None:
                heapq.heappush(self._ahead, (position, key))
            if uses[0] == self._position and key in self:
                self._place(key)

    def follow(self, now: int, uses: Iterable[tuple[int, Iterable[bytes]]]) -> None:
        """Say that what was expected before position `now` is over, and what is expected at others.

        Args:
            now: Where the reader is.
            uses: (position, keys) of what was not said before.
        """
        self._pass(now)
        for position, keys in uses:
            self.expect(keys, position)

    def _pass(self, position: int) -> None:
        if len(self._ahead) > 2 * self.num_expected + 64:
            # Most were ended by touches.
            self._ahead = [(at, key) for key, uses in self._expected.items() for at in uses]
            heapq.heapify(self._ahead)
        while self._ahead and self._ahead[0][0] < position:
            key = heapq.heappop(self._ahead)[1]
            uses = self._expected.get(key)
            if uses and uses[0] < position:
                self._use(key)
                if key in self:
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
        uses = self._expected.get(key, [])
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
            del uses[0]
            self.num_expected -= 1
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
