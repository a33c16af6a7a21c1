"""Refusals in OpenAI's shape: {"error": {"message", "type", "param", "code"}} and a status."""

import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from eagleray.platform.errors import DeadlineExceededError, EagleRayError, UsageError
from eagleray.serve.engine.refusals import (
    EngineStoppedError,
    InvalidRequestError,
    QueueFullError,
)

_STOPPED_RETRY_S = 5
_DISPLACED_RETRY_S = 5


class ApiError(EagleRayError):
    """An answer other than success.

    Args:
        status: HTTP status.
        what: The message; shown to the client.
        kind: OpenAI's error type.
        param: The field at fault.
        code: A word for programs.
        headers: Extra response headers.
    """

    def __init__(
        self,
        status: int,
        what: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(what)
        self.args = (status, what, kind, param, code, headers)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.headers = dict(headers or {})

    @property
    def document(self) -> dict[str, Any]:
        """The JSON body."""
        return {
            "error": {
                "message": _encodable(self.what),
                "type": self.kind,
                "param": _encodable(self.param) if self.param else None,
                "code": self.code,
            }
        }  # fmt: skip

    def response(self) -> JSONResponse:
        """The HTTP answer."""
        return JSONResponse(self.document, self.status, self.headers)


def _encodable(text: str) -> str:
    # A client's text may hold lone surrogates, which no answer can carry.
    return text.encode("utf-8", "backslashreplace").decode()


def as_api_error(error: EagleRayError) -> ApiError:
    """The answer that an expected failure gets; what is not the client's fault stays unnamed."""
    message = f"{error.what}: {error.fix}" if error.fix else error.what
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return ApiError(400, message, param=error.param or None)
    if isinstance(error, UsageError):
        return ApiError(400, message)
    if isinstance(error, QueueFullError):
        wait_s = str(math.ceil(error.retry_after_s))
        return ApiError(
            429, message, "rate_limit_error", code="queue_full", headers={"Retry-After": wait_s}
        )
    if isinstance(error, DeadlineExceededError):
        return deadline_exceeded(message)
    if isinstance(error, EngineStoppedError):
        return ApiError(
            503,
            "the server is going away: retry",
            "server_error",
            code="engine_stopped",
            headers={"Retry-After": str(_STOPPED_RETRY_S)},
        )
    return ApiError(500, "the server failed: see its log", "server_error", code="internal_error")


def deadline_exceeded(message: str) -> ApiError:
    """The request's time was up."""
    return ApiError(504, message, "timeout_error", code="deadline_exceeded")


def displaced() -> ApiError:
    """The request waited, and its place went to somebody who had fewer."""
    return ApiError(
        429,
        "all places are taken and this key has most of them: retry later, or send fewer at once",
        "rate_limit_error",
        code="queue_full",
        headers={"Retry-After": str(_DISPLACED_RETRY_S)},
    )


def unauthorized(message: str) -> ApiError:
    """No key, or a wrong one."""
    return ApiError(
        401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
    )  # fmt: skip
