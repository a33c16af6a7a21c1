"""What is guessed from what a request has said, and how guesses go through the engine."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.serve.conftest import repetitive_token
from tests.unit.serve.engine_runs import BLOCK_TOKENS, make_decoder, prompts, run

from eagleray.serve.engine import FinishReason, SamplingParams
from eagleray.serve.engine.guesses import PromptLookup
from eagleray.serve.engine.model_runner import ModelRunner
from eagleray.serve.engine.native_runner import CACHE_DTYPE, NativeRunner
from eagleray.serve.kernels.decoder import NativeDecoder
from eagleray.serve.kernels.library import library


def test_what_followed_the_newest_tokens_last_time_is_guessed() -> None:
    tokens = [1, 2, 3, 4, 5, 9, 1, 2, 3, 7, 8, 1, 2, 3]
    assert PromptLookup(4).guess(tokens, 4) == (7, 8, 1, 2)
    assert PromptLookup(4).guess(tokens, 1) == (7,)
    assert PromptLookup(2).guess(tokens, 4) == (7, 8)
    assert PromptLookup(4).guess(tokens[:-1], 4) == ()
    assert PromptLookup(4).guess([1, 2], 4) == ()


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 6))
def test_a_lookup_that_grows_guesses_as_one_that_sees_all_at_once(
    tokens: list[int], most: int
) -> None:
    growing = PromptLookup(most)
    for end in range(len(tokens) + 1):
        guess = growing.guess(tokens[:end], most)
        assert guess == PromptLookup(most).guess(tokens[:end], most)
        runs = [i for i in range(3, end) if tokens[i - 3 : i] == tokens[end - 3 : end]]
        expected = tokens[:end]
        for place in range(runs[-1], runs[-1] + most) if runs else ():
            expected.append(expected[place])
        assert list(guess) == expected[end:]


def test_guesses_grow_while_they_are_right_and_pause_when_they_are_not() -> None:
    lookup, tokens = PromptLookup(4), [1, 2, 3] * 4
    for expected in (2, 1):
        lookup.tell(4, 0, len(tokens))
        assert len(lookup.guess(tokens, 4)) == expected
    lookup.tell(1, 0, len(tokens))
    assert lookup.guess(tokens, 4) == ()
    tokens += [1, 2, 3] * 11
    assert len(lookup.guess(tokens, 4)) == 1
    for expected in (2, 4, 4):
        lookup.tell(1, 1, len(tokens))
        assert len(lookup.guess(tokens, 4)) == expected


PROMPT = list(b"abcabcabcab")


@pytest.mark.parametrize(
    "rules",
    [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0, "stop": ("bca",)},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0, "presence_penalty": 1.0},
    ],
)
def test_texts_ends_and_logprobs_are_the_same_with_guesses_and_without(
    make_rig: Callable[..., Any], rules: dict[str, Any]
) -> None:
    found = []
    for guessed_tokens in (0, 4):
        rig = make_rig(guessed_tokens=guessed_tokens)
        rig.model.script = repetitive_token
        params = SamplingParams(**{"max_tokens": 40, "n": 2, **rules})
        streams = rig.engine.submit([PROMPT], params)
        pieces = []
        for stream in streams:
            deltas = list(iter(partial(stream.read, 20), None))
            text = "".join(delta.text for delta in deltas)
            logprobs = [entry for delta in deltas for entry in delta.logprobs]
            pieces.append((text, logprobs, deltas[-1].finish_reason, stream.timing.num_output))
        found.append(pieces)
        stats = rig.engine.stats()
    assert found[0] == found[1]
    assert (stats.num_taken_tokens > 0) == ("presence_penalty" not in rules)


def test_an_end_token_among_right_guesses_ends_the_text(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(guessed_tokens=4)
    # The prompt has the end token in it, and so has the guess.
    script = [97, 98, 99, 256]
    rig.model.script = lambda context: script[(len(context) - 8) % 4]
    [stream] = rig.engine.submit([[*script, *script]], SamplingParams(temperature=0, max_tokens=30))
    deltas = list(iter(partial(stream.read, 20), None))
    assert "".join(delta.text for delta in deltas) == "abc"
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert stream.timing.num_output == 4


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_real_models_say_the_same_with_guesses(bits: int) -> None:
    decoder = make_decoder()
    if bits:
        if library() is None:
            pytest.skip("kernels not compiled, or no AVX2")
        native = NativeDecoder(
            decoder, bits=bits, block_tokens=BLOCK_TOKENS, cache_dtype=CACHE_DTYPE, num_threads=2
        )
        play = partial(run, partial(NativeRunner, native), dtype=CACHE_DTYPE)
    else:
        play = partial(run, partial(ModelRunner, decoder))
    [pattern] = prompts(5)
    asked = [pattern * 3, pattern * 4, *prompts(9)]
    plain, plain_logits, _ = play(asked, max_tokens=30)
    guessed, guessed_logits, _ = play(asked, max_tokens=30, guessed_tokens=4)
    assert guessed == plain
    for rows, other_rows in zip(plain_logits, guessed_logits, strict=True):
        if bits:
            assert all(map(torch.equal, rows, other_rows))
        else:
            for row, other in zip(rows, other_rows, strict=True):
                torch.testing.assert_close(row, other, rtol=1e-4, atol=1e-4)
