"""Fixed-size blocks of KV-cache slots, handed out by number and counted by reference.

Laws:
    * A block is held (it has at least one reference), kept (nobody holds it, but what it contains
      is known and may be used again) or free; exactly one of them.
    * `allocate` gives all blocks asked for or none. Free blocks go first, then kept ones, of which
      the one that was not used for longest goes first and is forgotten.
    * Owners release what they hold exactly once.
    * Only full blocks are named: nobody writes to one any more, so it can be shared as it is.
A block is named by the digest of all tokens from the beginning of the request to its end: equal
names are equal contents.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence

from eagleray.platform.errors import EagleRayError


class PoolIntegrityError(EagleRayError):
    """Blocks were lost, doubled or released twice: a defect of ours."""


class BlockPool:
    """Free list, reference counts and names; it does not know the blocks' contents.

    Args:
        num_blocks: Blocks in the pool, numbered from 0.
        block_tokens: Token slots in each.
        keeps_prefixes: Whether full blocks are kept for requests that begin alike.
    """

    def __init__(self, num_blocks: int, block_tokens: int, *, keeps_prefixes: bool = False) -> None:
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self.keeps_prefixes = keeps_prefixes
        self._references = [0] * num_blocks
        self._free = deque(range(num_blocks))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._named: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """Those of them whose contents may be used again."""
        return len(self._kept)

    @property
    def capacity_tokens(self) -> int:
        """Token slots in the whole pool."""
        return self.num_blocks * self.block_tokens

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold this many tokens."""
        return -(-num_tokens // self.block_tokens)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks with one reference each; None, and no change, if too few are free."""
        if count > self.num_free:
            return None
        blocks = [self._free.popleft() if self._free else self._forgotten() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that are held already.

        Raises:
            PoolIntegrityError: One of them is not.
        """
        for block in blocks:
            if self._references[block] < 1:
                raise PoolIntegrityError(f"KV block {block} is free and cannot be shared")
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block of a request.

        Raises:
            PoolIntegrityError: One of them is free already.
        """
        # The end first: what begins alike is used again more often than what goes on alike.
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise PoolIntegrityError(f"KV block {block} was released more often than taken")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._names:
                self._kept[block] = None
            else:
                self._free.append(block)

    def keep(self, block: int, name: bytes) -> None:
        """Name a block that is held and full; it stays nameless if another one has that name.

        Raises:
            PoolIntegrityError: Nobody holds it.
        """
        if self._references[block] < 1:
            raise PoolIntegrityError(f"KV block {block} is free and cannot be named")
        if self.keeps_prefixes and block not in self._names and name not in self._named:
            self._named[name], self._names[block] = block, name

    def match(self, names: Iterable[bytes]) -> list[int]:
        """Take the blocks of these names, up to the first that is not there."""
        found = []
        for name in names:
            block = self._named.get(name)
            if block is None:
                break
            self._kept.pop(block, None)
            self._references[block] += 1
            found.append(block)
        return found

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Compare the counts with the block tables that exist.

        Raises:
            PoolIntegrityError: A block is lost, doubled, counted or named wrongly.
        """
        held = Counter(block for table in tables for block in table)
        unheld = Counter([*self._free, *self._kept])
        for block, count in enumerate(self._references):
            if count != held[block] or unheld[block] != (count == 0):
                raise PoolIntegrityError(
                    f"KV block {block}: {count} references, in {held[block]} block tables, "
                    f"{unheld[block]} times among those that nobody holds"
                )
        nameless = next((block for block in self._kept if block not in self._names), None)
        free_named = next((block for block in self._free if block in self._names), None)
        if nameless is not None or free_named is not None:
            raise PoolIntegrityError(
                f"KV block {nameless if nameless is not None else free_named} is kept without a "
                "name, or free with one"
            )
        if {block: name for name, block in self._named.items()} != self._names:
            raise PoolIntegrityError("names and blocks do not belong together")

    def _forgotten(self) -> int:
        block, _ = self._kept.popitem(last=False)
        del self._named[self._names.pop(block)]
        return block


def block_names(tokens: Sequence[int], block_tokens: int, known: Sequence[bytes]) -> list[bytes]:
    """Names of the full blocks of a request, of which the first are `known`."""
    names = list(known)
    for number in range(len(names), len(tokens) // block_tokens):
        digest = hashlib.sha256(names[-1] if names else b"")
        part = tokens[number * block_tokens : (number + 1) * block_tokens]
        digest.update(array("q", part).tobytes())
        names.append(digest.digest())
    return names
