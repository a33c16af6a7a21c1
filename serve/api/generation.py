"""One generating request under way: its streams, read to the end or chunk by chunk."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from eagleray.serve.api.refusal import ApiError, deadline_exceeded, displaced
from eagleray.serve.engine.request import FinishReason
from eagleray.serve.engine.sampled_token import TokenLogprob
from eagleray.serve.engine.stream import Delta, TokenStream

# The engine ends a request at its deadline; this much later it is taken for stuck.
_GRACE_S = 10.0


@dataclass(frozen=True)
class Finished:
    """One choice, complete."""

    text: str
    logprobs: tuple[TokenLogprob, ...]
    reason: FinishReason


class Generation:
    """The choices of one request.

    Made inside the event loop that reads it.

    Args:
        streams: One per choice.
        timeout_s: When they end at the latest.
    """

    def __init__(self, streams: Sequence[TokenStream], timeout_s: float) -> None:
        self.streams = streams
        self._timeout_s = timeout_s
        self._deadline_s = asyncio.get_running_loop().time() + timeout_s + _GRACE_S

    def close(self) -> None:
        """Stop whatever still runs; costs nothing after the end."""
        for stream in self.streams:
            stream.cancel()

    async def finish(self) -> list[Finished]:
        """Wait for every choice.

        Raises:
            ApiError: A choice failed or the time was up.
        """
        parts: list[list[Delta]] = [[] for _ in self.streams]
        async for index, delta in self.deltas():
            parts[index].append(delta)
        return [_joined(deltas) for deltas in parts]

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Pieces with the index of their choice, in the order in which they come.

        Raises:
            ApiError: A choice failed or the time was up; the others end with it.
        """
        # Tasks for every piece would cost a third of a small model's step.
        source = self._one() if len(self.streams) == 1 else self._several()
        async for index, delta in source:
            if delta.finish_reason is FinishReason.DEADLINE:
                raise deadline_exceeded(f"not finished within {self._timeout_s:g} s, the limit")
            if delta.finish_reason is FinishReason.DISPLACED:
                raise displaced()
            if delta.finish_reason is FinishReason.ERROR:
                message = f"generation failed: {delta.error}"
                raise ApiError(500, message, "server_error", code="generation_failed")
            yield index, delta

    async def _one(self) -> AsyncIterator[tuple[int, Delta]]:
        stream = self.streams[0]
        while True:
            try:
                async with asyncio.timeout_at(self._deadline_s):
                    delta = await anext(stream, None)
            except TimeoutError:
                raise self._stuck() from None
            if delta is None:
                return
            yield 0, delta

    async def _several(self) -> AsyncIterator[tuple[int, Delta]]:
        pending = {self._next(index): index for index in range(len(self.streams))}
        try:
            while pending:
                left_s = max(0.0, self._deadline_s - asyncio.get_running_loop().time())
                done, _ = await asyncio.wait(
                    pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    raise self._stuck()
                for task in sorted(done, key=pending.__getitem__):
                    index, delta = pending.pop(task), task.result()
                    if delta is not None:
                        pending[self._next(index)] = index
                        yield index, delta
        finally:
            for task in pending:
                task.cancel()

    def _next(self, index: int) -> "asyncio.Task[Delta | None]":
        return asyncio.ensure_future(_next_delta(self.streams[index]))

    def _stuck(self) -> ApiError:
        return deadline_exceeded(f"no answer within {self._timeout_s:g} s")


async def _next_delta(stream: TokenStream) -> Delta | None:
    return await anext(stream, None)


def _joined(deltas: Sequence[Delta]) -> Finished:
    last = deltas[-1].finish_reason or FinishReason.CANCELLED
    logprobs = tuple(entry for delta in deltas for entry in delta.logprobs)
    return Finished("".join(delta.text for delta in deltas), logprobs, last)
