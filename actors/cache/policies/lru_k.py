"""LRU-K: evict what was referenced K times longest ago.

    HIST(p, i) = time of the i-th most recent reference to p; minus infinity if there are fewer.
    victim     = the resident p with the smallest HIST(p, K); among those at minus infinity, the one
                 with the smallest HIST(p, 1).

Time is counted in references. History outlives residence ("retained information"), so a key that
comes back soon is not taken for new; how many such keys are remembered is bounded.

A key that has just come is on probation in a window, by recency, and is evicted only if nothing
else is left; references to it there are correlated and count as one, the latest. Without this a
burst of references passes for lasting interest, and a key may go before its second one comes.

Source: O'Neil, O'Neil and Weikum, "The LRU-K page replacement algorithm", SIGMOD 1993. Their
correlated-reference period is a time; here it is a share of the room, as what follows from it is
how much room is held back.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable

from eagleray.actors.cache.policies.policy import Residents


class LruK(Residents):
    """The order of eviction, by key, of values that are kept elsewhere. Not for several threads.

    Args:
        k: References that decide; 1 is plain LRU.
        max_history: Keys whose references are remembered after they were removed.
        window_bytes: Room for keys on probation; 0: none are.
        history_share: At most so many of them for each resident key; None: no such limit.
    """

    def __init__(
        self,
        k: int,
        max_history: int,
        window_bytes: float = 0,
        history_share: float | None = None,
    ) -> None:
        if k < 1 or max_history < 0:
            raise ValueError(f"k={k} must be at least 1 and max_history={max_history} at least 0")
        super().__init__()
        self._k, self._max_history = k, max_history
        self._window_limit, self._history_share = window_bytes, history_share
        self._window: OrderedDict[bytes, None] = OrderedDict()
        self._window_bytes = 0
        self._clock = 0
        self._references: dict[bytes, deque[int]] = {}
        self._retired: OrderedDict[bytes, None] = OrderedDict()
        # (has K references, deciding time, key); an entry is stale once its key was touched again.
        self._heap: list[tuple[bool, int, bytes]] = []

    def touch(self, key: bytes, size: int) -> None:
        """Note a reference; the key is resident from now on, with this size in bytes."""
        self._clock += 1
        is_new = key not in self
        change = self._resize(key, size)
        self._retired.pop(key, None)
        references = self._references.setdefault(key, deque(maxlen=self._k))
        if key in self._window:
            references[-1] = self._clock
            self._window_bytes += change
            self._window.move_to_end(key)
        else:
            references.append(self._clock)
            if is_new and self._window_limit:
                self._window[key] = None
                self._window_bytes += size
            else:
                self._rank(key)
        while self._window_bytes > self._window_limit:
            oldest, _ = self._window.popitem(last=False)
            self._window_bytes -= self.size(oldest)
            self._rank(oldest)

    def victim(self) -> bytes | None:
        """The key to evict next; it stays resident until it is removed. None if nothing is."""
        while self._heap:
            entry = self._heap[0]
            key = entry[2]
            if key in self and key not in self._window and entry == self._entry(key):
                return key
            heapq.heappop(self._heap)
        return next(iter(self._window), None)

    def remove(self, key: bytes) -> None:
        """Make a key not resident; its references are remembered. Unknown keys are ignored."""
        if not self._drop(key):
            return
        self._retired[key] = None
        limit: float = self._max_history
        if self._history_share is not None:
            limit = min(limit, self._history_share * len(self))
        while len(self._retired) > limit:
            forgotten, _ = self._retired.popitem(last=False)
            del self._references[forgotten]

    def adjust(self, window_bytes: float, history_share: float | None) -> None:
        """Go on with another window and history; what is resident stays so."""
        self._window_limit, self._history_share = window_bytes, history_share

    def forget(self, is_forgotten: Callable[[bytes], bool]) -> None:
        """Make keys not resident, and remember nothing of them."""
        for key in [key for key in self._references if is_forgotten(key)]:
            self._drop(key)
            self._retired.pop(key, None)
            del self._references[key]

    def _drop(self, key: bytes) -> bool:
        """Count a key as gone; whether it was resident."""
        size = self._release(key)
        if size is None:
            return False
        if key in self._window:
            del self._window[key]
            self._window_bytes -= size
        return True

    def _rank(self, key: bytes) -> None:
        heapq.heappush(self._heap, self._entry(key))
        if len(self._heap) > 2 * len(self) + 64:
            self._heap = [self._entry(one) for one in self if one not in self._window]
            heapq.heapify(self._heap)

    def _entry(self, key: bytes) -> tuple[bool, int, bytes]:
        references = self._references[key]
        is_mature = len(references) == self._k
        return is_mature, references[0] if is_mature else references[-1], key
