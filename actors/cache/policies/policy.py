"""The seam between what keeps values and what decides which of them go."""

from collections.abc import Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """The order of eviction, by key, of values that are kept elsewhere.

    Laws:
        * A touched key is resident until it is removed; `total_bytes` is the sum of the sizes of
          the resident keys.
        * `victim` names a resident key as long as there is one, and the same one until the next
          touch or removal; it removes nothing.
        * Equal calls give equal victims, in any process.
        * Bookkeeping is bounded by what is resident and by a fixed multiple of it.

    Not for several threads.
    """

    total_bytes: int

    def touch(self, key: bytes, size: int) -> None:
        """Note a reference; the key is resident from now on, with this size in bytes."""
        ...

    def admits(self, key: bytes, size: int) -> bool:
        """Whether a value that is not resident is worth keeping.

        Asked once for each reference that finds nothing; a `touch` follows if the answer is yes.
        """
        ...

    def victim(self) -> bytes | None:
        """The key to evict next; None if nothing is resident."""
        ...

    def remove(self, key: bytes) -> None:
        """Make a key not resident. Unknown keys are ignored."""
        ...

    def size(self, key: bytes) -> int:
        """Bytes of a resident key; 0 of any other."""
        ...

    def __contains__(self, key: bytes) -> bool: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[bytes]: ...


class Residents:
    """Which keys are resident, and their bytes: what all policies count alike."""

    def __init__(self) -> None:
        self._sizes: dict[bytes, int] = {}
        self.total_bytes = 0

    def size(self, key: bytes) -> int:
        """Bytes of a resident key; 0 of any other."""
        return self._sizes.get(key, 0)

    def admits(self, key: bytes, size: int) -> bool:
        """Keep whatever comes."""
        return True

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._sizes)

    def _resize(self, key: bytes, size: int) -> int:
        """Count a key as resident; by how much its bytes changed."""
        change = size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.total_bytes += change
        return change

    def _release(self, key: bytes) -> int | None:
        """Count a key as gone; its bytes, or None if it was not resident."""
        size = self._sizes.pop(key, None)
        if size is not None:
            self.total_bytes -= size
        return size
