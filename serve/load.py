"""Load on an OpenAI-compatible endpoint, and what its clients see of it.

A closed loop has a fixed number of clients, each of which asks again as soon as it is answered; an
open one asks at random moments (a Poisson process), whether earlier answers have come or not.
Streams are read as they come, so the time to the first token (TTFT) and per output token (TPOT)
are the client's own.
"""

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

_DATA = b"data: "
_DONE = b"[DONE]"
_MAX_IN_FLIGHT = 2000
_CONNECT_S = 10.0


@dataclass(frozen=True)
class Arrivals:
    """When requests are sent: exactly one of the two.

    Attributes:
        concurrency: Clients of a closed loop.
        rate: Requests per second of an open one.
        seed: Of the random moments.

    Raises:
        ValueError: Both or none, or one that is not above 0.
    """

    concurrency: int | None = None
    rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        given = [value for value in (self.concurrency, self.rate) if value is not None]
        if len(given) != 1 or not 0 < given[0] < math.inf:
            raise ValueError("give either a concurrency or a rate, above 0")


@dataclass
class Answer:
    """One request as its client saw it; clock readings in seconds, 0 until reached.

    Attributes:
        status: HTTP status; 0 if none came.
        error: Why there is no whole answer; empty if there is.
        num_tokens: As the server counts them, else pieces of text.
    """

    sent_s: float
    status: int = 0
    error: str = ""
    first_s: float = 0.0
    finished_s: float = 0.0
    num_tokens: int = 0

    @property
    def is_whole(self) -> bool:
        """It came to its end."""
        return not self.error

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None if there was none."""
        if self.num_tokens < 2:
            return None
        return (self.finished_s - self.first_s) / (self.num_tokens - 1)

    @property
    def latency_s(self) -> float:
        """Seconds to the end."""
        return self.finished_s - self.sent_s


@dataclass
class LoadResult:
    """All answers, in the order in which they ended."""

    answers: list[Answer] = field(default_factory=list)
    begun_s: float = 0.0
    ended_s: float = 0.0

    @property
    def whole(self) -> list[Answer]:
        """Those that came to their end."""
        return [answer for answer in self.answers if answer.is_whole]

    def summary(self) -> dict[str, Any]:
        """Throughput, latencies in seconds and errors, as one JSON document."""
        whole, seconds = self.whole, max(1e-9, self.ended_s - self.begun_s)
        tokens = sum(answer.num_tokens for answer in whole)
        tpot = [answer.tpot_s for answer in whole if answer.tpot_s is not None]
        return {
            "requests": len(self.answers),
            "completed": len(whole),
            "seconds": seconds,
            "requests_per_s": len(whole) / seconds,
            "output_tokens": tokens,
            "output_tokens_per_s": tokens / seconds,
            "ttft_s": quantiles(answer.ttft_s for answer in whole),
            "tpot_s": quantiles(tpot),
            "latency_s": quantiles(answer.latency_s for answer in whole),
            "statuses": dict(sorted(Counter(str(a.status) for a in self.answers).items())),
            "errors": dict(Counter(a.error for a in self.answers if a.error).most_common(10)),
        }


def quantiles(values: Iterable[float]) -> dict[str, float] | None:
    """Median, 90th, 95th and 99th percentile and maximum; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    ranks = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {
        name: ordered[max(0, math.ceil(share * len(ordered)) - 1)]
        for name, share in ranks.items()
    }  # fmt: skip


async def drive(
    url: str,
    bodies: Sequence[dict[str, Any]],
    arrivals: Arrivals,
    *,
    key: str | None = None,
    timeout_s: float = 600.0,
    on_answer: Callable[[Answer], None] = lambda _: None,
) -> LoadResult:
    """Send all bodies, and read all answers to their ends.

    Args:
        url: Where they go, path included.
        bodies: Of the requests; `stream` and its usage are switched on.
        arrivals: When they are sent.
        key: The API key.
        timeout_s: Longest life of a request.
        on_answer: Told of each as it ends.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
    connector = aiohttp.TCPConnector(limit=0)
    result = LoadResult()
    async with aiohttp.ClientSession(
        headers=headers, timeout=timeout, connector=connector
    ) as session:

        async def ask(body: dict[str, Any]) -> None:
            answer = await _asked(session, url, body)
            result.answers.append(answer)
            on_answer(answer)

        result.begun_s = time.perf_counter()
        if arrivals.concurrency is not None:
            await _closed(ask, bodies, arrivals.concurrency)
        else:
            assert arrivals.rate is not None, "one of the two is given"
            await _open(ask, bodies, arrivals.rate, random.Random(arrivals.seed))
        result.ended_s = time.perf_counter()
    return result


async def _closed(ask: Any, bodies: Sequence[dict[str, Any]], clients: int) -> None:
    waiting = iter(bodies)

    async def client() -> None:
        for body in waiting:
            await ask(body)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(clients, len(bodies))):
            group.create_task(client())


async def _open(
    ask: Any, bodies: Sequence[dict[str, Any]], rate: float, draw: random.Random
) -> None:
    # A bound on what this process itself can hold: beyond it, it waits.
    places = asyncio.Semaphore(_MAX_IN_FLIGHT)
    loop = asyncio.get_running_loop()
    due_s = loop.time()

    async def placed(body: dict[str, Any]) -> None:
        try:
            await ask(body)
        finally:
            places.release()

    async with asyncio.TaskGroup() as group:
        for body in bodies:
            await places.acquire()
            group.create_task(placed(body))
            due_s += draw.expovariate(rate)
            await asyncio.sleep(max(0.0, due_s - loop.time()))


async def _asked(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    answer = Answer(time.perf_counter())
    try:
        async with session.post(url, json=streamed) as response:
            answer.status = response.status
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {_message(await response.read())}"
            else:
                await _read(response, answer)
    except TimeoutError:
        answer.error = "no whole answer in time"
    except aiohttp.ClientError as error:
        answer.error = f"{type(error).__name__}: {error}"[:200]
    answer.finished_s = answer.finished_s or time.perf_counter()
    return answer


async def _read(response: aiohttp.ClientResponse, answer: Answer) -> None:
    pieces = counted = 0
    is_done = False
    # To its very end, or the connection could not be used again.
    async for line in response.content:
        if not line.startswith(_DATA):
            continue
        data = line[len(_DATA) :].strip()
        if data == _DONE:
            is_done = True
            continue
        document = json.loads(data)
        if "error" in document:
            answer.error = str(document["error"].get("message", "error"))[:200]
            return
        if document.get("usage"):
            counted = int(document["usage"]["completion_tokens"])
        if document.get("choices"):
            now_s = time.perf_counter()
            answer.first_s = answer.first_s or now_s
            answer.finished_s = now_s
            pieces += 1
    if not is_done:
        answer.error = "the stream broke off"
    answer.num_tokens = counted or pieces


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
