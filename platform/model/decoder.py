"""The decoder as a torch module, with a seam where attention can be exchanged.

B batch, T tokens, D dim, H query heads, K key/value heads, C head_dim, F ffn_dim, V vocabulary,
M max_seq_len. Modules are named as in Hugging Face's Llama, so both state dicts differ by the
prefix `model.` alone; a linear layer holds its weight as [out, in].

Rotary positions (Su et al. 2021, arXiv:2104.09864) pair channel i with i + C/2, the convention of
those weights; other files pair neighbours and need their rows permuted.
"""

import math
from collections.abc import Callable
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagleray.platform.model.config import DecoderConfig

_INIT_STD = 0.02


class Attend(Protocol):
    """Causal attention of one layer.

    Laws:
        * Called once per layer in ascending order in each forward pass.
        * Queries and keys arrive rotated; nothing else is applied to them.
        * Grouped queries: query head h reads key/value head h // (H / K).
        * The scale is 1 / sqrt(C). An implementation may keep keys and values (a cache).
    """

    def __call__(self, layer: int, q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor) -> Tensor:
        """What each query gathers, as o_BTHC."""
        ...


def causal_attention(layer: int, q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor) -> Tensor:
    """Attend within the given tokens alone: training, and scoring whole sequences."""
    # enable_gqa beats repeating the heads on CPU too: forward and backward 26 ms against 31 ms.
    o_BHTC = F.scaled_dot_product_attention(
        q_BTHC.transpose(1, 2),
        k_BTKC.transpose(1, 2),
        v_BTKC.transpose(1, 2),
        is_causal=True,
        enable_gqa=q_BTHC.shape[2] != k_BTKC.shape[2],
    )
    return o_BHTC.transpose(1, 2)


class Decoder(nn.Module):
    """Token ids to next-token logits.

    Safe to share between threads that only read it. A new decoder has the weights that
    `init_weights` gives with seed 0, and none on the meta device; the global generator has no part.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = _Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.lm_head = (
            None if config.tie_embeddings else _Linear(config.dim, config.vocab_size, bias=False)
        )
        cos_MC, sin_MC = rope_tables(config)
        self.cos_MC: Tensor
        self.sin_MC: Tensor
        self.register_buffer("cos_MC", cos_MC, persistent=False)
        self.register_buffer("sin_MC", sin_MC, persistent=False)
        if not self.embed_tokens.weight.is_meta:
            self.init_weights(torch.Generator().manual_seed(0))

    def forward(
        self, tokens_BT: Tensor, positions_BT: Tensor | None = None, attend: Attend | None = None
    ) -> Tensor:
        """Logits in float32, [B, T, V].

        Args:
            tokens_BT: Token ids below V.
            positions_BT: Position of each token, below M; by default 0..T-1 in each row.
            attend: How to attend; by default causally within each row. With positions of its own a
                row may hold tokens of several sequences, if `attend` keeps them apart.

        Raises:
            ValueError: More tokens in a row than M, and no positions.
        """
        return self.head(self.hidden(tokens_BT, positions_BT, attend))

    def hidden(
        self, tokens_BT: Tensor, positions_BT: Tensor | None = None, attend: Attend | None = None
    ) -> Tensor:
        """What `head` reads: x_BTD after the final norm. Arguments as in `forward`."""
        rope = self._rope(tokens_BT, positions_BT)
        x_BTD: Tensor = self.embed_tokens(tokens_BT)
        for index, layer in enumerate(self.layers):
            x_BTD = layer(x_BTD, index, rope, attend or causal_attention)
        normed_BTD: Tensor = self.norm(x_BTD)
        return normed_BTD

    def head(self, x_BTD: Tensor) -> Tensor:
        """Logits in float32 of states that `hidden` gave; any leading shape."""
        weight_VD = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return F.linear(x_BTD, weight_VD).float()

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Set every parameter: the same generator state gives the same weights.

        Normal with standard deviation 0.02; the two projections that write into the residual
        stream have it divided by sqrt(2 L), so that its variance does not grow with depth (GPT-2,
        Radford et al. 2019, section 2.3). Norms are one.
        """
        residual_std = _INIT_STD / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            std = (
                residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else _INIT_STD
            )
            # Drawn in float32 where the generator lives: equal on each device and in each dtype.
            drawn = torch.empty(parameter.shape, device=generator.device)
            parameter.copy_(drawn.normal_(0.0, std, generator=generator))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # What `to`, `half` and their like call. Rounded tables would blur far positions.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it so
        if self.cos_MC.dtype is not torch.float32:
            device = self.cos_MC.device
            self.cos_MC, self.sin_MC = (table.to(device) for table in rope_tables(self.config))
        return self

    def _rope(self, tokens_BT: Tensor, positions_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        if positions_BT is not None:
            return self.cos_MC[positions_BT].unsqueeze(-2), self.sin_MC[positions_BT].unsqueeze(-2)
        num_tokens = tokens_BT.shape[1]
        if num_tokens > self.config.max_seq_len:
            raise ValueError(
                f"{num_tokens} tokens in a row exceed max_seq_len {self.config.max_seq_len}: "
                "shorten the sequence, or train a model with a longer context"
            )
        return self.cos_MC[:num_tokens].unsqueeze(-2), self.sin_MC[:num_tokens].unsqueeze(-2)


def rope_tables(config: DecoderConfig) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines [M, C] that `rotate` takes, in float32 on the CPU.

    The first half of each sine row is negated: rotating is then one multiply and one fused
    multiply-add with the halves exchanged.
    """
    # On the CPU even while a module is built on the meta device: nothing would fill them later.
    channels = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    frequencies = 1.0 / config.rope_theta ** (channels / config.head_dim)
    positions = torch.arange(config.max_seq_len, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x_BTHC: Tensor, cos_BT1C: Tensor, sin_BT1C: Tensor) -> Tensor:
    """Turn each pair (i, i + C/2) by its position's angle; keeps the dtype."""
    swapped_BTHC = x_BTHC.roll(x_BTHC.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_BTHC * cos_BT1C, swapped_BTHC, sin_BT1C).to(x_BTHC.dtype)


class _Linear(nn.Linear):
    """Leaves its weights to the decoder: torch's own start imports for 1.7 s on the meta device."""

    def reset_parameters(self) -> None:
        pass


class _Embedding(nn.Embedding):
    """Leaves its weights to the decoder, as `_Linear` does."""

    def reset_parameters(self) -> None:
        pass


class _Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = _Linear(config.dim, config.num_heads * config.head_dim, bias=False)
        self.k_proj = _Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = _Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = _Linear(config.num_heads * config.head_dim, config.dim, bias=False)

    def forward(
        self, x_BTD: Tensor, layer: int, rope: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        heads = (-1, self.head_dim)
        q_BTHC = rotate(self.q_proj(x_BTD).unflatten(-1, heads), *rope)
        k_BTKC = rotate(self.k_proj(x_BTD).unflatten(-1, heads), *rope)
        v_BTKC = self.v_proj(x_BTD).unflatten(-1, heads)
        out_BTD: Tensor = self.o_proj(attend(layer, q_BTHC, k_BTKC, v_BTKC).flatten(-2))
        return out_BTD


class _FeedForward(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = _Linear(config.dim, config.ffn_dim, bias=False)
        self.up_proj = _Linear(config.dim, config.ffn_dim, bias=False)
        self.down_proj = _Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        out_BTD: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return out_BTD


class _Block(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, config.norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, config.norm_eps)
        self.mlp = _FeedForward(config)

    def forward(
        self, x_BTD: Tensor, layer: int, rope: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), layer, rope, attend)
        out_BTD: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return out_BTD
