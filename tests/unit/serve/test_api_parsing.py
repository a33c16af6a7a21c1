from typing import Any

import pytest

from eagleray.serve.api.parsing import parse_chat, parse_completion
from eagleray.serve.engine import InvalidRequestError

SAY = [{"role": "user", "content": "hi"}]


def completion(**body: Any) -> Any:
    return parse_completion({"model": "tiny", "prompt": "hi", **body})


def chat(**body: Any) -> Any:
    return parse_chat({"model": "tiny", "messages": SAY, **body})


def test_a_bare_completion_has_openais_defaults() -> None:
    asked = completion()
    assert asked.prompts == ("hi",)
    assert (asked.params.max_tokens, asked.params.temperature) == (16, 1.0)
    assert (asked.stream, asked.include_usage) == (False, False)


def test_a_bare_chat_generates_as_much_as_fits() -> None:
    asked = chat()
    assert asked.messages == ({"role": "user", "content": "hi"},)
    assert asked.params.max_tokens is None


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ([1, 2],)),
        ([[1], [2, 3]], ([1], [2, 3])),
        (["a", [1]], ("a", [1])),
    ],
)
def test_prompts_come_in_four_forms(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompts == expected


@pytest.mark.parametrize("prompt", [None, 3, [], [[]], [1, "a"], [True], {"a": 1}, ["a"] * 65])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"


def test_a_stop_string_may_stand_alone_and_null_asks_for_nothing() -> None:
    assert completion(stop="END").params.stop == ("END",)
    assert completion(stop=["a", "b"]).params.stop == ("a", "b")
    assert completion(stop=None, temperature=None, seed=None).params.stop == ()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"n": 100}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop": [3]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage"),
        ({"model": ""}, "model"),
        ({"model": 3}, "model"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logit_bias": {"50256": -100}}, "logit_bias"),
        ({"guided_regex": "(a+)+"}, "guided_regex"),
        ({"messages": SAY}, "messages"),
    ],
)
def test_a_completions_wrong_field_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(**body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [*SAY, {"role": "user", "content": "x", "tool_calls": []}]},
         "messages[1].tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "messages[0].content"),
        ({"messages": SAY * 1025}, "messages"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 3}, "max_tokens"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"chat_template_kwargs": {}}, "chat_template_kwargs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"store": True}, "store"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"prompt": "x"}, "prompt"),
    ],
)  # fmt: skip
def test_a_chats_wrong_field_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(**body)
    assert caught.value.param == param


def test_fields_that_ask_for_nothing_are_accepted() -> None:
    assert completion(best_of=1, echo=False, logit_bias={}, suffix="", user="u-1", n=1)
    assert chat(
        tools=[], tool_choice="auto", response_format={"type": "text"}, modalities=["text"],
        parallel_tool_calls=True, store=False, service_tier="auto", metadata={"a": "b"},
        safety_identifier="x", prompt_cache_key="y", functions=[], logit_bias=None,
    )  # fmt: skip


def test_our_own_fields_reach_the_sampler() -> None:
    params = completion(top_k=5, min_p=0.1, repetition_penalty=1.1, ignore_eos=True).params
    assert (params.top_k, params.min_p, params.repetition_penalty) == (5, 0.1, 1.1)
    assert params.ignore_eos


def test_chat_logprobs_are_a_switch_and_a_count() -> None:
    assert chat().params.logprobs is None
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).params.logprobs == 4


def test_text_parts_are_joined_and_developer_means_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = chat(messages=[{"role": "developer", "content": parts}, *SAY])
    assert asked.messages[0] == {"role": "system", "content": "ab"}
