import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from eagleray.serve.engine import FinishReason, SamplingParams


class Client:
    """One HTTP client at the level of ASGI, that can go away."""

    def __init__(self, app: Any, **body: Any) -> None:
        self._app = app
        self._body = json.dumps({"model": "tiny", "temperature": 0, **body}).encode()
        self._gone = asyncio.Event()
        self._is_sent = False
        self.status = 0
        self.pieces: list[bytes] = []
        self.got_piece = asyncio.Event()

    async def ask(self) -> None:
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "POST",
            "http_version": "1.1", "scheme": "http", "path": "/v1/completions",
            "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
            "headers": [(b"content-type", b"application/json")], "client": ("test", 1),
            "server": ("test", 80), "state": {},
        }  # fmt: skip
        await self._app(scope, self._receive, self._send)

    def leave(self) -> None:
        self._gone.set()

    async def _receive(self) -> Any:
        if not self._is_sent:
            self._is_sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message.get("body"):
            self.pieces.append(message["body"])
            self.got_piece.set()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_queued", [False, True])
def test_work_stops_when_the_client_leaves_before_the_first_token(
    make_site: Callable[..., Any], stream: bool, is_queued: bool
) -> None:
    site = make_site(open_gate=False, max_running=1)
    if is_queued:
        site.rig.engine.submit([[1] * 9], SamplingParams(temperature=0, max_tokens=3))

    async def scenario() -> None:
        client = Client(site.app, prompt="hello", max_tokens=50, n=1, stream=stream)
        asking = asyncio.create_task(client.ask())
        await asyncio.to_thread(site.rig.model.entered.wait, 20)
        await asyncio.to_thread(site.rig.await_requests, 1 + is_queued)
        client.leave()
        await asyncio.wait_for(asking, 20)

    asyncio.run(scenario())
    # The step is still held at its gate: nothing but the leaving has freed the blocks.
    stats = site.rig.engine.stats()
    assert stats.finished == {FinishReason.CANCELLED: 1}
    assert stats.num_running + stats.num_waiting == is_queued
    assert stats.num_free_blocks == 64 - (3 if is_queued else 0)


@pytest.mark.parametrize("num_choices", [1, 3])
def test_work_stops_when_the_client_leaves_a_stream(
    make_site: Callable[..., Any], num_choices: int
) -> None:
    site = make_site()
    steps: list[int] = []

    def script(context: Any) -> int:
        steps.append(len(context))
        if len(context) > 6:
            # From here on a step waits until the client has left.
            site.rig.model.gate.clear()
        return 97

    site.rig.model.script = script

    async def scenario() -> Client:
        client = Client(site.app, prompt="abc", max_tokens=60, n=num_choices, stream=True)
        asking = asyncio.create_task(client.ask())
        await asyncio.wait_for(client.got_piece.wait(), 20)
        client.leave()
        await asyncio.wait_for(asking, 20)
        return client

    client = asyncio.run(scenario())
    assert client.status == 200
    stats = site.rig.engine.stats()
    assert stats.finished == {FinishReason.CANCELLED: num_choices}
    assert stats.num_free_blocks == 64
    assert stats.num_output_tokens < 60 * num_choices
    site.rig.engine.check_integrity()


def test_a_deadline_inside_a_stream_ends_it_with_an_error_event(
    make_site: Callable[..., Any],
) -> None:
    site = make_site(timeout_s=5.0)

    def script(context: Any) -> int:
        if len(context) == 4:
            site.rig.model.gate.clear()
        return 97

    site.rig.model.script = script

    async def scenario() -> Client:
        client = Client(site.app, prompt="abc", max_tokens=60, stream=True)
        asking = asyncio.create_task(client.ask())
        await asyncio.wait_for(client.got_piece.wait(), 20)
        site.rig.now[0] = 6.0
        site.rig.model.gate.set()
        await asyncio.wait_for(asking, 20)
        return client

    client = asyncio.run(scenario())
    assert b'"text":"a' in client.pieces[0]
    assert b'"code": "deadline_exceeded"' in client.pieces[-1].replace(b'":"', b'": "')
    assert b"[DONE]" not in b"".join(client.pieces)


def test_a_handler_that_is_cancelled_stops_its_work(make_site: Callable[..., Any]) -> None:
    # Ray Serve cancels the handler when its client goes.
    site = make_site(open_gate=False)

    async def scenario() -> None:
        asking = asyncio.create_task(Client(site.app, prompt="hello").ask())
        await asyncio.to_thread(site.rig.model.entered.wait, 20)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(scenario())
    assert site.rig.engine.stats().finished == {FinishReason.CANCELLED: 1}
