"""Requests through a scheduler and a runner, to their end."""

from collections.abc import Callable, Sequence

import torch

from eagleray.platform.model.config import DecoderConfig
from eagleray.platform.model.decoder import Decoder
from eagleray.serve.engine import (
    BlockPool,
    FinishReason,
    Request,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
)
from eagleray.serve.engine.engine import _drawn as drawn_tokens
from eagleray.serve.engine.kv_cache import KVCache
from eagleray.serve.engine.model_runner import Runner

CONFIG = DecoderConfig(
    vocab_size=97, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=64,
    max_seq_len=128,
)  # fmt: skip
CPU = torch.device("cpu")
BLOCK_TOKENS = 4


def make_decoder() -> Decoder:
    """A small one whose greedy tokens differ clearly."""
    made = Decoder(CONFIG).eval()
    made.init_weights(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in made.parameters():
            # Initial weights give nearly equal logits: no test of greedy equality.
            parameter.mul_(6 if parameter.dim() > 1 else 1)
    return made


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(97, (length,), generator=generator).tolist() for length in lengths]


def run(
    make_runner: Callable[[KVCache], Runner],
    asked: Sequence[Sequence[int]],
    *,
    dtype: torch.dtype = torch.float32,
    num_blocks: int = 64,
    step_tokens: int = 64,
    max_running: int = 16,
    max_tokens: int = 12,
    garbage: bool = False,
    keeps_prefixes: bool = False,
    guessed_tokens: int = 0,
) -> tuple[list[list[int]], list[list[torch.Tensor]], int]:
    """Greedy tokens and logits of every request, and how many were preempted."""
    cache = KVCache(CONFIG, num_blocks, BLOCK_TOKENS, dtype, CPU)
    if garbage:
        # What an earlier request of a broken model may have left behind.
        blocks_L = torch.arange(num_blocks)
        cache._k_LNSKC[:, blocks_L] = torch.nan
        cache._v_LNSKC[:, blocks_L] = torch.nan
    runner = make_runner(cache)
    limits = SchedulerLimits(max_running, 99, step_tokens)
    pool = BlockPool(num_blocks, BLOCK_TOKENS, keeps_prefixes=keeps_prefixes)
    scheduler = Scheduler(limits, pool, guessed_tokens)
    params = SamplingParams(temperature=0)
    requests = [
        Request(str(i), list(prompt), len(prompt), params, max_tokens, 0, 1e9)
        for i, prompt in enumerate(asked)
    ]
    logits: dict[str, list[torch.Tensor]] = {request.request_id: [] for request in requests}
    scheduler.submit(requests)
    while scheduler.has_work:
        plan = scheduler.plan(0.0)
        output = runner.run(plan)
        rows, sampled = iter(output.logits_NV), {}
        for request_id, drawn in drawn_tokens(output).items():
            sampled[request_id] = [token.token_id for token in drawn]
        for chunk in output.sampling:
            taken = [next(rows) for _ in range(chunk.num_rows)]
            logits[chunk.request.request_id] += taken[: len(sampled[chunk.request.request_id])]
        for request in scheduler.advance(plan, sampled):
            if request.num_output >= request.max_tokens:
                scheduler.finish(request, FinishReason.LENGTH)
        scheduler.check_integrity()
    return (
        [list(request.output) for request in requests],
        list(logits.values()),
        scheduler.num_preemptions,
    )
