"""Ends of processes are told apart, and counted with a limit of their own."""

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError, RayActorError

from eagleray.actors.trainer.failures import (
    FailureCount,
    Kind,
    Limits,
    is_killed_for_memory,
    kind_of_death,
)
from eagleray.platform.config import ProjectConfig, with_overrides


def test_each_kind_has_a_limit_of_its_own_and_its_excess_names_both() -> None:
    count = FailureCount(Limits(max_failures=1, max_hangs=0, max_preemptions=None))
    assert count.add([Kind.FAILURE]) is None
    assert [count.add([Kind.PREEMPTION]) for _ in range(50)] == [None] * 50
    assert count.add([Kind.HANG]) == "1 hang, more than train.max_hangs = 0"
    count = FailureCount(Limits(1, 5, 1))
    count.add([Kind.FAILURE])
    assert count.add([Kind.HANG, Kind.HANG]) is None
    assert count.add([Kind.FAILURE]) == "2 failures, more than train.max_failures = 1"
    count = FailureCount(Limits(1, 1, 1))
    count.add([Kind.PREEMPTION])
    assert count.add([Kind.PREEMPTION]) == "2 preemptions, more than train.max_preemptions = 1"


def test_the_limits_are_those_of_the_configuration() -> None:
    changed = {"train.max_failures": 5, "train.max_hangs": 4, "train.max_preemptions": 2}
    train = with_overrides(ProjectConfig(name="t"), changed).train
    assert Limits.of(train) == Limits(5, 4, 2)
    assert Limits.of(ProjectConfig(name="t").train) == Limits(3, 3, None)


@pytest.mark.parametrize(
    ("error", "is_node_alive", "kind"),
    [
        (ActorDiedError(), True, Kind.FAILURE),
        (None, True, Kind.FAILURE),
        (ActorDiedError(), False, Kind.PREEMPTION),
        (RayActorError(preempted=True), True, Kind.PREEMPTION),
        (NodeDiedError("gone"), True, Kind.PREEMPTION),
        (RayActorError(error_msg="The actor died because its node has died. Node Id: 7"), True,
         Kind.PREEMPTION),
        (OutOfMemoryError("low"), True, Kind.FAILURE),
    ],
)  # fmt: skip
def test_what_ray_says_decides_the_kind(
    error: Exception | None, is_node_alive: bool, kind: Kind
) -> None:
    assert kind_of_death(error, is_node_alive=is_node_alive) is kind


def test_a_death_by_rays_memory_monitor_is_known() -> None:
    killed = "Task was killed due to the node running low on memory."
    assert is_killed_for_memory(OutOfMemoryError("anything"))
    assert is_killed_for_memory(RayActorError(error_msg=killed))
    assert not is_killed_for_memory(ActorDiedError())
    assert not is_killed_for_memory(None)
