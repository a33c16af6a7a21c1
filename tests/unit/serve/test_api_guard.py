import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from eagleray.platform.storage import Storage
from eagleray.serve.api.keys import KeyStore

OPEN = {"/healthz", "/readyz"}
SPELLINGS = [
    "/HEALTHZ", "/Healthz", "//healthz", "/healthz/", "/./healthz", "/x/../healthz", "/healthz/.",
    "/%68ealthz", "/healthz%00", "/healthz;x", "/healthz%2f", "/%2e%2e/healthz", "\\healthz",
    "/METRICS", "//metrics", "/metrics/", "/./metrics", "/healthz/../metrics", "/%6detrics",
    "/healthz/../v1/models", "/readyz/../v1/completions", "/healthz//../metrics",
    "/v1/Models", "/V1/models", "//v1/models", "/v1//models", "/v1/models/", "/v1/%6dodels",
    "/docs", "/redoc", "/openapi.json", "/", "", "*", "/admin", "/debug", "/-/healthz",
]  # fmt: skip


@pytest.fixture
def guarded(make_site: Callable[..., Any], tmp_path: Path) -> Any:
    keys = KeyStore(Storage(tmp_path))
    secret = keys.create("a")
    site = make_site(keys=keys)
    site.secret = secret
    return site


def send(app: Any, path: str, method: str = "GET", headers: Any = ()) -> int:
    """The status of a request whose path reaches the application byte for byte."""
    raw_path = path.encode()
    from urllib.parse import unquote

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
        "scheme": "http", "path": unquote(path), "raw_path": raw_path, "query_string": b"",
        "root_path": "", "headers": [(b"host", b"test"), *headers], "server": ("test", 80),
        "client": ("test", 1), "state": {},
    }  # fmt: skip
    statuses: list[int] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def reply(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    asyncio.run(app(scope, receive, reply))
    return statuses[0]


def test_every_route_but_the_open_ones_needs_a_key(guarded: Any) -> None:
    routes = [route for route in guarded.app.routes if isinstance(route, Route)]
    assert {route.path for route in routes} == {
        "/healthz", "/readyz", "/metrics", "/v1/models", "/v1/models/{name}", "/v1/completions",
        "/v1/chat/completions",
    }  # fmt: skip
    assert len(routes) == len(guarded.app.routes)
    for route in routes:
        for method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE"):
            status = send(guarded.app, route.path.replace("{name}", "tiny"), method)
            if route.path in OPEN and method in ("GET", "HEAD"):
                assert status in (200, 405)
            else:
                assert status == 401


@pytest.mark.parametrize("path", SPELLINGS)
def test_no_spelling_of_a_path_is_answered_without_a_key(guarded: Any, path: str) -> None:
    assert send(guarded.app, path) == 401
    assert send(guarded.app, path, "POST") == 401


@pytest.mark.parametrize("path", SPELLINGS)
def test_with_a_key_a_spelling_that_is_no_route_is_not_found(guarded: Any, path: str) -> None:
    headers = [(b"authorization", f"Bearer {guarded.secret}".encode())]
    # Percent-encoded letters are the same path to HTTP; past the key that opens nothing more.
    allowed = {200, 404} if "%6" in path else {404}
    assert send(guarded.app, path, headers=headers) in allowed


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Basic {0}", "{0}", "Bearer {0}x", "Bearer x{0}", "Bearer {0} {0}"],
)
def test_a_wrong_authorization_is_refused(guarded: Any, header: str) -> None:
    value = header.format(guarded.secret).encode()
    assert send(guarded.app, "/v1/models", headers=[(b"authorization", value)]) == 401


def test_a_right_key_passes_whatever_the_case_of_its_scheme(guarded: Any) -> None:
    for scheme in (b"Bearer ", b"bearer ", b"BEARER  "):
        header = (b"authorization", scheme + guarded.secret.encode())
        assert send(guarded.app, "/v1/models", headers=[header]) == 200


def test_two_authorization_headers_are_refused(guarded: Any) -> None:
    header = (b"authorization", f"Bearer {guarded.secret}".encode())
    assert send(guarded.app, "/v1/models", headers=[header, header]) == 401


def test_refusals_tell_how_to_authenticate(guarded: Any) -> None:
    response = guarded.call("GET", "/v1/models")
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"


def test_websockets_are_closed(guarded: Any) -> None:
    sent: list[Any] = []

    async def reply(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/healthz", "headers": []}
    asyncio.run(guarded.app(scope, None, reply))
    assert sent == [{"type": "websocket.close", "code": 1008}]
