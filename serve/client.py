"""A small client of the chat endpoint: what `eagleray chat` speaks."""

import json
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from eagleray.platform.errors import (
    AuthenticationError,
    DeadlineExceededError,
    EagleRayError,
    ServiceError,
    UsageError,
)

_CONNECT_TIMEOUT_S = 5.0
_DATA = "data: "


class ChatClient:
    """Talks to one endpoint; a context manager.

    Args:
        url: The endpoint's base, without a path.
        key: The API key; None where none is required.
        timeout_s: Longest silence of the server.
        transport: Replaces the network in tests.
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        timeout_s: float,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S)
        # An environment's proxy is not on the way to an endpoint that the user names.
        self._http = httpx.Client(
            base_url=url, headers=headers, timeout=timeout, trust_env=False, transport=transport
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def model(self) -> str:
        """The name of the model that is served.

        Raises:
            ServiceError: Nothing answers there.
            AuthenticationError: The key is missing or wrong.
        """
        try:
            answer = self._http.get("/v1/models")
        except httpx.TransportError as error:
            raise self._failed(error) from error
        _check(answer, answer.text)
        name: str = answer.json()["data"][0]["id"]
        return name

    def chat(self, model: str, messages: Sequence[dict[str, str]], **fields: Any) -> Iterator[str]:
        """The answer as it comes; closing the iterator stops the server's work.

        Args:
            model: The model's name.
            messages: The conversation so far.
            fields: Further fields of the request.

        Raises:
            UsageError: The server refused the request; the message is its own.
            AuthenticationError: The key is missing or wrong.
            ServiceError: Nothing answers there, or it failed.
            DeadlineExceededError: It was silent for too long.
        """
        body = {"model": model, "messages": list(messages), "stream": True, **fields}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.is_error:
                    _check(answer, answer.read().decode("utf-8", "replace"))
                yield from _texts(answer.iter_lines())
        except httpx.TransportError as error:
            raise self._failed(error) from error

    def _failed(self, error: httpx.TransportError) -> EagleRayError:
        if isinstance(error, httpx.ReadTimeout):
            return DeadlineExceededError(f"{self.url} was silent for too long", "try again")
        return ServiceError(
            f"nothing answers at {self.url}: {error}", "start it with `eagleray serve`"
        )


def _texts(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith(_DATA) or line == f"{_DATA}[DONE]":
            continue
        document = json.loads(line.removeprefix(_DATA))
        if "error" in document:
            raise ServiceError(f"the answer broke off: {document['error']['message']}", "try again")
        for choice in document["choices"]:
            yield choice["delta"].get("content") or ""


def _check(answer: httpx.Response, text: str) -> None:
    if answer.is_success:
        return
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"HTTP status {answer.status_code}"
    if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise AuthenticationError(
            message, "pass --key, or make one with `eagleray keys create NAME`"
        )
    if answer.is_client_error and answer.status_code != httpx.codes.TOO_MANY_REQUESTS:
        raise UsageError(message)
    raise ServiceError(message, "try again")
