"""The HTTP client of a cluster: the token travels, every failure has its type."""

from collections.abc import Callable

import httpx
import pytest

from eagleray.platform.cluster.dashboard import Dashboard
from eagleray.platform.errors import (
    AuthenticationError,
    DeadlineExceededError,
    EagleRayError,
    NotFoundError,
    ServiceError,
)


def dashboard(answer: Callable[[httpx.Request], httpx.Response]) -> Dashboard:
    return Dashboard("http://127.0.0.1:1/", "secret", transport=httpx.MockTransport(answer))


def test_the_token_is_presented_and_json_is_decoded() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"token": request.headers["authorization"]})

    assert dashboard(answer).call("GET", "/x") == {"token": "Bearer secret"}


def test_an_answer_that_is_not_json_comes_as_text() -> None:
    assert dashboard(lambda _: httpx.Response(200, text="done")).call("PUT", "/x") == "done"


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (401, AuthenticationError),
        (403, AuthenticationError),
        (404, NotFoundError),
        (400, ServiceError),
        (500, ServiceError),
    ],
)
def test_a_refusal_has_its_type_and_never_shows_the_token(
    status: int, expected: type[EagleRayError]
) -> None:
    with pytest.raises(expected) as refused:
        dashboard(lambda _: httpx.Response(status, text="why")).call("GET", "/x")
    assert "secret" not in str(refused.value)


def test_silence_ends_at_the_deadline() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("slow", request=request)

    with pytest.raises(DeadlineExceededError, match="no answer in 20 s"):
        dashboard(answer).call("GET", "/x")


def test_nobody_there_names_the_address() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(ServiceError, match=r"no Ray dashboard answers at http://127\.0\.0\.1:1"):
        dashboard(answer).call("GET", "/x")


def test_only_living_nodes_are_told() -> None:
    nodes = [{"node_id": "a", "state": "ALIVE"}, {"node_id": "b", "state": "DEAD"}]

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"data": {"result": {"result": nodes}}})

    assert [node["node_id"] for node in dashboard(answer).nodes()] == ["a"]


@pytest.mark.parametrize(
    ("report", "usage"),
    [
        (None, {}),
        ({"loadMetricsReport": {"usage": {"CPU": [1.0, 2.0]}}}, {"CPU": (1.0, 2.0)}),
    ],
)
def test_usage_is_empty_until_it_is_reported(
    report: dict[str, object] | None, usage: dict[str, tuple[float, float]]
) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"data": {"clusterStatus": report}})

    assert dashboard(answer).usage() == usage
