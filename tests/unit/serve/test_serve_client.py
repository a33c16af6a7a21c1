import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from eagleray.platform.errors import (
    AuthenticationError,
    DeadlineExceededError,
    ServiceError,
    UsageError,
)
from eagleray.serve.client import ChatClient

SAY = [{"role": "user", "content": "hi"}]


def client(
    answer: Callable[[httpx.Request], httpx.Response], key: str | None = "er-k"
) -> ChatClient:
    return ChatClient("http://test", key, 5.0, httpx.MockTransport(answer))


def sse(*documents: Any) -> httpx.Response:
    lines = [f"data: {json.dumps(document)}\n\n" for document in documents]
    return httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n"]))


def chunk(text: str | None) -> Any:
    return {"choices": [{"delta": {"content": text} if text is not None else {}}]}


def refusal(status: int, message: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message}})


def test_an_answer_comes_piece_by_piece() -> None:
    asked: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((json.loads(request.content), request.headers["authorization"]))
        return sse(chunk("He"), chunk("llo"), chunk(None), {"choices": []})

    with client(answer) as chat:
        assert "".join(chat.chat("tiny", SAY, temperature=0)) == "Hello"
    body, authorization = asked[0]
    assert body == {"model": "tiny", "messages": SAY, "stream": True, "temperature": 0}
    assert authorization == "Bearer er-k"


def test_the_served_model_is_asked_for_its_name_without_a_key_if_there_is_none() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert "authorization" not in request.headers
        return httpx.Response(200, json={"data": [{"id": "tiny"}]})

    with client(answer, key=None) as chat:
        assert chat.model() == "tiny"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, AuthenticationError),
        (400, UsageError),
        (404, UsageError),
        (429, ServiceError),
        (503, ServiceError),
    ],
)
def test_refusals_are_errors_with_the_servers_words(status: int, kind: type[Exception]) -> None:
    with client(lambda _: refusal(status, "because")) as chat:
        with pytest.raises(kind, match="because"):
            list(chat.chat("tiny", SAY))
        with pytest.raises(kind, match="because"):
            chat.model()


def test_an_answer_that_is_not_ours_is_named_by_its_status() -> None:
    page = httpx.Response(502, text="<html>")
    with client(lambda _: page) as chat, pytest.raises(ServiceError, match="502"):
        chat.model()


def test_a_stream_that_breaks_off_is_an_error() -> None:
    broken = {"error": {"message": "deadline"}}
    with client(lambda _: sse(chunk("a"), broken)) as chat:
        pieces = chat.chat("tiny", SAY)
        assert next(pieces) == "a"
        with pytest.raises(ServiceError, match="deadline"):
            next(pieces)


def test_nothing_that_listens_and_silence_are_told_apart() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    def stay_silent(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("silent", request=request)

    with client(refuse) as chat, pytest.raises(ServiceError, match="nothing answers"):
        chat.model()
    with client(stay_silent) as chat, pytest.raises(DeadlineExceededError):
        list(chat.chat("tiny", SAY))
