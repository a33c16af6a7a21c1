"""Ray clusters: start one, find it again, attach to it, see what it has, stop it."""

from eagleray.platform.cluster.lifecycle import ClusterStatus, down, open_dashboard, status, up
from eagleray.platform.cluster.resources import (
    Demand,
    NodeResources,
    check_feasible,
    wait_for_resources,
)
from eagleray.platform.cluster.session import ClusterInfo, session
from eagleray.platform.cluster.state import ClusterRecord, ClusterState
from eagleray.platform.cluster.versions import Versions, VersionSkewError

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
