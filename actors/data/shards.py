"""Token shards: the only on-disk form of training text.

A shard is a file of blocks whose items are token ids. Layout: docs/formats.md#token-shard.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eagleray.actors.data.blocks import BlockFile, BlockHeader, BlockWriter
from eagleray.platform.errors import DataError

TokenArray = npt.NDArray[np.unsignedinteger[Any]]

BLOCK_TOKENS = 16_384
"""32 or 64 KB: one value of the feature cache, and some 20 us of checking on first touch."""

_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


@dataclass(frozen=True)
class ShardHeader(BlockHeader):
    """What a shard says about itself.

    `first_token` is the position of its first token in the split; `itemsize` is 2 or 4 bytes.
    """

    MAGIC = b"EAGLTOKS"
    VERSION = 1
    ENTRIES = "tokens"

    itemsize: int
    num_tokens: int
    first_token: int
    block_tokens: int
    vocab_size: int
    tokenizer_sha256: bytes

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the ids on disk."""
        return _DTYPES[self.itemsize]

    @property
    def num_entries(self) -> int:
        """Tokens in the shard."""
        return self.num_tokens

    @property
    def block_entries(self) -> int:
        """Tokens in a block."""
        return self.block_tokens


class ShardWriter(BlockWriter):
    """Writes one shard; as a context manager, a failed one is left without a header."""

    def __init__(
        self, path: Path, *, vocab_size: int, tokenizer_sha256: bytes, first_token: int,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:  # fmt: skip
        self._vocab_size, self._tokenizer_sha256 = vocab_size, tokenizer_sha256
        self._first_token, self._block_tokens = first_token, block_tokens
        self._itemsize = 2 if vocab_size <= 2**16 else 4
        super().__init__(path, block_tokens * self._itemsize)

    def append(self, entries: npt.NDArray[np.integer[Any]]) -> None:
        """Add ids at the end.

        Raises:
            DataError: An id does not fit the vocabulary.
        """
        if not entries.size:
            return
        low, high = int(entries.min()), int(entries.max())
        if low < 0 or high >= self._vocab_size:
            raise DataError(
                f"token ids {low}..{high} do not fit vocab_size {self._vocab_size}",
                "use the tokenizer that the dataset was declared with",
            )
        ids = entries.astype(_DTYPES[self._itemsize], copy=False)
        self._add(ids.tobytes(), len(ids))

    def _header(self) -> ShardHeader:
        return ShardHeader(
            self._itemsize, self.num_entries, self._first_token, self._block_tokens,
            self._vocab_size, self._tokenizer_sha256,
        )  # fmt: skip


class Shard(BlockFile[ShardHeader]):
    """An open token shard; its items are ids."""

    def __init__(self, path: Path, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(path, ShardHeader, sleep)
