"""When a run is given up: deaths are counted over the run, waits for a place in a row."""

import pytest

pytest.importorskip("ray.train")

from ray.exceptions import NodeDiedError, RayActorError
from ray.train import FailureConfig
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
)
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from eagleray.actors.trainer.controller_parts import Patience
from eagleray.actors.trainer.failures import Limits

DEATH = WorkerGroupError("a worker died", {0: RuntimeError("killed")})
DEATH_AT_START = ControllerError(WorkerGroupStartupFailedError("a worker died"))
NO_PLACE = ControllerError(WorkerGroupStartupTimeoutError(2))
BUG = ControllerError(ValueError("a bug"))
RECLAIMED = WorkerGroupError(
    "a node was reclaimed", {0: RuntimeError("a peer is gone"), 1: RayActorError(preempted=True)}
)
NODE_DIED = WorkerGroupError("a node died", {1: NodeDiedError("gone")})


def decisions(
    *errors: Exception, told: list[str] | None = None, max_preemptions: int | None = None
) -> str:
    policy = Patience(
        FailureConfig(max_failures=2),
        max_waits=3,
        limits=Limits(2, 0, max_preemptions),
        tell=[].append if told is None else told.append,
    )
    return "".join(
        "r" if policy.make_decision(error) is FailureDecision.RETRY else "X" for error in errors
    )


def test_deaths_are_forgiven_as_often_as_configured_also_at_the_start() -> None:
    assert decisions(DEATH, DEATH, DEATH) == "rrX"
    assert decisions(DEATH, DEATH_AT_START, DEATH) == "rrX"


def test_waiting_for_a_place_is_bounded_each_time_anew() -> None:
    assert decisions(NO_PLACE, NO_PLACE, NO_PLACE, NO_PLACE) == "rrrX"
    assert decisions(NO_PLACE, NO_PLACE, NO_PLACE, DEATH, NO_PLACE, NO_PLACE) == "rrrrrr"


def test_what_no_retry_can_mend_ends_the_run() -> None:
    assert decisions(BUG) == "X"


def test_lost_nodes_are_forgiven_without_end_unless_a_limit_is_set() -> None:
    assert decisions(*[RECLAIMED, NODE_DIED] * 10, DEATH, DEATH, DEATH) == "r" * 22 + "X"
    assert decisions(RECLAIMED, NODE_DIED, max_preemptions=1) == "rX"
    assert decisions(DEATH, RECLAIMED, DEATH, RECLAIMED, max_preemptions=1) == "rrrX"


def test_who_gives_up_says_which_limit_and_what_came_last() -> None:
    told: list[str] = []
    decisions(DEATH, RECLAIMED, DEATH, DEATH, told=told)
    assert told == [
        "3 failures, more than train.max_failures = 2; the last: the worker of rank 0: "
        "RuntimeError: killed"
    ]
    told.clear()
    decisions(BUG, told=told)
    assert told == []
