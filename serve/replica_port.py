"""The port that Ray Serve opens on each replica for the other replicas, kept on the node's address.

Ray binds it to every interface, whatever the cluster is bound to ("[::]:0" in `_on_initialized` of
ray/serve/_private/replica.py, 2.60). What it receives it unpickles; the cluster's token guards it,
and on a cluster that is on loopback nobody else should reach it at all.
"""

from typing import Any

import ray
from ray.serve._private import replica

_EVERY_INTERFACE = "[::]:0"


def keep_on_node() -> None:
    """Let this replica's port be bound to the node's own address; call it before it is opened."""
    host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    own = f"[{host}]:0" if ":" in host else f"{host}:0"
    module: Any = replica
    add = module.add_port_to_grpc_server

    def bound(server: object, address: str) -> int:
        port: int = add(server, own if address == _EVERY_INTERFACE else address)
        return port

    module.add_port_to_grpc_server = bound
