"""A decoder whose steps the compiled kernels compute.

T tokens of a step, R requests in it, W blocks of the longest table, N tokens that are sampled from,
V vocabulary.
"""

import ctypes
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from eagleray.platform.model.config import DecoderConfig
from eagleray.platform.model.decoder import Decoder
from eagleray.serve.kernels.library import Batch, Config, Layer, library

Bits = Literal[4, 8]

_HEAD_VECTORS = (1, 2, 4, 8, 12, 16)
_VECTOR = 8


class QuantizedLinear:
    """Weights of 4 or 8 bits in groups of 32 inputs, laid out for the kernels.

    Args:
        weight_ON: float32, outputs by inputs; not kept.
        bits: Of each weight; beside them a scale and an offset of 16 bits per group.

    Raises:
        MemoryError: There is no room.
    """

    def __init__(self, weight_ON: Tensor, bits: Bits) -> None:
        self._library = _library()
        weight_ON = weight_ON.detach().float().contiguous()
        self.shape = tuple(weight_ON.shape)
        made = self._library.er_linear_new(weight_ON.data_ptr(), *self.shape, bits)
        if made is None:
            raise MemoryError(f"no room for a linear layer of {self.shape}")
        self.pointer: int = made

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return int(self._library.er_linear_bytes(self.pointer))

    def weight(self) -> Tensor:
        """The weights as they are computed with, float32."""
        weight_ON = torch.empty(self.shape)
        self._library.er_linear_weights(self.pointer, weight_ON.data_ptr())
        return weight_ON

    def apply(self, x_BN: Tensor) -> Tensor:
        """Outputs of some rows, float32; the rows are rounded to 8 bits in groups of 32.

        Raises:
            MemoryError: There is no room.
        """
        x_BN = x_BN.float().contiguous()
        out_BO = torch.empty(len(x_BN), self.shape[0])
        if self._library.er_linear_apply(
            self.pointer, x_BN.data_ptr(), len(x_BN), out_BO.data_ptr()
        ):
            raise MemoryError(f"no room for {len(x_BN)} rows")
        return out_BO

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self._library.er_linear_free(self.pointer)


def runs(config: DecoderConfig) -> bool:
    """Whether the kernels are there, and fit a model of this shape."""
    has_heads = config.head_dim % _VECTOR == 0 and config.head_dim // _VECTOR in _HEAD_VECTORS
    return library() is not None and has_heads


class NativeDecoder:
    """The decoder with quantised linear layers; norms, embedding and rotations in float32.

    Args:
        decoder: Gives weights; its embedding, norms and tables stay in use.
        bits: Of the layers' weights.
        head_bits: Of the head's; it costs more quality than all layers.
        block_tokens: Tokens per block of the cache.
        cache_dtype: float32 or float16.
        num_threads: That compute a step.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        bits: Bits = 8,
        head_bits: Bits = 8,
        block_tokens: int,
        cache_dtype: torch.dtype,
        num_threads: int,
    ) -> None:
        self._library = _library()
        self._config = config = decoder.config
        self._linears: list[QuantizedLinear] = []
        self._tensors: list[Tensor] = []
        layers = (Layer * config.num_layers)()
        for native, layer in zip(layers, decoder.layers, strict=True):
            self._fill(native, layer, bits)
        head = decoder.embed_tokens if decoder.lm_head is None else decoder.lm_head
        embedding = self._kept(decoder.embed_tokens.weight)
        described = Config(
            config.dim, config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim,
            config.ffn_dim, config.vocab_size, config.max_seq_len, config.norm_eps,
            cache_dtype is torch.float16, block_tokens, num_threads,
        )  # fmt: skip
        made = self._library.er_model_new(
            ctypes.byref(described), embedding, self._kept(decoder.cos_MC),
            self._kept(decoder.sin_MC), layers, self._kept(decoder.norm.weight),
            self._linear(head.weight, head_bits),
        )  # fmt: skip
        if made is None:
            raise MemoryError("no room for the model's threads")
        self._pointer: int = made

    @property
    def num_weight_bytes(self) -> int:
        """Of all quantised layers."""
        return sum(linear.num_bytes for linear in self._linears)

    def step(
        self,
        tokens_T: np.ndarray,
        positions_T: np.ndarray,
        requests_T: np.ndarray,
        tables_RW: np.ndarray,
        sampled_N: np.ndarray,
        keys: Tensor,
        values: Tensor,
    ) -> tuple[Tensor, np.ndarray]:
        """Compute a step over a cache [L, blocks, slots, K, C].

        Args:
            tokens_T: int32, ids.
            positions_T: int32, of each in its request.
            requests_T: int32, row of each token's request in `tables_RW`.
            tables_RW: int32, block numbers.
            sampled_N: int32, the tokens that are sampled from.
            keys: Those of the cache; what is new is put there.
            values: As the keys.

        Returns:
            Logits of the tokens that are sampled from, float32, [N, V]; and the likeliest next
            token of each, int32, [N], -1 where logits are not finite.

        Raises:
            ValueError: A token, position, row or block is out of range; nothing was computed.
            MemoryError: There is no room for the step.
        """
        logits_NV = torch.empty(len(sampled_N), self._config.vocab_size)
        likeliest_N = np.empty(len(sampled_N), np.int32)
        batch = Batch(
            len(tokens_T), len(sampled_N), *tables_RW.shape, keys.shape[1], tokens_T.ctypes.data,
            positions_T.ctypes.data, requests_T.ctypes.data, tables_RW.ctypes.data,
            sampled_N.ctypes.data, keys.data_ptr(), values.data_ptr(), keys.stride(0),
            logits_NV.data_ptr(), likeliest_N.ctypes.data,
        )  # fmt: skip
        status = self._library.er_step(self._pointer, ctypes.byref(batch))
        if status == 1:
            raise ValueError("a token, position, row or block of a step is out of range")
        if status:
            raise MemoryError(f"no room for a step of {len(tokens_T)} tokens")
        return logits_NV, likeliest_N

    def close(self) -> None:
        """End its threads; it computes nothing any more."""
        if getattr(self, "_pointer", None):
            self._library.er_model_free(self._pointer)
            self._pointer = 0

    __del__ = close

    def _fill(self, native: Layer, layer: Any, bits: Bits) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        native.input_norm = self._kept(layer.input_layernorm.weight)
        native.post_norm = self._kept(layer.post_attention_layernorm.weight)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        native.qkv = self._linear(torch.cat([p.weight.detach() for p in projections]), bits)
        native.out = self._linear(attention.o_proj.weight, bits)
        native.gate = self._linear(mlp.gate_proj.weight, bits)
        native.up = self._linear(mlp.up_proj.weight, bits)
        native.down = self._linear(mlp.down_proj.weight, bits)

    def _linear(self, weight: Tensor, bits: Bits) -> int:
        self._linears.append(QuantizedLinear(weight, bits))
        return self._linears[-1].pointer

    def _kept(self, tensor: Tensor) -> int:
        self._tensors.append(tensor.detach().float().contiguous())
        return self._tensors[-1].data_ptr()


def _library() -> ctypes.CDLL:
    found = library()
    if found is None:
        raise RuntimeError("the kernels are not compiled, or this CPU cannot run them")
    return found
