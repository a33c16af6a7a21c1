"""Fixed-size blocks of KV-cache slots, handed out by number and counted by reference.

Laws:
    * A block is free or has at least one reference, never both.
    * `allocate` gives all blocks asked for or none.
    * Owners release what they hold exactly once; a block is free again at its last release.
Shared blocks (a common prefix) are the same block with more references.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from eagleray.platform.errors import EagleRayError


class PoolIntegrityError(EagleRayError):
    """Blocks were lost, doubled or released twice: a defect of ours."""


class BlockPool:
    """Free list and reference counts; it knows block numbers, not their contents.

    Args:
        num_blocks: Blocks in the pool, numbered from 0.
        block_tokens: Token slots in each.
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self._references = [0] * num_blocks
        self._free = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def capacity_tokens(self) -> int:
        """Token slots in the whole pool."""
        return self.num_blocks * self.block_tokens

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold this many tokens."""
        return -(-num_tokens // self.block_tokens)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` free blocks with one reference each; None, and no change, if too few."""
        if count > len(self._free):
            return None
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that are held already.

        Raises:
            PoolIntegrityError: One of them is free.
        """
        for block in blocks:
            if self._references[block] < 1:
                raise PoolIntegrityError(f"KV block {block} is free and cannot be shared")
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one reference to each block.

        Raises:
            PoolIntegrityError: One of them is free already.
        """
        for block in blocks:
            if self._references[block] < 1:
                raise PoolIntegrityError(f"KV block {block} was released more often than taken")
            self._references[block] -= 1
            if not self._references[block]:
                self._free.append(block)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Compare the counts with the block tables that exist.

        Raises:
            PoolIntegrityError: A block is lost, doubled, or counted wrongly.
        """
        held = Counter(block for table in tables for block in table)
        free = Counter(self._free)
        for block, count in enumerate(self._references):
            if count != held[block] or free[block] != (count == 0):
                raise PoolIntegrityError(
                    f"KV block {block}: {count} references, in {held[block]} block tables, "
                    f"{free[block]} times in the free list"
                )
