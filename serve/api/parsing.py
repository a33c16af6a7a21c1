"""From the body of an OpenAI request to what the engine is asked.

Only fields that exist are accepted. Documented OpenAI fields that would have no effect here are
accepted at the value that asks for nothing, and refused by name otherwise: no client is left to
believe that a tool was called or a bias applied. Ranges are `SamplingParams`' business alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from eagleray.serve.api.limits import MAX_MESSAGES, MAX_PROMPTS
from eagleray.serve.engine.refusals import InvalidRequestError
from eagleray.serve.engine.sampling_params import MAX_LOGPROBS, SamplingParams

Prompt = str | list[int]
Message = dict[str, str]

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "n", "ignore_eos",
)  # fmt: skip
# Notes for the provider's records: accepted, not kept.
_NOTES = ("user", "metadata", "safety_identifier", "prompt_cache_key")
# Field -> the values that ask for nothing.
_INERT_BOTH: Mapping[str, tuple[Any, ...]] = {"logit_bias": ({},)}
_INERT_COMPLETION: Mapping[str, tuple[Any, ...]] = {
    **_INERT_BOTH, "best_of": (1,), "echo": (False,), "suffix": ("",),
}  # fmt: skip
_INERT_CHAT: Mapping[str, tuple[Any, ...]] = {
    **_INERT_BOTH,
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
}
_COMMON = ("model", "stream", "stream_options", "stop", "max_tokens")
# What OpenAI's completions endpoint generates when nothing is said.
_COMPLETION_MAX_TOKENS = 16
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_MAX_SHOWN = 80
_MESSAGE_FIELDS = frozenset({"role", "content", "name", "refusal"})


@dataclass(frozen=True)
class GenerationRequest:
    """A body that is well formed.

    Attributes:
        model: The model that the client asks for.
        prompts: Texts or token ids; empty for a chat.
        messages: Of a chat: role and content; empty otherwise.
        params: How to sample.
        stream: Send tokens as they come.
        include_usage: End the stream with the token counts.
    """

    model: str
    prompts: tuple[Prompt, ...]
    messages: tuple[Message, ...]
    params: SamplingParams
    stream: bool
    include_usage: bool


def parse_completion(body: Mapping[str, Any]) -> GenerationRequest:
    """Read the body of /v1/completions.

    Raises:
        InvalidRequestError: A field is unknown or breaks a rule; `param` names it.
    """
    given = _given(body, ("prompt", "logprobs", *_COMMON), _INERT_COMPLETION)
    max_tokens = given.get("max_tokens", _COMPLETION_MAX_TOKENS)
    params = _sampling(given, max_tokens, given.get("logprobs"))
    prompts = _prompts(given.get("prompt"))
    return GenerationRequest(_model(given), prompts, (), params, *_streaming(given))


def parse_chat(body: Mapping[str, Any]) -> GenerationRequest:
    """Read the body of /v1/chat/completions.

    Raises:
        InvalidRequestError: A field is unknown or breaks a rule; `param` names it.
    """
    own = ("messages", "logprobs", "top_logprobs", "max_completion_tokens", *_COMMON)
    given = _given(body, own, _INERT_CHAT)
    if "max_tokens" in given and "max_completion_tokens" in given:
        raise _wrong("max_tokens", "given beside max_completion_tokens", "sent under one name only")
    max_tokens = given.get("max_completion_tokens", given.get("max_tokens"))
    wants_logprobs = _flag(given, "logprobs")
    logprobs = given.get("top_logprobs", 0) if wants_logprobs else None
    if not wants_logprobs and "top_logprobs" in given:
        raise _wrong("top_logprobs", "given without logprobs", "sent with logprobs true")
    params = _sampling(given, max_tokens, logprobs, logprobs_field="top_logprobs")
    messages = _messages(given.get("messages"))
    return GenerationRequest(_model(given), (), messages, params, *_streaming(given))


def _given(
    body: Mapping[str, Any], own: tuple[str, ...], inert: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """The fields that ask for something; null asks for nothing."""
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in own or name in _SAMPLING or name in _NOTES:
            continue
        if name not in inert:
            shown = name[:_MAX_SHOWN]
            raise InvalidRequestError(f"there is no field {shown!r} here", "leave it out", shown)
        # By type too: 1 == True in Python.
        if not any(value == idle and type(value) is type(idle) for idle in inert[name]):
            raise InvalidRequestError(
                f"{name} is not supported; only {inert[name][0]!r} is, which asks for nothing",
                f"leave {name} out",
                name,
            )
    return given


def _sampling(
    given: Mapping[str, Any],
    max_tokens: Any,
    logprobs: Any,
    logprobs_field: Literal["logprobs", "top_logprobs"] = "logprobs",
) -> SamplingParams:
    stop = given.get("stop", [])
    values = {name: given[name] for name in _SAMPLING if name in given}
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop) if _is_list(stop) else stop,
            logprobs=logprobs,
            **values,
        )
    except InvalidRequestError as error:
        if error.param == "logprobs" and logprobs_field != "logprobs":
            raise _wrong(
                logprobs_field, repr(logprobs)[:80], f"a whole number in [0, {MAX_LOGPROBS}]"
            ) from None
        raise


def _prompts(prompt: Any) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if not _is_list(prompt) or not prompt:
        raise _wrong("prompt", _kind(prompt), "a string, token ids, or a list of either")
    if _is_token_ids(prompt):
        return (prompt,)
    if len(prompt) > MAX_PROMPTS:
        raise _wrong("prompt", f"a list of {len(prompt)}", f"at most {MAX_PROMPTS} prompts")
    for entry in prompt:
        if not isinstance(entry, str) and not _is_token_ids(entry):
            raise _wrong("prompt", f"a list with {_kind(entry)}", "strings or lists of token ids")
    return tuple(prompt)


def _messages(messages: Any) -> tuple[Message, ...]:
    if not _is_list(messages) or not messages:
        raise _wrong("messages", _kind(messages), "a list of at least one message")
    if len(messages) > MAX_MESSAGES:
        raise _wrong("messages", f"a list of {len(messages)}", f"at most {MAX_MESSAGES}")
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise _wrong(where, _kind(message), "an object with role and content")
    for name, value in message.items():
        if value is not None and name not in _MESSAGE_FIELDS:
            field = f"{where}.{name[:_MAX_SHOWN]}"
            raise InvalidRequestError(f"{field!r} is not supported", "leave it out", field)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _wrong(f"{where}.role", repr(role)[:80], f"one of {', '.join(_ROLES)}")
    return {"role": _ROLES[role], "content": _content(message.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not _is_list(content):
        raise _wrong(where, _kind(content), "a string or a list of text parts")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise _wrong(where, "a part that is not text", "text: this model reads nothing else")
        if not isinstance(part.get("text"), str):
            raise _wrong(where, "a text part without text", "parts of type and text")
        texts.append(part["text"])
    return "".join(texts)


def _model(given: Mapping[str, Any]) -> str:
    model = given.get("model")
    if not isinstance(model, str) or not model:
        raise _wrong("model", _kind(model), "the name of a model; see /v1/models")
    return model


def _streaming(given: Mapping[str, Any]) -> tuple[bool, bool]:
    stream = _flag(given, "stream")
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise _wrong("stream_options", _kind(options), "an object")
    for name in options:
        if name not in ("include_usage", "include_obfuscation"):
            raise InvalidRequestError(
                f"stream_options has no field {name[:_MAX_SHOWN]!r}",
                "leave it out",
                "stream_options",
            )
    if options and not stream:
        raise _wrong("stream_options", "given without stream", "sent with stream true")
    return stream, _flag(options, "include_usage")


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(name, _kind(value), "true or false")
    return bool(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_token_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(token, int) and not isinstance(token, bool) for token in value)
    )


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", type(None): "missing"}
    return names.get(type(value), repr(value)[:40])


def _wrong(name: str, what: str, rule: str) -> InvalidRequestError:
    fix = f"give {name}" if what == "missing" else f"correct {name}"
    return InvalidRequestError(f"{name} is {what}; it must be {rule}", fix, name)
