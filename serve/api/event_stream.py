"""Server-sent events as an ASGI response, and the watch for clients that go away."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class EventStream(Response):
    """Sends the events of an iterator as they come.

    A slow client holds back this response alone. `close` runs when the response ends, in whatever
    way; closing is what stops the work behind it.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        headers: Mapping[str, str],
        close: Callable[[], None],
    ) -> None:
        super().__init__(None, 200, {**headers, "cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything."""
        try:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._close()


class DisconnectWatch:
    """Calls back once if the client goes away before `stop`.

    The body must have been read to its end: the next message is then the disconnect.
    """

    def __init__(self, receive: Receive, on_gone: Callable[[], None]) -> None:
        self._receive, self._on_gone = receive, on_gone
        self._task = asyncio.create_task(self._watch())

    def stop(self) -> None:
        """Stop watching."""
        self._task.cancel()

    async def _watch(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while (await self._receive())["type"] != "http.disconnect":
                continue
            self._on_gone()
