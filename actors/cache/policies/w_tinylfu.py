"""W-TinyLFU: a newcomer stays only if it is used more often than what would have to go for it.

    window     new keys, by recency, 1 % of the budget
    probation  keys from the window; the oldest is what a newcomer is measured against
    protected  keys that were referenced on probation, at most 80 % of the rest

How often a key is used is counted over a sample of references and halved when the sample is full,
so that old fame fades; counts outlive residence.

Source: Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission policy", ACM
Transactions on Storage 2017 (arXiv:1512.00727). They count in a sketch; here counts are exact, for
at most ten times as many keys as are resident.
"""

from collections import OrderedDict

from eagleray.actors.cache.policies.policy import Residents

_WINDOW_SHARE = 0.01
_PROTECTED_SHARE = 0.8
_SAMPLE_PER_KEY = 10
_MIN_SAMPLE = 1000


class WTinyLfu(Residents):
    """Frequency decides who may enter, recency who is asked to leave.

    Args:
        max_bytes: The budget.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self._window_limit = _WINDOW_SHARE * max_bytes
        self._protected_limit = _PROTECTED_SHARE * (max_bytes - self._window_limit)
        self._window: OrderedDict[bytes, None] = OrderedDict()
        self._probation: OrderedDict[bytes, None] = OrderedDict()
        self._protected: OrderedDict[bytes, None] = OrderedDict()
        self._window_bytes = self._protected_bytes = 0
        self._counts: dict[bytes, int] = {}
        self._sampled = 0
        self._chosen: bytes | None = None

    def touch(self, key: bytes, size: int) -> None:
        """Note a reference; the key is resident from now on, with this size in bytes."""
        self._chosen = None
        self._count(key)
        is_new = key not in self
        change = self._resize(key, size)
        if is_new:
            self._window[key] = None
            self._window_bytes += size
        elif key in self._window:
            self._window_bytes += change
            self._window.move_to_end(key)
        elif key in self._protected:
            self._protected_bytes += change
            self._protected.move_to_end(key)
        else:
            del self._probation[key]
            self._protected[key] = None
            self._protected_bytes += size
        while self._protected_bytes > self._protected_limit and len(self._protected) > 1:
            demoted, _ = self._protected.popitem(last=False)
            self._protected_bytes -= self.size(demoted)
            self._probation[demoted] = None
        # While there is room, nobody has to be measured against anybody.
        while self._is_window_full() and self.total_bytes <= self._max_bytes:
            self._enter_main()

    def victim(self) -> bytes | None:
        """The key to evict next; None if nothing is resident. Keys move between the parts."""
        if self._chosen is None:
            self._chosen = self._choose()
        return self._chosen

    def remove(self, key: bytes) -> None:
        """Make a key not resident. Unknown keys are ignored."""
        size = self._release(key)
        if size is None:
            return
        self._chosen = None
        if key in self._window:
            del self._window[key]
            self._window_bytes -= size
        elif key in self._protected:
            del self._protected[key]
            self._protected_bytes -= size
        else:
            del self._probation[key]

    def _choose(self) -> bytes | None:
        rival = next(iter(self._probation or self._protected), None)
        if not self._is_window_full():
            return rival or next(iter(self._window), None)
        candidate = next(iter(self._window))
        if rival is None or self._frequency(candidate) <= self._frequency(rival):
            return candidate
        self._enter_main()
        return rival

    def _is_window_full(self) -> bool:
        return len(self._window) > 1 and self._window_bytes > self._window_limit

    def _enter_main(self) -> None:
        key, _ = self._window.popitem(last=False)
        self._window_bytes -= self.size(key)
        self._probation[key] = None

    def _count(self, key: bytes) -> None:
        self._counts[key] = self._counts.get(key, 0) + 1
        self._sampled += 1
        if self._sampled >= max(_MIN_SAMPLE, _SAMPLE_PER_KEY * len(self)):
            self._counts = {key: count // 2 for key, count in self._counts.items() if count > 1}
            self._sampled = sum(self._counts.values())

    def _frequency(self, key: bytes) -> int:
        return self._counts.get(key, 0)
