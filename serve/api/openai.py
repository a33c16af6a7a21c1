"""The OpenAI-compatible HTTP API over one served model.

Open to everybody: GET /healthz, GET /readyz. With a key: GET /metrics, GET /v1/models,
GET /v1/models/{model}, POST /v1/completions, POST /v1/chat/completions. Nothing else exists.
Fields, headers and errors: docs/api.md.
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from eagleray.platform.errors import EagleRayError
from eagleray.serve.api.allowance import Allowances, Visit
from eagleray.serve.api.event_stream import DisconnectWatch, EventStream
from eagleray.serve.api.formats import DONE, Answer, ChatChoice, Document, TextChoice, event, usage
from eagleray.serve.api.generation import Generation
from eagleray.serve.api.guard import KEY, Guard
from eagleray.serve.api.keys import ApiKey, KeyStore
from eagleray.serve.api.limits import read_json
from eagleray.serve.api.metrics import ServeMetrics
from eagleray.serve.api.parsing import GenerationRequest, parse_chat, parse_completion
from eagleray.serve.api.refusal import ApiError, as_api_error
from eagleray.serve.api.served_model import ServedModel

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"^[A-Za-z0-9._-]{1,64}$")
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_DIGEST_HEADER = "x-model-digest"


def create_app(
    model: ServedModel, keys: KeyStore | None, *, sends_request_id: bool = True
) -> FastAPI:
    """The application for one model.

    Args:
        model: What is served.
        keys: Who may use it; None: everybody.
        sends_request_id: Answer with x-request-id; off where a proxy in front already does.
    """
    # No generated documentation pages: each would be one more route to guard.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    api = _Api(model, ServeMetrics(model.engine.stats), sends_request_id)
    routes: dict[str, tuple[str, Callable[..., Any]]] = {
        "/healthz": ("GET", api.health),
        "/readyz": ("GET", api.ready),
        "/metrics": ("GET", api.show_metrics),
        "/v1/models": ("GET", api.list_models),
        "/v1/models/{name}": ("GET", api.show_model),
        "/v1/completions": ("POST", api.complete),
        "/v1/chat/completions": ("POST", api.chat),
    }
    for path, (method, endpoint) in routes.items():
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    app.add_exception_handler(EagleRayError, api.refuse)
    app.add_exception_handler(HTTPException, api.refuse_route)
    app.add_exception_handler(Exception, api.refuse_unexpected)
    app.add_middleware(Guard, keys=keys)
    return app


class _Api:
    def __init__(self, model: ServedModel, metrics: ServeMetrics, sends_request_id: bool) -> None:
        self._model, self._metrics = model, metrics
        self._allowances = Allowances()
        self._sends_request_id = sends_request_id

    async def health(self) -> Response:
        """Whether the process serves at all."""
        is_healthy = self._model.engine.is_healthy
        status = "ok" if is_healthy else "engine stopped"
        return JSONResponse({"status": status}, 200 if is_healthy else 503)

    async def ready(self) -> Response:
        """Whether requests are answered, and by which model."""
        is_ready = self._model.engine.is_healthy
        return JSONResponse(
            {"status": "ready" if is_ready else "not ready"},
            200 if is_ready else 503,
            {_DIGEST_HEADER: self._model.digest},
        )

    async def show_metrics(self) -> Response:
        """Prometheus metrics."""
        return Response(self._metrics.text(), media_type=_METRICS_TYPE)

    async def list_models(self, request: Request) -> Response:
        """The one model, in a list."""
        return self._json(request, {"object": "list", "data": [self._described()]})

    async def show_model(self, request: Request, name: str) -> Response:
        """The model by name."""
        self._check_model(name)
        return self._json(request, self._described())

    async def complete(self, request: Request) -> Response:
        """Continue prompts."""
        body = await read_json(request, self._model.max_body_bytes)
        return await self._generate(request, parse_completion(body), TextChoice)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        body = await read_json(request, self._model.max_body_bytes)
        return await self._generate(request, parse_chat(body), ChatChoice)

    async def refuse(self, request: Request, error: Exception) -> Response:
        """Answer an expected failure."""
        refusal = as_api_error(error) if isinstance(error, EagleRayError) else _unexpected()
        if refusal.status == 500:
            logger.error("answered 500 route=%s", _route(request), exc_info=error)
        self._metrics.answered(_route(request), refusal.status)
        response = refusal.response()
        response.headers.update(self._headers(request))
        return response

    async def refuse_route(self, request: Request, error: Exception) -> Response:
        """Answer what no route takes."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        what = {404: "there is no such path here", 405: "this path takes another method"}
        return await self.refuse(request, ApiError(status, what.get(status, "refused")))

    async def refuse_unexpected(self, request: Request, error: Exception) -> Response:
        """Answer a defect of ours without showing it."""
        return await self.refuse(request, error)

    async def _generate(
        self, request: Request, asked: GenerationRequest, form: type[TextChoice | ChatChoice]
    ) -> Response:
        self._check_model(asked.model)
        key: ApiKey | None = request.scope.get("state", {}).get(KEY)
        visit = self._enter(key)
        try:
            return await self._admitted(request, asked, form, key.name if key else "", visit)
        except BaseException:  # cancellation too: whatever ends it, its place is free again
            visit.leave(0)
            raise

    def _enter(self, key: ApiKey | None) -> Visit:
        if key is None:
            return Visit(lambda _: None)
        return self._allowances.enter(key.name, key.limits.over(self._model.key_limits))

    async def _admitted(
        self,
        request: Request,
        asked: GenerationRequest,
        form: type[TextChoice | ChatChoice],
        owner: str,
        visit: Visit,
    ) -> Response:
        # Long texts take a while: in a thread, or every other stream would stutter.
        prompts = await asyncio.to_thread(self._tokens, asked)
        streams = self._model.engine.submit(prompts, asked.params, self._model.timeout_s, owner)
        generation = Generation(streams, self._model.timeout_s)
        watch = DisconnectWatch(request.receive, generation.close)

        def close() -> None:
            watch.stop()
            generation.close()
            timings = [stream.timing for stream in streams]
            counts = usage(timings, asked.params.n)
            visit.leave(counts["total_tokens"])
            self._metrics.used(owner, counts, sum(timing.compute_s for timing in timings))
            for timing in timings:
                self._metrics.generated(timing)

        wants_logprobs = asked.params.logprobs is not None
        choices = [form(i, wants_logprobs, self._model.text) for i in range(len(streams))]
        answer = Answer(
            form.prefix + uuid.uuid4().hex, int(time.time()), asked.model, self._model.digest
        )
        is_streaming = False
        try:
            if asked.stream:
                response = await self._stream(request, asked, generation, choices, answer, close)
                is_streaming = True
                return response
            return await self._whole(request, asked, generation, choices, answer)
        finally:
            if not is_streaming:
                close()

    async def _whole(
        self,
        request: Request,
        asked: GenerationRequest,
        generation: Generation,
        choices: Sequence[TextChoice | ChatChoice],
        answer: Answer,
    ) -> Response:
        finished = await generation.finish()
        timings = [stream.timing for stream in generation.streams]
        documents = [
            choice.whole(done.text, done.logprobs, done.reason)
            for choice, done in zip(choices, finished, strict=True)
        ]
        kind, counts = choices[0].whole_kind, usage(timings, asked.params.n)
        latencies = {
            "x-ttft-ms": f"{1000 * max(timing.ttft_s for timing in timings):.1f}",
            "x-queue-ms": f"{1000 * max(timing.queue_s for timing in timings):.1f}",
        }
        return self._json(request, answer.document(kind, documents, counts), latencies)

    async def _stream(
        self,
        request: Request,
        asked: GenerationRequest,
        generation: Generation,
        choices: Sequence[TextChoice | ChatChoice],
        answer: Answer,
        close: Callable[[], None],
    ) -> Response:
        deltas = generation.deltas()
        # Nothing is sent before the first token: until then a failure can still have its status.
        first = await anext(deltas)
        self._metrics.answered(_route(request), 200)

        async def events() -> AsyncIterator[bytes]:
            kind = choices[0].chunk_kind
            index, delta = first
            try:
                while True:
                    chunk = choices[index].chunk(delta.text, delta.logprobs, delta.finish_reason)
                    yield event(_without_usage(answer.document(kind, [chunk], None), asked))
                    index, delta = await anext(deltas)
            except StopAsyncIteration:
                pass
            except ApiError as error:
                yield event(error.document)
                return
            if asked.include_usage:
                timings = [stream.timing for stream in generation.streams]
                yield event(answer.document(kind, [], usage(timings, asked.params.n)))
            yield DONE

        return EventStream(events(), self._headers(request), close)

    def _tokens(self, asked: GenerationRequest) -> list[list[int]]:
        if asked.messages:
            return [self._model.text.render_chat(asked.messages)]
        return [
            self._model.text.encode(prompt) if isinstance(prompt, str) else prompt
            for prompt in asked.prompts
        ]

    def _check_model(self, name: str) -> None:
        if name not in self._model.names:
            raise ApiError(
                404,
                f"there is no model {name[:80]!r} here; this server has {self._model.names[1]}",
                param="model",
                code="model_not_found",
            )

    def _described(self) -> Document:
        limits = self._model.engine.limits
        return {
            "id": self._model.name,
            "object": "model",
            "created": int(self._model.created_s),
            "owned_by": "eagleray",
            "version": self._model.version,
            "digest": self._model.digest,
            "max_model_len": min(limits.context_tokens, limits.pool_tokens),
        }

    def _json(
        self, request: Request, document: Document, headers: Mapping[str, str] | None = None
    ) -> Response:
        self._metrics.answered(_route(request), 200)
        return JSONResponse(document, headers={**self._headers(request), **(headers or {})})

    def _headers(self, request: Request) -> dict[str, str]:
        headers = {_DIGEST_HEADER: self._model.digest}
        if self._sends_request_id:
            given = request.headers.get("x-request-id", "")
            headers["x-request-id"] = given if _REQUEST_ID.match(given) else uuid.uuid4().hex
        return headers


def _without_usage(document: Document, asked: GenerationRequest) -> Document:
    """A chunk as OpenAI sends it: `usage` is null if counts will come, and absent otherwise."""
    if not asked.include_usage:
        del document["usage"]
    return document


def _route(request: Request) -> str:
    """The route's template, so that a client cannot make new metric labels."""
    return getattr(request.scope.get("route"), "path", "none")


def _unexpected() -> ApiError:
    return ApiError(500, "the server failed: see its log", "server_error", code="internal_error")
