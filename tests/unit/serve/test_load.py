"""What a load's clients see: of whole answers, refusals, and answers that break off."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from eagleray.serve.load import Arrivals, LoadResult, drive, quantiles

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint:
    """A server that answers as `handler` does, and counts how many are inside."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.inside = self.most_inside = 0
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        try:
            return await self._handler(request)
        finally:
            self.inside -= 1


async def streamed(request: web.Request, *documents: Any, pause_s: float = 0.0) -> web.Response:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for document in documents:
        text = document if isinstance(document, str) else json.dumps(document)
        await response.write(f"data: {text}\n\n".encode())
        await asyncio.sleep(pause_s)
    return response


def piece(text: str) -> dict[str, Any]:
    return {"choices": [{"text": text}]}


async def three_tokens(request: web.Request) -> web.StreamResponse:
    usage = {"choices": [], "usage": {"completion_tokens": 3}}
    return await streamed(request, piece("a"), piece("b"), usage, "[DONE]", pause_s=0.02)


def load(handler: Handler, count: int, arrivals: Arrivals, **options: Any) -> tuple[Any, Endpoint]:
    endpoint = Endpoint(handler)

    async def run() -> LoadResult:
        app = web.Application()
        app.router.add_post("/v1/completions", endpoint.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        bodies = [{"prompt": str(number)} for number in range(count)]
        try:
            url = f"http://127.0.0.1:{port}/v1/completions"
            return await drive(url, bodies, arrivals, **options)
        finally:
            await runner.cleanup()

    return asyncio.run(run()), endpoint


def test_a_closed_loop_keeps_as_many_inside_as_it_has_clients() -> None:
    seen = []
    result, endpoint = load(
        three_tokens, 12, Arrivals(concurrency=4), key="k", on_answer=seen.append
    )
    assert endpoint.most_inside == 4
    assert set(endpoint.keys) == {"Bearer k"}
    assert sorted(int(body["prompt"]) for body in endpoint.asked) == list(range(12))
    assert all(body["stream"] for body in endpoint.asked)
    assert seen == result.answers
    summary = result.summary()
    assert (summary["completed"], summary["output_tokens"], summary["errors"]) == (12, 36, {})
    for answer in result.answers:
        assert 0 < answer.ttft_s < answer.latency_s
        # Two gaps between three tokens, of which one was seen.
        assert answer.tpot_s == pytest.approx((answer.latency_s - answer.ttft_s) / 2)


def test_an_open_loop_asks_whether_or_not_it_was_answered() -> None:
    gate = asyncio.Event()
    inside = 0

    async def held(request: web.Request) -> web.StreamResponse:
        nonlocal inside
        inside += 1
        if inside == 10:
            gate.set()
        await gate.wait()
        return await three_tokens(request)

    result, endpoint = load(held, 10, Arrivals(rate=200.0))
    assert endpoint.most_inside == 10
    assert len(result.whole) == 10


async def refused(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "too many"}}, status=429)


async def cut(request: web.Request) -> web.StreamResponse:
    return await streamed(request, piece("a"))


async def failed(request: web.Request) -> web.StreamResponse:
    return await streamed(request, piece("a"), {"error": {"message": "step failed"}})


async def silent(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(5)
    return web.Response()


@pytest.mark.parametrize(
    ("handler", "status", "error"),
    [
        (refused, 429, "HTTP 429: too many"),
        (cut, 200, "the stream broke off"),
        (failed, 200, "step failed"),
        (silent, 0, "no whole answer in time"),
    ],
)
def test_what_is_no_whole_answer_is_counted_by_its_reason(
    handler: Handler, status: int, error: str
) -> None:
    result, _ = load(handler, 3, Arrivals(concurrency=1), timeout_s=0.5)
    assert {(answer.status, answer.error) for answer in result.answers} == {(status, error)}
    summary = result.summary()
    assert (summary["completed"], summary["errors"], summary["ttft_s"]) == (0, {error: 3}, None)


def test_an_endpoint_that_is_not_there_is_an_error_of_each_request() -> None:
    url = "http://127.0.0.1:9/v1/completions"
    result = asyncio.run(drive(url, [{}] * 2, Arrivals(concurrency=2)))
    assert [answer.status for answer in result.answers] == [0, 0]
    assert all("Connect" in answer.error for answer in result.answers)


@pytest.mark.parametrize(
    "given", [{}, {"concurrency": 1, "rate": 1.0}, {"concurrency": 0}, {"rate": -1.0}]
)
def test_arrivals_are_one_of_two(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="either a concurrency or a rate"):
        Arrivals(**given)


def test_quantiles_are_values_that_were_seen() -> None:
    assert quantiles([]) is None
    found = quantiles([3.0, 1.0, 2.0, 4.0])
    assert found == {"p50": 2.0, "p90": 4.0, "p95": 4.0, "p99": 4.0, "max": 4.0}
