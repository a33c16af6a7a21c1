"""From sampled tokens to text that may be sent: whole characters, and nothing of a stop string.

Laws:
    * The pieces joined are the decoded output, up to the stop string if one was met; characters
      that the output only began (a token limit in the middle of an emoji) are left out.
    * A piece, once given, is never taken back, and what is given does not depend on how the text
      fell into tokens.
    * Of several stop strings the one that is complete first counts, the longest of those.
    * Nothing is held back that can no longer become a stop string.
"""

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from eagleray.serve.engine.sampled_token import TokenLogprob


class TokenBytes(Protocol):
    """A vocabulary's spelling."""

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token adds to the text; a character may span several tokens."""
        ...


class IncrementalDecoder:
    """Tokens to whole characters, in time that does not grow with the output.

    Bytes that can no longer become a character are given as U+FFFD, as a decode of the whole would
    show them; up to three bytes that still can are held back.
    """

    def __init__(self, vocabulary: TokenBytes) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that are complete now and were not before."""
        return self._utf8.decode(self._vocabulary.token_bytes(token_id))

    @property
    def is_unfinished(self) -> bool:
        """The last character has only begun."""
        return bool(self._utf8.getstate()[0])


class StopMatcher:
    """Lets text through until a stop string is complete; holds back what may still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.is_met = False

    def push(self, text: str) -> str:
        """The text that may be sent now."""
        self._held += text
        end, start = min(
            ((at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0),
            default=(-1, -1),
        )
        if end >= 0:
            self.is_met = True
            given, self._held = self._held[:start], ""
            return given
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        given, self._held = self._held[:cut], self._held[cut:]
        return given

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        given, self._held = self._held, ""
        return given


@dataclass(frozen=True)
class OutputPiece:
    """Text that may be sent, with the log-probabilities of the tokens that it completes."""

    text: str
    logprobs: tuple[TokenLogprob, ...]


class OutputText:
    """The text of one completion as it grows, its log-probabilities in step with it."""

    def __init__(self, vocabulary: TokenBytes, stops: Sequence[str]) -> None:
        self._decoder = IncrementalDecoder(vocabulary)
        self._stops = StopMatcher(stops)
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()
        self._num_decoded = 0
        self._num_given = 0

    @property
    def is_stopped(self) -> bool:
        """A stop string is complete; nothing more may be pushed."""
        return self._stops.is_met

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> OutputPiece:
        """Add a token; what may be sent because of it."""
        decoded = self._decoder.push(token_id)
        self._num_decoded += len(decoded)
        if logprob is not None:
            # A token that only began a character waits for the whole of it.
            self._waiting.append((self._num_decoded + self._decoder.is_unfinished, logprob))
        return self._give(self._stops.push(decoded))

    def flush(self) -> OutputPiece:
        """What was held back, when the output ends without a stop string."""
        piece = self._give(self._stops.flush())
        rest = () if self.is_stopped else tuple(logprob for _, logprob in self._waiting)
        self._waiting.clear()
        return OutputPiece(piece.text, piece.logprobs + rest)

    def _give(self, text: str) -> OutputPiece:
        self._num_given += len(text)
        logprobs = []
        while self._waiting and self._waiting[0][0] <= self._num_given:
            logprobs.append(self._waiting.popleft()[1])
        return OutputPiece(text, tuple(logprobs))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
