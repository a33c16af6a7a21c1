"""The nodes of the cluster, as this process hears of them."""

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
import ray._private.state as ray_state
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_ANSWER_S = 1.0
_THREADS = 32


def alive_nodes() -> list[dict[str, Any]]:
    """Ray's description of each node that is alive."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]


def alive_ids() -> set[str]:
    """Of the nodes that are alive."""
    return {node["NodeID"] for node in alive_nodes()}


def answering_ids() -> set[str]:
    """Of the nodes whose raylet takes a connection; the head needs seconds to miss one."""
    nodes = alive_nodes()

    def answers(node: dict[str, Any]) -> bool:
        address = node["NodeManagerAddress"], node["NodeManagerPort"]
        try:
            socket.create_connection(address, _ANSWER_S).close()
        except OSError:
            return False
        return True

    with ThreadPoolExecutor(_THREADS) as pool:
        return {
            n["NodeID"]
            for n, is_there in zip(nodes, pool.map(answers, nodes), strict=True)
            if is_there
        }


def draining_ids() -> set[str]:
    """Of the nodes that are about to be taken away."""
    return set(ray_state.state.get_draining_nodes())


def beside_this_process() -> NodeAffinitySchedulingStrategy:
    """Where an actor lives no less long than its creator; elsewhere only if there is no room."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
