"""S3-FIFO: three queues; most keys are used once and leave through the small one.

    small  new keys; at its end a key that was referenced again moves to main, any other goes
    main   at its end a key that was referenced goes round once more for each reference, up to three
    ghost  keys that left through small; one that comes back starts in main

Source: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1.
Sizes are in bytes here; the ghost queue remembers as many keys as main or small holds.
"""

from collections import OrderedDict

from eagleray.actors.cache.policies.policy import Residents

_SMALL_SHARE = 0.1
_MAX_COUNT = 3


class S3Fifo(Residents):
    """Small, static, and as good as most on the traces of its authors.

    Args:
        max_bytes: The budget; a tenth of it is the small queue's.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._small_limit = _SMALL_SHARE * max_bytes
        self._small: OrderedDict[bytes, None] = OrderedDict()
        self._main: OrderedDict[bytes, None] = OrderedDict()
        self._ghost: OrderedDict[bytes, None] = OrderedDict()
        self._counts: dict[bytes, int] = {}
        self._small_bytes = 0

    def touch(self, key: bytes, size: int) -> None:
        """Note a reference; the key is resident from now on, with this size in bytes."""
        is_new = key not in self
        change = self._resize(key, size)
        if not is_new:
            self._counts[key] = min(_MAX_COUNT, self._counts[key] + 1)
            if key in self._small:
                self._small_bytes += change
            return
        self._counts[key] = 0
        if key in self._ghost:
            del self._ghost[key]
            self._main[key] = None
        else:
            self._small[key] = None
            self._small_bytes += size

    def victim(self) -> bytes | None:
        """The key to evict next; None if nothing is resident. Keys move between the queues."""
        while self._small or self._main:
            if self._small and (self._small_bytes > self._small_limit or not self._main):
                key = next(iter(self._small))
                if self._counts[key] <= 1:
                    return key
                self._leave_small(key)
                self._counts[key] = 0
                self._main[key] = None
                continue
            key = next(iter(self._main))
            if not self._counts[key]:
                return key
            self._counts[key] -= 1
            self._main.move_to_end(key)
        return None

    def remove(self, key: bytes) -> None:
        """Make a key not resident. Unknown keys are ignored."""
        if key not in self:
            return
        if key in self._small:
            self._leave_small(key)
            self._ghost[key] = None
        else:
            del self._main[key]
        del self._counts[key]
        self._release(key)
        while len(self._ghost) > max(len(self._main), len(self._small)):
            self._ghost.popitem(last=False)

    def _leave_small(self, key: bytes) -> None:
        del self._small[key]
        self._small_bytes -= self.size(key)
