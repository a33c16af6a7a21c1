from collections.abc import Sequence
from functools import partial

import pytest
import torch
from tests.unit.serve.engine_runs import CONFIG, CPU, make_decoder, prompts, run

from eagleray.platform.errors import InfeasibleError
from eagleray.platform.model.decoder import Decoder
from eagleray.serve.engine.kv_cache import KVCache, num_blocks_within
from eagleray.serve.engine.model_runner import ModelRunner


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return make_decoder()


@torch.inference_mode()
def reference(decoder: Decoder, prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(decoder(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_cached_generation_equals_a_forward_pass_over_everything(decoder: Decoder) -> None:
    asked = prompts(1, 4, 5, 17)
    tokens, _, _ = run(partial(ModelRunner, decoder), asked)
    assert tokens == [reference(decoder, prompt, 12) for prompt in asked]


def test_greedy_tokens_are_the_same_alone_and_in_a_batch_of_32(decoder: Decoder) -> None:
    asked = prompts(*[1 + (7 * i) % 40 for i in range(32)])
    together, logits, _ = run(partial(ModelRunner, decoder), asked, num_blocks=600, max_running=32)
    for prompt, tokens, rows in list(zip(asked, together, logits, strict=True))[::5]:
        alone, alone_logits, _ = run(partial(ModelRunner, decoder), [prompt])
        assert alone[0] == tokens
        for row_V, alone_V in zip(rows, alone_logits[0], strict=True):
            torch.testing.assert_close(row_V, alone_V, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("step_tokens", [1, 3, 8, 64])
def test_chunks_of_any_size_give_the_same_tokens(decoder: Decoder, step_tokens: int) -> None:
    asked = prompts(33)
    tokens, _, _ = run(partial(ModelRunner, decoder), asked, step_tokens=step_tokens, max_running=1)
    assert tokens == [reference(decoder, asked[0], 12)]


def test_preempted_requests_go_on_as_if_nothing_had_happened(decoder: Decoder) -> None:
    asked = prompts(8, 9, 10, 11)
    tokens, _, num_preemptions = run(partial(ModelRunner, decoder), asked, num_blocks=12)
    assert num_preemptions > 0
    assert tokens == [reference(decoder, prompt, 12) for prompt in asked]


def test_kept_prefixes_give_the_same_tokens(decoder: Decoder) -> None:
    [system] = prompts(21)
    asked = [[*system, *end] for end in prompts(1, 3, 9, 1)]
    tokens, _, _ = run(partial(ModelRunner, decoder), asked, max_running=1, keeps_prefixes=True)
    assert tokens == [reference(decoder, prompt, 12) for prompt in asked]


def test_what_earlier_owners_left_in_a_block_is_never_seen(decoder: Decoder) -> None:
    asked = prompts(3, 18)
    tokens, _, _ = run(partial(ModelRunner, decoder), asked, garbage=True)
    assert tokens == [reference(decoder, prompt, 12) for prompt in asked]


def test_the_pool_is_as_large_as_the_budget_allows() -> None:
    # 2 layers * (keys, values) * 2 heads * 8 channels * 4 bytes * 16 tokens = 4,096 bytes.
    assert num_blocks_within(10 * 4096 + 1, CONFIG, 16, 4) == 9
    cache = KVCache(CONFIG, 9, 16, torch.float32, CPU)
    assert cache.num_bytes == 10 * 4096


def test_refuses_a_budget_below_two_blocks_and_names_the_least() -> None:
    with pytest.raises(InfeasibleError, match="8192"):
        num_blocks_within(8191, CONFIG, 16, 4)
