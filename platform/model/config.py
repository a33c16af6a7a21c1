"""What a decoder is made of, without torch: shape, validity, parameters, FLOPs.

V vocabulary, D dim, L layers, H query heads, K key/value heads, C head_dim, F ffn_dim, T tokens of
context.
"""

from dataclasses import dataclass
from typing import Self

from eagleray.platform.config import ModelConfig

_FFN_MULTIPLE = 32


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A pre-norm decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

    It is the architecture of Llama (Touvron et al. 2023, arXiv:2302.13971), so whatever satisfies
    it can be written for, and read from, `LlamaForCausalLM`.

    Raises:
        ValueError: A value breaks a rule; the message names it.
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    max_seq_len: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_dim",
            "max_seq_len", "rope_theta", "norm_eps",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} {getattr(self, name)} must be above 0")
        if self.dim % self.num_heads:
            # Our maths does not need it; LlamaConfig refuses anything else.
            raise ValueError(f"dim {self.dim} must be a multiple of num_heads {self.num_heads}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even: RoPE rotates pairs")

    @classmethod
    def from_section(cls, section: ModelConfig, vocab_size: int) -> Self:
        """The decoder that the `model` section of eagleray.yaml describes."""
        ffn_dim = section.ffn_dim
        if ffn_dim is None:
            # 8/3 keeps SwiGLU's three matrices as large as the two of a 4x MLP (Shazeer 2020,
            # arXiv:2002.05202).
            blocks = -(-8 * section.dim // (3 * _FFN_MULTIPLE))
            ffn_dim = blocks * _FFN_MULTIPLE
        return cls(
            vocab_size=vocab_size,
            dim=section.dim,
            num_layers=section.num_layers,
            num_heads=section.num_heads,
            num_kv_heads=section.num_kv_heads,
            head_dim=section.dim // section.num_heads,
            ffn_dim=ffn_dim,
            max_seq_len=section.max_seq_len,
            rope_theta=section.rope_theta,
            norm_eps=section.norm_eps,
            tie_embeddings=section.tie_embeddings,
        )

    @property
    def num_parameters(self) -> int:
        """Trainable parameters; a tied head counts once."""
        norms = (2 * self.num_layers + 1) * self.dim
        embedding = self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)
        return embedding + self._layer_matmul_parameters * self.num_layers + norms

    @property
    def kv_elements_per_token(self) -> int:
        """Keys and values that one token of context keeps in a cache: 2 * L * K * C."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of training on one token: forward and backward, a multiply-add counted as two.

        6 * N + 12 * L * H * C * T, where N are the weights that take part in matrix products (the
        head included, tied or not; the embedding look-up and norms not). The second term is the
        products of queries with keys and of scores with values over all T positions: as in PaLM
        (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), nothing is taken off for the half
        that causality masks, so that MFU compares with published figures.
        """
        weights = self._layer_matmul_parameters * self.num_layers + self.vocab_size * self.dim
        attention = self.num_layers * self.num_heads * self.head_dim * seq_len
        return 6.0 * weights + 12.0 * attention

    @property
    def _layer_matmul_parameters(self) -> int:
        query_and_out = 2 * self.dim * self.num_heads * self.head_dim
        key_and_value = 2 * self.dim * self.num_kv_heads * self.head_dim
        return query_and_out + key_and_value + 3 * self.dim * self.ffn_dim
