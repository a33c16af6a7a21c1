from collections.abc import Sequence

import pytest
import torch

from eagleray.platform.errors import InfeasibleError
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
from eagleray.serve.engine.kv_cache import KVCache, num_blocks_within
from eagleray.serve.engine.model_runner import ModelRunner

CONFIG = DecoderConfig(
    vocab_size=97, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=64,
    max_seq_len=128,
)  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def decoder() -> Decoder:
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
    decoder: Decoder,
    asked: Sequence[Sequence[int]],
    *,
    num_blocks: int = 64,
    step_tokens: int = 64,
    max_running: int = 16,
    max_tokens: int = 12,
    garbage: bool = False,
) -> tuple[list[list[int]], list[list[torch.Tensor]], int]:
    """Greedy tokens and logits of every request, and how many were preempted."""
    cache = KVCache(CONFIG, num_blocks, 4, torch.float32, CPU)
    if garbage:
        # What an earlier request of a broken model may have left behind.
        blocks_L = torch.arange(num_blocks)
        cache._k_LNSKC[:, blocks_L] = torch.nan
        cache._v_LNSKC[:, blocks_L] = torch.nan
    runner = ModelRunner(decoder, cache)
    limits = SchedulerLimits(max_running, 99, step_tokens)
    scheduler = Scheduler(limits, BlockPool(num_blocks, 4))
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
        sampled = {}
        for chunk, row_V in zip(output.sampling, output.logits_NV, strict=True):
            logits[chunk.request.request_id].append(row_V)
            sampled[chunk.request.request_id] = int(row_V.argmax())
        for request in scheduler.advance(plan, sampled):
            if request.num_output >= request.max_tokens:
                scheduler.finish(request, FinishReason.LENGTH)
        scheduler.check_integrity()
    return (
        [list(request.output) for request in requests],
        list(logits.values()),
        scheduler.num_preemptions,
    )


@torch.inference_mode()
def reference(decoder: Decoder, prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(decoder(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_cached_generation_equals_a_forward_pass_over_everything(decoder: Decoder) -> None:
    asked = prompts(1, 4, 5, 17)
    tokens, _, _ = run(decoder, asked)
    assert tokens == [reference(decoder, prompt, 12) for prompt in asked]


def test_greedy_tokens_are_the_same_alone_and_in_a_batch_of_32(decoder: Decoder) -> None:
    asked = prompts(*[1 + (7 * i) % 40 for i in range(32)])
    together, logits, _ = run(decoder, asked, num_blocks=600, max_running=32)
    for prompt, tokens, rows in list(zip(asked, together, logits, strict=True))[::5]:
        alone, alone_logits, _ = run(decoder, [prompt])
        assert alone[0] == tokens
        for row_V, alone_V in zip(rows, alone_logits[0], strict=True):
            torch.testing.assert_close(row_V, alone_V, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("step_tokens", [1, 3, 8, 64])
def test_chunks_of_any_size_give_the_same_tokens(decoder: Decoder, step_tokens: int) -> None:
    asked = prompts(33)
    tokens, _, _ = run(decoder, asked, step_tokens=step_tokens, max_running=1)
    assert tokens == [reference(decoder, asked[0], 12)]


def test_preempted_requests_go_on_as_if_nothing_had_happened(decoder: Decoder) -> None:
    asked = prompts(8, 9, 10, 11)
    tokens, _, num_preemptions = run(decoder, asked, num_blocks=12)
    assert num_preemptions > 0
    assert tokens == [reference(decoder, prompt, 12) for prompt in asked]


def test_what_earlier_owners_left_in_a_block_is_never_seen(decoder: Decoder) -> None:
    asked = prompts(3, 18)
    tokens, _, _ = run(decoder, asked, garbage=True)
    assert tokens == [reference(decoder, prompt, 12) for prompt in asked]


def test_the_pool_is_as_large_as_the_budget_allows() -> None:
    # 2 layers * (keys, values) * 2 heads * 8 channels * 4 bytes * 16 tokens = 4,096 bytes.
    assert num_blocks_within(10 * 4096 + 1, CONFIG, 16, 4) == 9
    cache = KVCache(CONFIG, 9, 16, torch.float32, CPU)
    assert cache.num_bytes == 10 * 4096


def test_refuses_a_budget_below_two_blocks_and_names_the_least() -> None:
    with pytest.raises(InfeasibleError, match="8192"):
        num_blocks_within(8191, CONFIG, 16, 4)
