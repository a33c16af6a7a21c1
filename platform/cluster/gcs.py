"""A look at a cluster before Ray's own attempt to attach.

`ray.init` retries for twenty seconds with a wrong token and for two minutes where something else
listens. `look` asks the GCS, the cluster's directory service, by gRPC calls and knows at once.
"""

import json
from dataclasses import dataclass
from typing import Any

import grpc  # type: ignore[import-untyped]  # grpcio ships no types
from ray.core.generated import gcs_service_pb2 as gcs

from eagleray.platform.cluster.ports import is_listening
from eagleray.platform.cluster.versions import Versions
from eagleray.platform.errors import AuthenticationError, ServiceError, UsageError

# Generated code, without types.
_Request, _Reply = gcs.InternalKVGetRequest, gcs.InternalKVGetReply  # type: ignore[attr-defined]
_KV_GET = "/ray.rpc.InternalKVGcsService/InternalKVGet"
_Nodes, _NodesReply = gcs.GetAllNodeInfoRequest, gcs.GetAllNodeInfoReply  # type: ignore[attr-defined]
_GET_NODES = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"


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
    with _channel(host, port) as channel:
        metadata = json.loads(
            _value(channel, address, b"CLUSTER_METADATA", b"cluster", token, timeout_s) or "{}"
        )
        url = _value(channel, address, b"webui:url", b"dashboard", token, timeout_s)
    versions = Versions(metadata.get("ray_version", ""), metadata.get("python_version", ""), "")
    return Sight(versions, f"http://{url.decode()}" if url else None)


def has_node(address: str, token: str, timeout_s: float) -> bool:
    """Whether a cluster answers and has a node that is alive."""
    host, port = split_address(address)
    with _channel(host, port) as channel:
        ask = channel.unary_unary(
            _GET_NODES,
            request_serializer=_Nodes.SerializeToString,
            response_deserializer=_NodesReply.FromString,
        )
        try:
            reply = ask(_Nodes(), timeout=timeout_s, metadata=_metadata(token))
        except grpc.RpcError:
            return False
    return any(node.state == node.ALIVE for node in reply.node_info_list)


def split_address(address: str) -> tuple[str, int]:
    """The two parts of `host:port`.

    Raises:
        UsageError: It is of another form, for example a URL.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or "/" in host or not port.isdigit():
        raise UsageError(
            f"cluster address {address!r} is not of the form host:port",
            "give the address of the head's GCS, by default port 6379; it is not a URL",
        )
    return host.strip("[]"), int(port)


def _channel(host: str, port: int) -> Any:
    # No proxy from the environment: it must not see the token.
    return grpc.insecure_channel(f"{host}:{port}", [("grpc.enable_http_proxy", 0)])


def _metadata(token: str | None) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")] if token else []


def _value(
    channel: Any, address: str, key: bytes, namespace: bytes, token: str | None, timeout_s: float
) -> bytes:
    ask = channel.unary_unary(
        _KV_GET,
        request_serializer=_Request.SerializeToString,
        response_deserializer=_Reply.FromString,
    )
    request = _Request(key=key, namespace=namespace)
    try:
        value: bytes = ask(request, timeout=timeout_s, metadata=_metadata(token)).value
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
