"""When a run is given up: deaths are counted over the run, waits for a place in a row."""

import pytest

pytest.importorskip("ray.train")

from ray.train import FailureConfig
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
)
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from eagleray.actors.trainer.controller_parts import Patience

DEATH = WorkerGroupError("a worker died", {0: RuntimeError("killed")})
DEATH_AT_START = ControllerError(WorkerGroupStartupFailedError("a worker died"))
NO_PLACE = ControllerError(WorkerGroupStartupTimeoutError(2))
BUG = ControllerError(ValueError("a bug"))


def decisions(*errors: Exception) -> str:
    policy = Patience(FailureConfig(max_failures=2), max_waits=3)
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
