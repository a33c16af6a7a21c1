"""The way from the engine's thread to one reader of one completion.

Laws:
    * The engine never waits: what the reader has not taken yet is joined to one piece, whose size
      is bounded by the request's own `max_tokens`.
    * The last piece carries the finish reason; after it the stream is at its end.
    * One reader, either `async for` in an event loop or `read` in a thread.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from eagleray.platform.errors import DeadlineExceededError
from eagleray.serve.engine.request import FinishReason
from eagleray.serve.engine.sampled_token import TokenLogprob


@dataclass(frozen=True)
class Delta:
    """What is new since the last one.

    Attributes:
        text: Whole characters, free of stop strings.
        logprobs: Of the tokens that the text completes.
        finish_reason: Set in the last one.
        error: What went wrong, if the reason is ERROR.
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str = ""


@dataclass
class StreamTiming:
    """Clock readings of one completion's milestones, 0 until reached, and its token counts."""

    num_prompt: int
    submitted_s: float
    started_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0
    num_output: int = 0
    num_reused: int = 0
    """Tokens of the prompt that an earlier request had left."""
    compute_s: float = 0.0
    """Its part of the steps that it was in, by tokens."""

    @property
    def queue_s(self) -> float:
        """Seconds before the first step that computed some of it."""
        return max(0.0, self.started_s - self.submitted_s)

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return max(0.0, self.first_token_s - self.submitted_s)

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None if there was none."""
        if self.num_output < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.num_output - 1)


@dataclass(eq=False)
class TokenStream:
    """Output of one completion as it comes.

    Attributes:
        request_id: The completion's id in the engine.
        timing: Milestones; written by the engine.
        on_cancel: Ends the request.
    """

    request_id: str
    timing: StreamTiming
    on_cancel: Callable[[str], None]
    _condition: threading.Condition = field(default_factory=threading.Condition)
    _texts: list[str] = field(default_factory=list)
    _logprobs: list[TokenLogprob] = field(default_factory=list)
    _end: Delta | None = None
    _is_read: bool = False
    _wake: Callable[[], object] | None = None

    def cancel(self) -> None:
        """Stop the work on it; a finished stream stays as it is."""
        self.on_cancel(self.request_id)

    def put(self, delta: Delta) -> None:
        """Add what is new; called by the engine, never blocks."""
        with self._condition:
            self._texts.append(delta.text)
            self._logprobs += delta.logprobs
            if delta.finish_reason is not None:
                self._end = delta
            wake, self._wake = self._wake, None
            self._condition.notify_all()
        if wake is not None:
            # The reader's loop may be closed by now: then nobody is left to wake.
            with contextlib.suppress(RuntimeError):
                wake()

    def read(self, timeout_s: float) -> Delta | None:
        """Wait for the next piece in a thread; None at the end of the stream.

        Raises:
            DeadlineExceededError: Nothing came in time.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._condition:
            while not self._has_news:
                if not self._condition.wait(deadline_s - time.monotonic()):
                    raise DeadlineExceededError(
                        f"request {self.request_id} gave nothing within {timeout_s:g} s"
                    )
            return self._take()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while True:
            with self._condition:
                if self._has_news:
                    delta = self._take()
                    break
                waiter = self._new_waiter()
            await waiter
        if delta is None:
            raise StopAsyncIteration
        return delta

    @property
    def _has_news(self) -> bool:
        return bool(self._texts) or self._is_read or self._end is not None

    def _new_waiter(self) -> "asyncio.Future[None]":
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._wake = lambda: loop.call_soon_threadsafe(_resolve, waiter)
        return waiter

    def _take(self) -> Delta | None:
        if self._is_read:
            return None
        text, logprobs = "".join(self._texts), tuple(self._logprobs)
        self._texts, self._logprobs = [], []
        if self._end is None:
            return Delta(text, logprobs)
        self._is_read = True
        return Delta(text, logprobs, self._end.finish_reason, self._end.error)


def _resolve(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
