"""Keys and values of every running request, in fixed-size blocks.

N blocks, S token slots per block, L layers, K key/value heads, C head_dim, M blocks of one request.
Slot number = block number * S + offset. One more block than the pool hands out, the null block,
pads block tables; nothing is ever written to it.
"""

import torch
from torch import Tensor

from eagleray.platform.errors import InfeasibleError
from eagleray.platform.model.config import DecoderConfig


def num_blocks_within(
    budget_bytes: int, config: DecoderConfig, block_tokens: int, element_bytes: int
) -> int:
    """How many blocks fit into a budget.

    Raises:
        InfeasibleError: Not even one and the null block do.
    """
    block_bytes = config.kv_elements_per_token * element_bytes * block_tokens
    count = budget_bytes // block_bytes - 1
    if count < 1:
        raise InfeasibleError(
            f"serve.kv_cache_bytes {budget_bytes} holds {budget_bytes // block_bytes} KV blocks of "
            f"{block_bytes} bytes ({block_tokens} tokens); at least 2 are needed",
            f"set serve.kv_cache_bytes to {2 * block_bytes} or more, or lower serve.block_tokens",
        )
    return count


class KVCache:
    """The tensors of the block pool.

    Only the engine's thread touches it. What it holds for a block is undefined until a request
    writes there.

    Args:
        config: The decoder that writes keys and values.
        num_blocks: Blocks in the pool.
        block_tokens: Token slots per block.
        dtype: Element type, that of the decoder's activations.
        device: Where the decoder runs.
    """

    def __init__(
        self,
        config: DecoderConfig,
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_tokens = block_tokens
        self.null_block = num_blocks
        shape = (
            config.num_layers, num_blocks + 1, block_tokens, config.num_kv_heads, config.head_dim
        )  # fmt: skip
        # Zeros, not empty: a masked slot is multiplied by 0, and 0 * NaN would be NaN.
        self._k_LNSKC = torch.zeros(shape, dtype=dtype, device=device)
        self._v_LNSKC = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._k_LNSKC.device

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return self._k_LNSKC.dtype

    @property
    def num_bytes(self) -> int:
        """Memory of all keys and values."""
        return 2 * self._k_LNSKC.nbytes

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        """All keys and all values, [L, N + 1, S, K, C], for who reads them where they lie."""
        return self._k_LNSKC, self._v_LNSKC

    def clear(self, blocks: Tensor) -> None:
        """Forget what earlier owners left in blocks (int64 block numbers)."""
        self._k_LNSKC.index_fill_(1, blocks, 0)
        self._v_LNSKC.index_fill_(1, blocks, 0)

    def write(self, layer: int, slots_T: Tensor, k_TKC: Tensor, v_TKC: Tensor) -> None:
        """Keep the keys and values of tokens in their slots (int64 slot numbers)."""
        self._k_LNSKC[layer].flatten(0, 1).index_copy_(0, slots_T, k_TKC)
        self._v_LNSKC[layer].flatten(0, 1).index_copy_(0, slots_T, v_TKC)

    def read(self, layer: int, table_BM: Tensor) -> tuple[Tensor, Tensor]:
        """Copies k, v [B, M*S, K, C] of the blocks in B block tables, in table order."""
        batch, blocks = table_BM.shape
        flat = table_BM.flatten()
        shape = (batch, blocks * self.block_tokens, *self._k_LNSKC.shape[3:])
        k_BTKC = self._k_LNSKC[layer].index_select(0, flat).view(shape)
        v_BTKC = self._v_LNSKC[layer].index_select(0, flat).view(shape)
        return k_BTKC, v_BTKC
