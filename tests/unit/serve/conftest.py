"""A model of one line that still needs its KV cache right, and engines around it."""

import asyncio
import json
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
import torch

from eagleray.serve.api.openai import create_app
from eagleray.serve.api.served_model import ServedModel
from eagleray.serve.engine import (
    BlockPool,
    Chunk,
    Request,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
    StepPlan,
)
from eagleray.serve.engine.engine import Engine
from eagleray.serve.engine.limits import RequestLimits
from eagleray.serve.engine.model_runner import StepOutput

VOCAB_SIZE = 257
END = 256
JSON = {"content-type": "application/json"}


class ByteText:
    """Every byte is a token; 256 ends the text."""

    eos_ids = frozenset({END})

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def render_chat(self, messages: Sequence[Any]) -> list[int]:
        return self.encode("".join(f"{m['role']}:{m['content']}\n" for m in messages))

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id == END else bytes([token_id])


def next_token(context: Sequence[int]) -> int:
    """The fake model: a lower-case letter that depends on every token before it."""
    return 97 + zlib.crc32(bytes(token % 256 for token in context)) % 26


def repetitive_token(context: Sequence[int]) -> int:
    """As `next_token`, of a model that says a, b, c in turns most of the time."""
    drawn = next_token(context)
    return 97 + (context[-1] - 96) % 3 if drawn % 5 else drawn


def expected(
    prompt: Sequence[int], num_tokens: int, script: Callable[[Sequence[int]], int] = next_token
) -> list[int]:
    """What the fake model generates when it is alone."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(script(tokens))
    return tokens[len(prompt) :]


@dataclass
class CacheModel:
    """Reads its context out of KV slots by block table, so a wrong table gives wrong tokens.

    `gate` holds every step back while it is cleared, `entered` tells of the first; `script`
    replaces the next token; `failures` makes the next steps raise.
    """

    block_tokens: int
    gate: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    script: Callable[[Sequence[int]], int] = next_token
    failures: int = 0
    slots: dict[int, tuple[int, int]] = field(default_factory=dict)
    lengths: list[list[int]] = field(default_factory=list)

    def run(self, plan: StepPlan) -> StepOutput:
        self.entered.set()
        assert self.gate.wait(20), "the test left the gate closed"
        if self.failures:
            self.failures -= 1
            raise RuntimeError("scripted failure")
        self.lengths.append([chunk.length for chunk in plan.chunks])
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.start + chunk.length):
                token = chunk.tokens[position - chunk.start]
                self.slots[self._slot(chunk, position)] = (position, token)
        sampling = tuple(chunk for chunk in plan.chunks if chunk.samples)
        rows = [(chunk, ahead) for chunk in sampling for ahead in range(chunk.num_rows)]
        logits_NV = torch.zeros(len(rows), VOCAB_SIZE)
        for row, (chunk, ahead) in enumerate(rows):
            context = self._context(chunk)
            logits_NV[row, self.script(context[: len(context) - chunk.num_rows + 1 + ahead])] = 20.0
        return StepOutput(sampling, logits_NV)

    def _context(self, chunk: Chunk) -> list[int]:
        held = [self.slots[self._slot(chunk, p)] for p in range(chunk.start + chunk.length)]
        assert [position for position, _ in held] == list(range(len(held))), "KV slots mixed up"
        return [token for _, token in held]

    def _slot(self, chunk: Chunk, position: int) -> int:
        table, size = chunk.request.block_table, self.block_tokens
        return table[position // size] * size + position % size


@dataclass
class Rig:
    """An engine, its fake model and its clock."""

    engine: Engine
    model: CacheModel
    scheduler: Scheduler
    now: list[float]

    def await_requests(self, count: int) -> None:
        """Wait until this many requests run or wait."""
        scheduler, work = self.scheduler, self.engine._work
        with work:
            assert work.wait_for(lambda: scheduler.num_running + scheduler.num_waiting >= count, 20)


@pytest.fixture(scope="session")
def text() -> ByteText:
    return ByteText()


@pytest.fixture(scope="session")
def oracle() -> Callable[[Sequence[int], int], list[int]]:
    return expected


@pytest.fixture(scope="session")
def cache_model() -> type[CacheModel]:
    return CacheModel


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    """Engines that run; all are shut down at the end."""
    rigs: list[Rig] = []

    def make(
        num_blocks: int = 64,
        block_tokens: int = 4,
        max_running: int = 8,
        max_queued: int = 8,
        step_tokens: int = 32,
        context_tokens: int = 128,
        open_gate: bool = True,
        timeout_s: float = 1000.0,
        keeps_prefixes: bool = False,
        guessed_tokens: int = 0,
    ) -> Rig:
        now = [0.0]
        model = CacheModel(block_tokens)
        if open_gate:
            model.gate.set()
        pool = BlockPool(num_blocks, block_tokens, keeps_prefixes=keeps_prefixes)
        bounds = SchedulerLimits(max_running, max_queued, step_tokens)
        scheduler = Scheduler(bounds, pool, guessed_tokens)
        limits = RequestLimits(VOCAB_SIZE, context_tokens, pool.capacity_tokens, 64)
        engine = Engine(model, scheduler, ByteText(), limits, timeout_s, clock=lambda: now[0])
        engine.start()
        rigs.append(Rig(engine, model, scheduler, now))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.model.gate.set()
        rig.engine.shutdown(10)


@pytest.fixture
def make_request() -> Callable[..., Request]:
    """Requests for a scheduler, numbered as they are made."""
    made: list[Request] = []

    def make(
        num_prompt: int = 4, max_tokens: int = 4, deadline_s: float = 1e9, **rules: Any
    ) -> Request:
        name = f"r{len(made)}"
        params = SamplingParams(**{"temperature": 0.0, **rules})
        prompt = [(7 * len(made) + 3 * i) % 256 for i in range(num_prompt)]
        made.append(Request(name, prompt, num_prompt, params, max_tokens, 0, deadline_s))
        return made[-1]

    return make


@dataclass
class Site:
    """An application, called in-process."""

    rig: Rig
    served: ServedModel
    app: Any
    headers: dict[str, str]

    def call(self, method: str, path: str, **content: Any) -> httpx.Response:
        return asyncio.run(self.acall(method, path, **content))

    async def acall(self, method: str, path: str, **content: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        headers = {**self.headers, **content.pop("headers", {})}
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, headers=headers, timeout=20, **content)

    def post(self, path: str, **body: Any) -> httpx.Response:
        content = json.dumps({"model": "tiny", **body})
        return self.call("POST", path, content=content, headers=JSON)


@pytest.fixture
def make_site(make_rig: Callable[..., Rig]) -> Callable[..., Site]:
    """Applications over a fake model; without a key store everybody may pass."""

    def make(keys: Any = None, headers: dict[str, str] | None = None, **options: Any) -> Site:
        timeout_s = options.get("timeout_s", 1000.0)
        rig = make_rig(**options)
        served = ServedModel(
            "tiny", 3, "d" * 64, 1_700_000_000.0, rig.engine, ByteText(), timeout_s, 10_000
        )
        return Site(rig, served, create_app(replace(served), keys), headers or {})

    return make
