"""No eviction: what came first stays, and what finds no room is not kept.

Where every value is used once per epoch, in a new order each time, no policy that knows nothing of
the order can do better: at most as much can be carried over as fits, and this carries all of that.

Source: MinIO, in Mohan et al., "Analyzing and mitigating data stalls in DNN training", VLDB 2021
(arXiv:2007.06775).
"""

from eagleray.actors.cache.policies.policy import Residents


class NoEvict(Residents):
    """Keeps the earliest.

    Args:
        max_bytes: The budget; who stores more all the same loses the newest.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes

    def touch(self, key: bytes, size: int) -> None:
        """Note a reference; the key is resident from now on, with this size in bytes."""
        self._resize(key, size)

    def admits(self, key: bytes, size: int) -> bool:
        """Whether there is room."""
        return self.total_bytes + size <= self._max_bytes

    def victim(self) -> bytes | None:
        """The newest key; None if nothing is resident."""
        return next(reversed(self._sizes), None)

    def remove(self, key: bytes) -> None:
        """Make a key not resident. Unknown keys are ignored."""
        self._release(key)
