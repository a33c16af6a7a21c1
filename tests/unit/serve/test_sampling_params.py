import math
import pickle
from typing import Any

import pytest

from eagleray.serve.engine import InvalidRequestError, SamplingParams
from eagleray.serve.engine.sampling_params import seed_of_choice

WRONG: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", 2**40),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "1"),
    ("temperature", None),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_k", -1),
    ("top_k", 0.5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.5),
    ("presence_penalty", math.nan),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("seed", 2**63),
    ("seed", "7"),
    ("stop", "END"),
    ("stop", ("",)),
    ("stop", ("x" * 257,)),
    ("stop", ("a",) * 17),
    ("stop", (3,)),
    ("n", 0),
    ("n", 9),
    ("n", 16384),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", True),
    ("ignore_eos", 1),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_refuses_a_value_out_of_its_bounds_and_names_the_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in caught.value.what


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0, "top_p": 1},
        {"temperature": 2.0, "top_k": 50, "min_p": 1.0},
        {"seed": -(2**63), "n": 8, "logprobs": 20},
        {"stop": ("a",) * 16, "max_tokens": 1},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 10.0},
    ],
)
def test_accepts_the_ends_of_every_range(values: dict[str, Any]) -> None:
    assert SamplingParams(**values)


def test_temperature_zero_and_top_one_are_greedy() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(top_k=1).is_greedy
    assert not SamplingParams(top_k=2).is_greedy


def test_choices_of_a_request_have_seeds_of_their_own_and_the_first_keeps_it() -> None:
    assert seed_of_choice(7, 0) == 7
    assert len({seed_of_choice(7, choice) for choice in range(8)}) == 8


def test_a_refusal_survives_pickling_with_its_field() -> None:
    error = pickle.loads(pickle.dumps(InvalidRequestError("what", "fix", "top_p")))
    assert (error.what, error.fix, error.param) == ("what", "fix", "top_p")
