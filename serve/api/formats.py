"""Documents and stream chunks of the two generating endpoints, field by field as OpenAI's.

A choice is one completion; its index counts prompt by prompt, `n` for each. `usage` counts a
prompt once however many choices it has, and every token that was sampled, the end token too.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from eagleray.serve.engine.request import FinishReason
from eagleray.serve.engine.sampled_token import TokenLogprob
from eagleray.serve.engine.stream import StreamTiming

Document = dict[str, Any]


class Spelling(Protocol):
    """What a format needs of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text."""
        ...


@dataclass(frozen=True)
class Answer:
    """What all documents of one response share."""

    response_id: str
    created_s: int
    model: str
    digest: str

    def document(self, kind: str, choices: list[Document], usage: Document | None) -> Document:
        """A whole document, or one chunk."""
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.digest,
            "choices": choices,
            "usage": usage,
        }


class Choice(Protocol):
    """One completion in the form of one endpoint; stateful: used for either whole or chunks."""

    def whole(self, text: str, logprobs: Sequence[TokenLogprob], reason: FinishReason) -> Document:
        """The finished completion."""
        ...  # fmt: skip

    def chunk(
        self, text: str, logprobs: Sequence[TokenLogprob], reason: FinishReason | None
    ) -> Document:
        """What is new of it."""
        ...


class TextChoice:
    """A choice of /v1/completions."""

    prefix, whole_kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, index: int, wants_logprobs: bool, spelling: Spelling) -> None:
        self._index, self._wants_logprobs, self._spelling = index, wants_logprobs, spelling
        self._offset = 0

    def whole(self, text: str, logprobs: Sequence[TokenLogprob], reason: FinishReason) -> Document:
        """The finished completion."""
        return self.chunk(text, logprobs, reason)

    def chunk(
        self, text: str, logprobs: Sequence[TokenLogprob], reason: FinishReason | None
    ) -> Document:
        """What is new of it."""
        return {
            "index": self._index,
            "text": text,
            "logprobs": self._logprobs(logprobs) if self._wants_logprobs else None,
            "finish_reason": reason,
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Document:
        tokens = [_shown(self._spelling, entry.token_id) for entry in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in logprobs],
            "top_logprobs": [
                {_shown(self._spelling, token): value for token, value in entry.top}
                for entry in logprobs
            ],
            "text_offset": offsets,
        }


class ChatChoice:
    """A choice of /v1/chat/completions."""

    prefix, whole_kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, index: int, wants_logprobs: bool, spelling: Spelling) -> None:
        self._index, self._wants_logprobs, self._spelling = index, wants_logprobs, spelling
        self._is_begun = False

    def whole(self, text: str, logprobs: Sequence[TokenLogprob], reason: FinishReason) -> Document:
        """The finished completion."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._choice("message", message, logprobs, reason)

    def chunk(
        self, text: str, logprobs: Sequence[TokenLogprob], reason: FinishReason | None
    ) -> Document:
        """What is new of it; the first one names the role."""
        delta = {"content": text} if self._is_begun else {"role": "assistant", "content": text}
        self._is_begun = True
        return self._choice("delta", delta, logprobs, reason)

    def _choice(
        self,
        field: str,
        content: Mapping[str, Any],
        logprobs: Sequence[TokenLogprob],
        reason: FinishReason | None,
    ) -> Document:
        entries = [
            {**self._token(entry.token_id, entry.logprob), "top_logprobs": self._top(entry)}
            for entry in logprobs
        ]
        return {
            "index": self._index,
            field: content,
            "logprobs": {"content": entries} if self._wants_logprobs else None,
            "finish_reason": reason,
        }

    def _top(self, entry: TokenLogprob) -> list[Document]:
        return [self._token(token, logprob) for token, logprob in entry.top]

    def _token(self, token_id: int, logprob: float) -> Document:
        # A token may hold part of a character: `bytes` is exact, `token` is for reading.
        return {
            "token": _shown(self._spelling, token_id),
            "logprob": logprob,
            "bytes": list(self._spelling.token_bytes(token_id)),
        }


def usage(timings: Sequence[StreamTiming], num_choices: int) -> Document:
    """Token counts of a response whose choices come `num_choices` to a prompt."""
    prompt = sum(timing.num_prompt for timing in timings[::num_choices])
    cached = sum(timing.num_reused for timing in timings[::num_choices])
    completion = sum(timing.num_output for timing in timings)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def event(document: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def _shown(spelling: Spelling, token_id: int) -> str:
    return spelling.token_bytes(token_id).decode("utf-8", "replace")
