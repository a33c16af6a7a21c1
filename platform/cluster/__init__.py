"""Ray clusters: start one, find it again, attach to it, see what it has, stop it.

`session` and `ClusterInfo` are loaded when first asked for: they import Ray, and the verbs that
only ask a cluster over HTTP answer a second earlier without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from eagleray.platform.cluster.lifecycle import ClusterStatus, down, open_dashboard, status, up
from eagleray.platform.cluster.resources import (
    Demand,
    NodeResources,
    check_feasible,
    wait_for_resources,
)
from eagleray.platform.cluster.state import ClusterRecord, ClusterState
from eagleray.platform.cluster.versions import Versions, VersionSkewError

if TYPE_CHECKING:
    from eagleray.platform.cluster.attach import ClusterInfo, session

__all__ = [
    "ClusterInfo",
    "ClusterRecord",
    "ClusterState",
    "ClusterStatus",
    "Demand",
    "NodeResources",
    "VersionSkewError",
    "Versions",
    "check_feasible",
    "down",
    "open_dashboard",
    "session",
    "status",
    "up",
    "wait_for_resources",
]


def __getattr__(name: str) -> Any:
    if name in ("ClusterInfo", "session"):
        return getattr(importlib.import_module("eagleray.platform.cluster.attach"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
