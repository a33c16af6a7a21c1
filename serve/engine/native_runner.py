"""Steps by the compiled kernels: keys and values are read where they lie, nothing is padded.

T tokens of the step, R requests in it, W blocks of the longest table, N tokens that sample.
"""

import numpy as np
import torch

from eagleray.serve.engine.kv_cache import KVCache
from eagleray.serve.engine.model_runner import StepOutput
from eagleray.serve.engine.scheduler import StepPlan
from eagleray.serve.kernels.decoder import NativeDecoder

CACHE_DTYPE = torch.float16
"""Half of float32's memory; its rounding is below that of 8-bit activations."""


class NativeRunner:
    """Runs a quantised decoder over the paged cache.

    Args:
        decoder: Weights, for the block size and dtype of the cache.
        cache: Its keys and values.
    """

    def __init__(self, decoder: NativeDecoder, cache: KVCache) -> None:
        self._decoder, self._cache = decoder, cache

    def run(self, plan: StepPlan) -> StepOutput:
        """Compute a plan that has at least one chunk."""
        chunks = plan.chunks
        lengths_R = np.array([chunk.length for chunk in chunks])
        starts_R = np.array([chunk.start for chunk in chunks])
        ends_R = lengths_R.cumsum()
        requests_T = np.repeat(np.arange(len(chunks), dtype=np.int32), lengths_R)
        # Counts up within each chunk, from its start.
        positions_T = np.arange(plan.num_tokens) + np.repeat(
            starts_R + lengths_R - ends_R, lengths_R
        )
        tokens: list[int] = []
        for chunk in chunks:
            tokens += chunk.tokens
        tables = [chunk.request.block_table for chunk in chunks]
        tables_RW = np.zeros((len(chunks), max(map(len, tables))), dtype=np.int32)
        for row_W, table in zip(tables_RW, tables, strict=True):
            row_W[: len(table)] = table
        sampling = tuple(chunk for chunk in chunks if chunk.samples)
        sampled = [row for chunk, end in zip(chunks, ends_R.tolist(), strict=True)
                   for row in range(end - chunk.num_rows, end)]  # fmt: skip
        logits_NV, likeliest_N = self._decoder.step(
            np.array(tokens, dtype=np.int32),
            positions_T.astype(np.int32),
            requests_T,
            tables_RW,
            np.array(sampled, dtype=np.int32),
            *self._cache.pages,
        )
        return StepOutput(sampling, logits_NV, likeliest_N.tolist())
