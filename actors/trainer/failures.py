"""Why training processes and workers end, counted per kind, each with a limit of its own.

A *hang* is a process that was stopped or made no progress, and that we have killed. A *preemption*
is the loss of a node, or of what ran on one that is drained. Every other end is a *failure*.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError

from eagleray.platform.config import TrainConfig

_NODE_DEATH = "its node has died"  # Ray's words for an actor
_LOW_MEMORY = "running low on memory"


class Kind(Enum):
    """What is counted, by the setting that limits it."""

    FAILURE = "max_failures"
    HANG = "max_hangs"
    PREEMPTION = "max_preemptions"


@dataclass(frozen=True)
class Limits:
    """How many of each kind are forgiven; None: any number."""

    max_failures: int
    max_hangs: int
    max_preemptions: int | None

    @classmethod
    def of(cls, train: TrainConfig) -> "Limits":
        """Those of a configuration."""
        return cls(train.max_failures, train.max_hangs, train.max_preemptions)


class FailureCount:
    """Counts over a run.

    Args:
        limits: What is forgiven.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._counts: Counter[Kind] = Counter()

    def add(self, kinds: Iterable[Kind]) -> str | None:
        """Count what ended an attempt, each kind once; which limit is exceeded, if one is."""
        for kind in Kind:
            if kind in kinds:
                self._counts[kind] += 1
        return next((text for kind in Kind if (text := self._exceeded(kind))), None)

    def _exceeded(self, kind: Kind) -> str | None:
        limit, count = getattr(self._limits, kind.value), self._counts[kind]
        if limit is None or count <= limit:
            return None
        plural = "" if count == 1 else "s"
        return f"{count} {kind.name.lower()}{plural}, more than train.{kind.value} = {limit}"


def kind_of_death(error: BaseException | None, *, is_node_alive: bool) -> Kind:
    """Of the end of a process or worker that nobody of ours has killed.

    Args:
        error: What Ray says of it.
        is_node_alive: Whether its node is still there.
    """
    is_preempted = isinstance(error, RayActorError) and error.preempted
    is_of_node = isinstance(error, NodeDiedError) or _NODE_DEATH in str(error)
    if not is_node_alive or is_preempted or is_of_node:
        return Kind.PREEMPTION
    return Kind.FAILURE


def is_killed_for_memory(error: BaseException | None) -> bool:
    """Whether Ray's memory monitor has ended it, so that its node does not run out of memory."""
    return isinstance(error, OutOfMemoryError) or _LOW_MEMORY in str(error)
