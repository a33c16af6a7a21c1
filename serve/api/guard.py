"""What every request meets before any route: bounds, then the key. Deny by default.

A request is let through without a key only if its path is spelled, byte for byte, as one of the
open ones. Any other spelling needs a key first, so no trick with case, slashes, dots or encoding
can reach something that a route would then understand differently.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from eagleray.serve.api.keys import KeyStore
from eagleray.serve.api.limits import check_head
from eagleray.serve.api.refusal import ApiError, unauthorized

KEY = "eagleray_key"
"""Under which a request's state holds the key that it came with."""
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
_OPEN_METHODS = frozenset({"GET", "HEAD"})
_SCHEME = b"bearer "


class Guard:
    """ASGI middleware around the whole application.

    Args:
        app: What is guarded.
        keys: Who may pass; None lets everybody pass.
    """

    def __init__(self, app: ASGIApp, keys: KeyStore | None) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            check_head(scope)
            self._authenticate(scope)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _authenticate(self, scope: Scope) -> None:
        if self._keys is None or _is_open(scope):
            return
        presented = [value for name, value in scope["headers"] if name == b"authorization"]
        if not presented:
            raise unauthorized("no API key: send the header Authorization: Bearer er-...")
        if len(presented) > 1 or not presented[0].lower().startswith(_SCHEME):
            raise unauthorized("the Authorization header is not of the form Bearer er-...")
        secret = presented[0][len(_SCHEME) :].strip().decode("ascii", "replace")
        key = self._keys.verify(secret)
        if key is None:
            raise unauthorized("the API key is wrong or was revoked")
        scope["state"] = {**scope.get("state", {}), KEY: key}


def _is_open(scope: Scope) -> bool:
    path = scope["path"]
    raw_path = scope.get("raw_path") or path.encode()
    return (
        scope["method"] in _OPEN_METHODS
        and path in OPEN_PATHS
        and raw_path.partition(b"?")[0] == path.encode()
        and not scope.get("root_path")
    )
