"""LRU: evict what was not referenced for longest."""

from collections import OrderedDict

from eagleray.actors.cache.policies.policy import Residents


class Lru(Residents):
    """Least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def touch(self, key: bytes, size: int) -> None:
        """Note a reference; the key is resident from now on, with this size in bytes."""
        self._resize(key, size)
        self._order[key] = None
        self._order.move_to_end(key)

    def victim(self) -> bytes | None:
        """The key to evict next; None if nothing is resident."""
        return next(iter(self._order), None)

    def remove(self, key: bytes) -> None:
        """Make a key not resident. Unknown keys are ignored."""
        self._release(key)
        self._order.pop(key, None)
