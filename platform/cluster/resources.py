"""Can work be placed at all, and when: named reasons instead of a wait without end.

A demand is `count` equal bundles; a bundle must fit on one node whole. Amounts are Ray's logical
resources, so a node may offer more CPUs than it has.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eagleray.platform.errors import DeadlineExceededError, InfeasibleError

_POLL_S = 0.5
# Ray counts in ten-thousandths.
_UNIT = 1e-4


@dataclass(frozen=True)
class NodeResources:
    """CPUs and GPUs of one node, in all or free at the moment."""

    name: str
    cpus: float
    gpus: float


@dataclass(frozen=True)
class Demand:
    """`count` bundles of so many CPUs and GPUs each."""

    count: int
    cpus: float = 0.0
    gpus: float = 0.0
    what: str = "worker"
    """What one bundle is for."""

    def __str__(self) -> str:
        each = f"{self.count} {self.what}{'' if self.count == 1 else 's'} of "
        each += _amounts(self.cpus, self.gpus)
        if self.count == 1:
            return each
        return f"{each} each ({_amounts(self.count * self.cpus, self.count * self.gpus)} in all)"

    def fits(self, nodes: Sequence[NodeResources]) -> bool:
        """Whether all bundles find a place on these nodes at the same time."""
        return sum(self._room(node) for node in nodes) >= self.count

    def _room(self, node: NodeResources) -> int:
        wanted = [(node.cpus, self.cpus), (node.gpus, self.gpus)]
        rooms = [math.floor((has + _UNIT) / needs) for has, needs in wanted if needs > 0]
        return min(rooms, default=self.count)


def check_feasible(demand: Demand, nodes: Sequence[NodeResources]) -> None:
    """Refuse at once what can never be placed on these nodes, even when all of it is free.

    Raises:
        InfeasibleError: It says what was asked, what there is in all, and the largest node.
    """
    if demand.fits(nodes):
        return
    largest = max(nodes, key=lambda node: (node.gpus, node.cpus), default=None)
    on_one = f", at most {_amounts(largest.cpus, largest.gpus)} on one" if largest else ""
    raise InfeasibleError(
        f"{demand} can never be placed: the cluster has {_total(nodes)} on "
        f"{len(nodes)} node{'s' if len(nodes) != 1 else ''}{on_one}",
        "ask for fewer or smaller workers, add nodes, or let this machine offer more logical CPUs "
        "with cluster.num_cpus",
    )


def wait_for_resources(
    demand: Demand,
    free: Callable[[], Sequence[NodeResources]],
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until the demand fits into what is free.

    Raises:
        DeadlineExceededError: Others held the resources all the time; it says what is free.
    """
    deadline = clock() + timeout_s
    while True:
        nodes = free()
        if demand.fits(nodes):
            return
        if clock() >= deadline:
            raise DeadlineExceededError(
                f"{demand} found no place in {timeout_s:g} s: {_total(nodes)} free on "
                f"{len(nodes)} node{'s' if len(nodes) != 1 else ''}",
                "see what runs with `eagleray ps`; wait longer with cluster.place_timeout_s",
            )
        sleep(_POLL_S)


def _total(nodes: Sequence[NodeResources]) -> str:
    return _amounts(sum(node.cpus for node in nodes), sum(node.gpus for node in nodes))


def _amounts(cpus: float, gpus: float) -> str:
    parts = [f"{cpus:g} CPU"] if cpus or not gpus else []
    return " and ".join([*parts, *([f"{gpus:g} GPU"] if gpus else [])])
