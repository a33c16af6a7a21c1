import math
from collections import Counter
from typing import Any

import pytest
import torch

from eagleray.serve.engine import Request, SamplingParams, sampling
from eagleray.serve.engine.sampling import sample, uniform


def request(
    tokens: list[int] | None = None, num_prompt: int = 1, seed: int = 0, **rules: Any
) -> Request:
    params = SamplingParams(**rules)
    return Request("r", tokens or [0], num_prompt, params, 100, seed, math.inf)


def draw(logits: list[float], **rules: Any) -> list[int]:
    """Tokens of 400 seeds, drawn as one batch."""
    requests = [request(seed=seed, **rules) for seed in range(400)]
    drawn = sample(torch.tensor([logits]).repeat(400, 1), requests)
    return [token.token_id for token in drawn if token]


def test_temperature_zero_takes_the_likeliest_token() -> None:
    logits_NV = torch.tensor([[0.0, 3.0, 1.0], [5.0, 4.9, 0.0]])
    drawn = sample(logits_NV, [request(temperature=0), request(temperature=1.0, top_k=1)])
    assert [token and token.token_id for token in drawn] == [1, 0]


def test_samples_follow_the_distribution_at_the_temperature() -> None:
    counts = Counter(draw([0.0, math.log(3.0)], temperature=1.0))
    assert 0.67 < counts[1] / 400 < 0.83
    sharper = Counter(draw([0.0, math.log(3.0)], temperature=0.5))
    assert 0.84 < sharper[1] / 400 < 0.96


@pytest.mark.parametrize(
    ("rules", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.75}, {0, 1}),
        ({"min_p": 0.3}, {0, 1}),
        ({"top_k": 3, "min_p": 0.3}, {0, 1}),
        ({"top_k": 100}, {0, 1, 2, 3}),
    ],
)
def test_restrictions_leave_the_likeliest_tokens(rules: dict[str, Any], allowed: set[int]) -> None:
    logits = [math.log(p) for p in (0.55, 0.25, 0.13, 0.07)]
    assert set(draw(logits, temperature=1.0, **rules)) == allowed


def test_a_wide_vocabulary_is_cut_as_exactly_as_a_narrow_one() -> None:
    # 2,000 tokens of equal mass: the 512 candidates that are looked at first do not hold 0.9.
    counts = Counter(draw([1.0] * 1000 + [0.0] * 1000, temperature=1.0, top_p=0.5))
    assert max(counts) < 1000


def test_a_row_without_top_p_keeps_its_whole_vocabulary_beside_one_with_it() -> None:
    logits_NV = torch.zeros(300, 2000)
    rows = [
        request(seed=seed, top_p=0.5 if seed % 3 == 0 else 1.0, min_p=1e-9) for seed in range(300)
    ]
    logits_NV[:, :3] = 20.0
    logits_NV[1::3] = 0.0
    tokens = [token.token_id for token in sample(logits_NV, rows) if token]
    assert max(tokens[0::3]) <= 2
    assert max(tokens[1::3]) > 1000


def test_the_smallest_random_number_never_draws_a_token_that_was_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling, "uniform", lambda seed, position: 0.0)
    assert set(draw([-5.0, 0.0, 1.0], temperature=1.0, top_k=1 + 1)) == {1}


def test_each_row_has_rules_of_its_own() -> None:
    logits_NV = torch.tensor([[1.0, 0.9, 0.8]]).repeat(3, 1)
    rows = [request(temperature=0), request(top_k=1), request(top_p=1e-6, seed=5)]
    assert [token and token.token_id for token in sample(logits_NV, rows)] == [0, 0, 0]


def test_a_seed_gives_the_same_token_alone_and_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(3)
    logits_NV = torch.randn(6, 50, generator=generator)
    rules: list[dict[str, Any]] = [{}, {"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.1}, {}, {}]
    rows = [request(seed=seed, **rule) for seed, rule in enumerate(rules)]
    together = [token and token.token_id for token in sample(logits_NV, rows)]
    alone = [sample(logits_NV[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert together == [token and token.token_id for token in alone]


def test_the_random_number_depends_on_seed_and_position_alone() -> None:
    numbers = {uniform(seed, position) for seed in range(50) for position in range(50)}
    assert len(numbers) == 2500
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert 0.45 < sum(numbers) / 2500 < 0.55
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


def test_penalties_push_down_what_was_said() -> None:
    logits_NV = torch.tensor([[1.0, 0.9, 0.0]])
    said = [2, 0, 0]
    for rules in (
        {"presence_penalty": 0.2},
        {"frequency_penalty": 0.06},
        {"repetition_penalty": 1.2},
    ):
        row = request(said, num_prompt=1, temperature=0.0, **rules)
        assert [token and token.token_id for token in sample(logits_NV, [row])] == [1]


def test_presence_and_frequency_leave_the_prompt_alone_and_repetition_does_not() -> None:
    logits_NV = torch.tensor([[1.0, 0.9, -0.5]]).repeat(2, 1)
    prompt_only = request([0], 1, temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    repeated = request([0], 1, temperature=0.0, repetition_penalty=2.0)
    drawn = sample(logits_NV, [prompt_only, repeated])
    assert [token and token.token_id for token in drawn] == [0, 1]


def test_logprobs_are_the_models_own_whatever_the_rules() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0])
    row = request(temperature=0.0, logprobs=2, presence_penalty=2.0)
    token = sample(logits[None], [row])[0]
    assert token is not None
    assert token.logprob is not None
    expected = logits.log_softmax(-1).tolist()
    assert token.logprob.logprob == pytest.approx(expected[0])
    assert [index for index, _ in token.logprob.top] == [0, 1]
    assert [value for _, value in token.logprob.top] == pytest.approx(expected[:2])


def test_no_logprobs_unless_asked_and_none_of_others_at_zero() -> None:
    logits_NV = torch.zeros(2, 4)
    plain, chosen = sample(logits_NV, [request(temperature=0.0), request(logprobs=0)])
    assert plain is not None
    assert plain.logprob is None
    assert chosen is not None
    assert chosen.logprob is not None
    assert chosen.logprob.top == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_has_no_answer_and_spares_the_others(bad: float) -> None:
    logits_NV = torch.tensor([[0.0, 1.0], [bad, 1.0], [1.0, 0.0]])
    drawn = sample(logits_NV, [request(temperature=0.0), request(), request(temperature=0.0)])
    assert [token and token.token_id for token in drawn] == [1, None, 0]


def test_known_likeliest_tokens_are_taken_unless_penalties_change_them() -> None:
    logits_NV = torch.tensor([[0.0, 3.0, 2.9], [1.0, 0.0, 0.0], [0.0, 3.0, 2.9]])
    plain, random = request(temperature=0), request(temperature=2.0, top_k=1)
    drawn = sample(logits_NV, [plain, plain, random], [1, -1, 1])
    assert [token and token.token_id for token in drawn] == [1, None, 1]
    said = request([0, 1], temperature=0, presence_penalty=1.0)
    drawn = sample(logits_NV, [plain, plain, said], [1, -1, 1])
    assert [token and token.token_id for token in drawn] == [1, None, 2]
