"""A client's way into a cluster: the token, and a look at the cluster before Ray's own attempt.

`ray.init` retries for twenty seconds with a wrong token and for two minutes where something else
listens. `look` asks the GCS, the cluster's directory service, by gRPC calls and knows at once.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]  # grpcio ships no types
import ray._private.ray_constants as ray_constants
from ray._raylet import AuthenticationTokenLoader, Config
from ray.core.generated import gcs_service_pb2 as gcs

from eagleray.platform.cluster.dashboard import read_token
from eagleray.platform.cluster.head import TRAIN_VARIABLES
from eagleray.platform.cluster.ports import HOST, is_listening
from eagleray.platform.cluster.versions import Versions
from eagleray.platform.errors import AuthenticationError, ServiceError, UsageError

_KV_GET = "/ray.rpc.InternalKVGcsService/InternalKVGet"
_USUAL_TOKEN = Path("~/.ray/auth_token")
_TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@dataclass(frozen=True)
class Access:
    """A token and the variables by which Ray's own code finds the same token."""

    token: str | None
    variables: Mapping[str, str]

    @classmethod
    def from_file(cls, path: Path) -> "Access":
        """The token in a file.

        Raises:
            AuthenticationError: It cannot be read.
        """
        return cls(read_token(path), {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)})

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Access":
        """The token where Ray looks for it: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, the home folder.

        None of them: the cluster is taken to be open; it refuses us if it is not.
        """
        if token := environment.get("RAY_AUTH_TOKEN"):
            return cls(token, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token})
        if path := environment.get("RAY_AUTH_TOKEN_PATH"):
            return cls.from_file(Path(path))
        usual = _USUAL_TOKEN.expanduser()
        return cls.from_file(usual) if usual.exists() else cls(None, {})


@dataclass(frozen=True)
class Sight:
    """What a cluster says of itself."""

    versions: Versions
    dashboard_url: str | None


def look(address: str, token: str | None, timeout_s: float) -> Sight:
    """Ask a cluster who it is.

    Args:
        address: `host:port` of its GCS.
        token: What to present.
        timeout_s: Longest wait for one answer.

    Raises:
        UsageError: The address is not of that form.
        ServiceError: Nothing listens there, or not a Ray cluster.
        AuthenticationError: The token is missing or wrong.
    """
    host, port = split_address(address)
    if not is_listening(host, port, timeout_s):
        raise ServiceError(
            f"nothing listens at {address}, where a Ray cluster should be",
            "start it, or correct cluster.address; `eagleray up` starts one on this machine",
        )
    # No proxy from the environment: it must not see the token.
    options = [("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(f"{host}:{port}", options) as channel:
        metadata = json.loads(_value(channel, address, b"CLUSTER_METADATA", b"cluster", token, timeout_s) or "{}")
        url = _value(channel, address, b"webui:url", b"dashboard", token, timeout_s)
    versions = Versions(metadata.get("ray_version", ""), metadata.get("python_version", ""), "")
    return Sight(versions, f"http://{url.decode()}" if url else None)


def split_address(address: str) -> tuple[str, int]:
    """The two parts of `host:port`.

    Raises:
        UsageError: It is of another form, for example a URL.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or "/" in host or not port.isdigit():
        raise UsageError(
            f"cluster address {address!r} is not of the form host:port",
            "give the address of the head's GCS, by default port 6379; ray:// and http:// are not it",
        )
    return host.strip("[]"), int(port)


@contextlib.contextmanager
def driver_settings(access: Access, address: str) -> Iterator[None]:
    """Make `ray.init` of this process use an access, and undo that afterwards.

    Ray reads its token once per process, so its cache is dropped whenever the token changes.
    """
    changed = {**TRAIN_VARIABLES, **dict.fromkeys(_TOKEN_VARIABLES, ""), **access.variables}
    before = {name: os.environ.get(name) for name in changed}
    one_machine = split_address(address)[0] == HOST
    # See LOOPBACK_VARIABLES: the driver would look for a loopback cluster at the outer address.
    clusters_allowed = ray_constants.ENABLE_RAY_CLUSTER
    try:
        _set_variables(changed)
        ray_constants.ENABLE_RAY_CLUSTER = clusters_allowed and not one_machine
        _reload_token()
        yield
    finally:
        _set_variables(before)
        ray_constants.ENABLE_RAY_CLUSTER = clusters_allowed
        _reload_token()


def _value(
    channel: Any, address: str, key: bytes, namespace: bytes, token: str | None, timeout_s: float
) -> bytes:
    ask = channel.unary_unary(
        _KV_GET,
        request_serializer=gcs.InternalKVGetRequest.SerializeToString,
        response_deserializer=gcs.InternalKVGetReply.FromString,
    )
    request = gcs.InternalKVGetRequest(key=key, namespace=namespace)
    metadata = [("authorization", f"Bearer {token}")] if token else []
    try:
        value: bytes = ask(request, timeout=timeout_s, metadata=metadata).value
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise AuthenticationError(
                f"the Ray cluster at {address} refused the token"
                if token
                else f"the Ray cluster at {address} wants a token and none was found",
                "set RAY_AUTH_TOKEN_PATH to its token's file: see docs/operations.md#tokens",
            ) from None
        raise ServiceError(
            f"what listens at {address} does not answer as a Ray cluster: {error.code().name}",
            "correct cluster.address; it is the port of the GCS, not of the dashboard",
        ) from error
    return value


def _set_variables(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)


def _reload_token() -> None:
    # In this order: a thread of the last session that still ends must not look for a token in
    # token mode after its file is gone; Ray aborts the process then.
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
