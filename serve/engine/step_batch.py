"""One step's tokens as tensors: a single ragged row that holds every request's chunk.

T tokens of the step, B decoding requests in a group, M blocks of the longest of them, S slots per
block, P tokens of a chunk, Q tokens of its context up to its end.
Decodes come first, longest context first, in groups whose contexts differ by less than a factor of
two: padding then costs at most half of a gather. Chunks of prompts follow one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagleray.serve.engine.kv_cache import KVCache
from eagleray.serve.engine.scheduler import Chunk, StepPlan


@dataclass(frozen=True)
class DecodeGroup:
    """Rows [first, last) of the step: one token each, attending to its whole context.

    `bias_B11T` is 0 where a slot of the padded context belongs to the request, -inf elsewhere.
    """

    first: int
    last: int
    table_BM: Tensor
    bias_B11T: Tensor


@dataclass(frozen=True)
class PrefillSpan:
    """Rows [first, last) of the step: consecutive tokens of one request.

    `table_1M` and `bias_PQ` are None when the chunk starts the request: its context is itself.
    """

    first: int
    last: int
    table_1M: Tensor | None
    bias_PQ: Tensor | None


@dataclass(frozen=True)
class StepBatch:
    """What the model needs for one step.

    Attributes:
        tokens_1T, positions_1T: The ragged row.
        slots_T: Where each token's keys and values go.
        fresh_blocks: Blocks that this step begins but does not fill.
        groups, spans: Who attends to what; together they cover the row.
        sampling: The chunks whose last tokens are sampled from, in the order of `rows_N`.
        rows_N: The rows of those tokens.
    """

    tokens_1T: Tensor
    positions_1T: Tensor
    slots_T: Tensor
    fresh_blocks: Tensor
    groups: tuple[DecodeGroup, ...]
    spans: tuple[PrefillSpan, ...]
    sampling: tuple[Chunk, ...]
    rows_N: Tensor


def build_step(plan: StepPlan, cache: KVCache) -> StepBatch:
    """Lay out a plan that has at least one chunk."""
    size = cache.block_tokens
    decodes = sorted(plan.chunks[: plan.num_decodes], key=lambda chunk: -chunk.start)
    prefills = plan.chunks[plan.num_decodes :]
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    fresh: list[int] = []
    spans: list[PrefillSpan] = []
    rows: list[int] = []
    for chunk in (*decodes, *prefills):
        table, end = chunk.request.block_table, chunk.start + chunk.length
        first = len(tokens)
        tokens += chunk.tokens
        positions += range(chunk.start, end)
        slots += [table[p // size] * size + p % size for p in range(chunk.start, end)]
        last_block = (end - 1) // size
        if end % size and last_block * size >= chunk.start:
            fresh.append(table[last_block])
        rows += range(len(tokens) - chunk.num_rows, len(tokens))
        if first >= len(decodes):
            spans.append(_span(chunk, first, cache))
    device = cache.device
    return StepBatch(
        tokens_1T=torch.tensor([tokens], device=device),
        positions_1T=torch.tensor([positions], device=device),
        slots_T=torch.tensor(slots, device=device),
        fresh_blocks=torch.tensor(fresh, dtype=torch.int64, device=device),
        groups=tuple(_groups(decodes, cache)),
        spans=tuple(spans),
        sampling=tuple(chunk for chunk in (*decodes, *prefills) if chunk.samples),
        rows_N=torch.tensor(rows, dtype=torch.int64, device=device),
    )


def _groups(decodes: Sequence[Chunk], cache: KVCache) -> list[DecodeGroup]:
    groups = []
    first = 0
    while first < len(decodes):
        longest = decodes[first].start + 1
        last = first
        while last < len(decodes) and 2 * (decodes[last].start + 1) > longest:
            last += 1
        groups.append(_group(decodes[first:last], first, cache))
        first = last
    return groups


def _group(decodes: Sequence[Chunk], first: int, cache: KVCache) -> DecodeGroup:
    size = cache.block_tokens
    lengths = [chunk.start + 1 for chunk in decodes]
    width = -(-lengths[0] // size)
    table_BM = torch.tensor(
        [
            (chunk.request.block_table + [cache.null_block] * width)[:width]
            for chunk in decodes
        ],
        device=cache.device,
    )  # fmt: skip
    lengths_B1 = torch.tensor(lengths, device=cache.device)[:, None]
    outside_BT = torch.arange(width * size, device=cache.device) >= lengths_B1
    return DecodeGroup(
        first, first + len(decodes), table_BM, _bias(outside_BT, cache)[:, None, None]
    )


def _span(chunk: Chunk, first: int, cache: KVCache) -> PrefillSpan:
    last = first + chunk.length
    if chunk.start == 0:
        return PrefillSpan(first, last, None, None)
    end = chunk.start + chunk.length
    blocks = chunk.request.block_table[: -(-end // cache.block_tokens)]
    context = torch.arange(end, device=cache.device)
    later_PQ = context > context[chunk.start :, None]
    return PrefillSpan(
        first, last, torch.tensor([blocks], device=cache.device), _bias(later_PQ, cache)
    )


def _bias(outside: Tensor, cache: KVCache) -> Tensor:
    # Added to the scores; made once per step, where a boolean mask is converted in each layer.
    bias = torch.zeros(outside.shape, dtype=cache.dtype, device=cache.device)
    return bias.masked_fill_(outside, -torch.inf)
