"""Answers of actors with a deadline, and their failures as ours.

`.remote(` and `ray.get(` stand in `actors/` alone; callers elsewhere hold typed clients.
"""

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from eagleray.platform.errors import DeadlineExceededError, EagleRayError, ServiceError

NAMESPACE = "eagleray"


def call(ref: Any, timeout_s: float, what: str) -> Any:
    """Wait for an actor's answer.

    Args:
        ref: What `.remote(...)` returned, or a list of such.
        timeout_s: Longest wait in seconds.
        what: The act in words, for the message: `hand out batch 17`.

    Raises:
        DeadlineExceededError: No answer in time.
        ServiceError: The actor is dead.
        EagleRayError: The actor raised it; it arrives with its own type.
    """
    try:
        return ray.get(list(ref) if isinstance(ref, Sequence) else ref, timeout=timeout_s)
    except GetTimeoutError as error:
        raise DeadlineExceededError(
            f"an actor did not {what} within {timeout_s:g} s",
            "look at the actor's log; raise the deadline if the machine is merely busy",
        ) from error
    except RayActorError as error:
        raise ServiceError(
            f"an actor died before it could {what}: {_first_line(error)}",
            "the run restarts what it can; see the run's events",
        ) from error
    except RayTaskError as error:
        if isinstance(error.cause, EagleRayError):
            raise error.cause from error
        raise


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
