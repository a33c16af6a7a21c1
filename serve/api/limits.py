"""Bounds on what a client may send before anything of it is understood."""

import asyncio
import json
from typing import Any, NoReturn

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from eagleray.serve.api.refusal import ApiError

MAX_HEADER_BYTES = 16 * 1024
MAX_PATH_BYTES = 2048
MAX_PROMPTS = 64
MAX_MESSAGES = 1024
_BODY_TIMEOUT_S = 30.0


def check_head(scope: Scope) -> None:
    """Bound the request line and the headers.

    Raises:
        ApiError: 414 or 431.
    """
    path = scope.get("raw_path") or scope["path"].encode("utf-8", "surrogateescape")
    if len(path) + len(scope.get("query_string", b"")) > MAX_PATH_BYTES:
        raise ApiError(414, f"the path is longer than {MAX_PATH_BYTES} bytes")
    size = sum(len(name) + len(value) for name, value in scope["headers"])
    if size > MAX_HEADER_BYTES:
        raise ApiError(431, f"the headers have {size} bytes; at most {MAX_HEADER_BYTES} are read")


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The JSON object that a request carries.

    Raises:
        ApiError: 400 not a JSON object, 408 too slow, 413 too large, 415 not JSON.
        ClientDisconnect: The client went away before its end.
    """
    _check_type(request.headers)
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {_BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise
    return _object(bytes(body))


def _object(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ApiError(400, "the body must be a JSON object")
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _check_type(headers: Headers) -> None:
    # A browser sends other types across sites without asking; JSON it has to ask for.
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, f"content-type is {kind or 'missing'}; send it as application/json"
        )  # fmt: skip


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
