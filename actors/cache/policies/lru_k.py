"""LRU-K: evict what was referenced K times longest ago.

    HIST(p, i) = time of the i-th most recent reference to p; minus infinity if there are fewer.
    victim     = the resident p with the smallest HIST(p, K); among those at minus infinity, the one
                 with the smallest HIST(p, 1).

Time is counted in references. History outlives residence ("retained information"), so a key that
comes back soon is not taken for new; how many such keys are remembered is bounded.

Source: O'Neil, O'Neil and Weikum, "The LRU-K page replacement algorithm", SIGMOD 1993. Their
correlated-reference period is not here: callers report one reference per batch of reads.
"""

import heapq
from collections import OrderedDict, deque

from eagleray.actors.cache.policies.policy import Residents


class LruK(Residents):
    """The order of eviction, by key, of values that are kept elsewhere. Not for several threads.

    Args:
        k: References that decide; 1 is plain LRU.
        max_history: Keys whose references are remembered after they were removed.
    """

    def __init__(self, k: int, max_history: int) -> None:
        if k < 1 or max_history < 0:
            raise ValueError(f"k={k} must be at least 1 and max_history={max_history} at least 0")
        super().__init__()
        self._k, self._max_history = k, max_history
        self._clock = 0
        self._references: dict[bytes, deque[int]] = {}
        self._retired: OrderedDict[bytes, None] = OrderedDict()
        # (has K references, deciding time, key); an entry is stale once its key was touched again.
        self._heap: list[tuple[bool, int, bytes]] = []

    def touch(self, key: bytes, size: int) -> None:
        """Note a reference; the key is resident from now on, with this size in bytes."""
        self._clock += 1
        self._resize(key, size)
        self._retired.pop(key, None)
        references = self._references.setdefault(key, deque(maxlen=self._k))
        references.append(self._clock)
        heapq.heappush(self._heap, self._entry(key))
        if len(self._heap) > 2 * len(self._sizes) + 64:
            self._heap = [self._entry(resident) for resident in self._sizes]
            heapq.heapify(self._heap)

    def victim(self) -> bytes | None:
        """The key to evict next; it stays resident until it is removed. None if nothing is."""
        while self._heap:
            entry = self._heap[0]
            if entry[2] in self._sizes and entry == self._entry(entry[2]):
                return entry[2]
            heapq.heappop(self._heap)
        return None

    def remove(self, key: bytes) -> None:
        """Make a key not resident; its references are remembered. Unknown keys are ignored."""
        if self._release(key) is None:
            return
        self._retired[key] = None
        if len(self._retired) > self._max_history:
            forgotten, _ = self._retired.popitem(last=False)
            del self._references[forgotten]

    def _entry(self, key: bytes) -> tuple[bool, int, bytes]:
        references = self._references[key]
        is_mature = len(references) == self._k
        return is_mature, references[0] if is_mature else references[-1], key
