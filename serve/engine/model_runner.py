"""One forward pass for a whole step: every request's chunk in a single row.

T tokens of the step, N tokens that are sampled from, D dim, V vocabulary, B requests of a decode
group, P tokens of a chunk, Q its context, H query heads, K key/value heads, G = H / K, C head_dim.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.platform.model.decoder import Decoder
from eagleray.serve.engine.kv_cache import KVCache
from eagleray.serve.engine.scheduler import Chunk, StepPlan
from eagleray.serve.engine.step_batch import DecodeGroup, PrefillSpan, StepBatch, build_step


@dataclass(frozen=True)
class StepOutput:
    """Logits of the next tokens, float32; `num_rows` of each chunk of `sampling` in turn.

    `likeliest`: the token of the largest logit of each row, -1 where they are not finite; None if
    the runner does not know them.
    """

    sampling: tuple[Chunk, ...]
    logits_NV: Tensor
    likeliest: list[int] | None = None


class Runner(Protocol):
    """What computes a step.

    Laws: called by one thread; a step that raised may be followed by others; what a step leaves
    behind for a request depends on that request's tokens alone.
    """

    def run(self, plan: StepPlan) -> StepOutput:
        """Compute a plan that has at least one chunk."""
        ...


class ModelRunner:
    """Runs a decoder over the paged cache.

    Args:
        decoder: Weights in evaluation mode, shared with nobody that writes them.
        cache: Its keys and values.
    """

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self._decoder, self._cache = decoder, cache

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        """Compute a plan; only rows that are sampled from go through the head."""
        step = build_step(plan, self._cache)
        self._cache.clear(step.fresh_blocks)
        attention = PagedAttention(self._cache, step)
        x_1TD = self._decoder.hidden(step.tokens_1T, step.positions_1T, attention)
        logits_NV = self._decoder.head(x_1TD[0].index_select(0, step.rows_N))
        return StepOutput(step.sampling, logits_NV)


class PagedAttention:
    """The decoder's attention seam: keeps new keys and values, attends to the cached ones."""

    def __init__(self, cache: KVCache, step: StepBatch) -> None:
        self._cache, self._step = cache, step

    def __call__(self, layer: int, q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor) -> Tensor:
        """Attention of the step's one row."""
        q_THC, k_TKC, v_TKC = q_BTHC[0], k_BTKC[0], v_BTKC[0]
        self._cache.write(layer, self._step.slots_T, k_TKC, v_TKC)
        o_THC = torch.empty_like(q_THC)
        for group in self._step.groups:
            rows = slice(group.first, group.last)
            o_THC[rows] = self._decode(layer, group, q_THC[rows])
        for span in self._step.spans:
            rows = slice(span.first, span.last)
            o_THC[rows] = self._prefill(layer, span, q_THC[rows], k_TKC[rows], v_TKC[rows])
        return o_THC[None]

    def _decode(self, layer: int, group: DecodeGroup, q_BHC: Tensor) -> Tensor:
        k_BTKC, v_BTKC = self._cache.read(layer, group.table_BM)
        # The G query heads of a key/value head stand where query positions would: no head of the
        # cache is repeated, and one call serves them all.
        batch, _, channels = q_BHC.shape
        q_BKGC = q_BHC.reshape(batch, k_BTKC.shape[2], -1, channels)
        o_BKGC = F.scaled_dot_product_attention(
            q_BKGC, k_BTKC.transpose(1, 2), v_BTKC.transpose(1, 2), attn_mask=group.bias_B11T
        )
        return o_BKGC.flatten(1, 2)

    def _prefill(
        self, layer: int, span: PrefillSpan, q_PHC: Tensor, k_PKC: Tensor, v_PKC: Tensor
    ) -> Tensor:
        k_QKC, v_QKC = k_PKC, v_PKC
        if span.table_1M is not None and span.bias_PQ is not None:
            k_1TKC, v_1TKC = self._cache.read(layer, span.table_1M)
            num_context = span.bias_PQ.shape[1]
            k_QKC, v_QKC = k_1TKC[0, :num_context], v_1TKC[0, :num_context]
        o_1HPC = F.scaled_dot_product_attention(
            q_PHC.transpose(0, 1)[None],
            k_QKC.transpose(0, 1)[None],
            v_QKC.transpose(0, 1)[None],
            attn_mask=span.bias_PQ,
            is_causal=span.bias_PQ is None,
            enable_gqa=q_PHC.shape[1] != k_QKC.shape[1],
        )
        return o_1HPC[0].transpose(0, 1)
