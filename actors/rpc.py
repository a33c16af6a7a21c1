"""Calls to actors with a deadline, answered by a value or by an error of ours."""

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from eagleray.platform.errors import DeadlineExceededError, EagleRayError, ServiceError


def call(method: Any, *args: Any, timeout_s: float, what: str) -> Any:
    """Call an actor's method and wait for its value.

    A call that is given up is cancelled if the actor has not begun it.

    Args:
        method: A method of an actor handle, as in `handle.batch`.
        *args: Its arguments.
        timeout_s: How long to wait, from now.
        what: What is waited for, as the subject of an error's sentence.

    Raises:
        DeadlineExceededError: It took longer.
        ServiceError: The actor died, or failed with an error that is not ours.
        EagleRayError: What the method raised, with its own type.
    """
    return result(ask(method, *args, what=what), timeout_s=timeout_s, what=what)


def ask(method: Any, *args: Any, what: str) -> Any:
    """Call an actor's method and go on; `result` waits for its value.

    Raises:
        ServiceError: The actor is gone for good.
    """
    try:
        return method.remote(*args)
    except RayError as error:
        raise _mapped(error, what) from error


def result(reference: Any, *, timeout_s: float, what: str) -> Any:
    """The value of a call that was made before; raises as `call` does."""
    try:
        return ray.get(reference, timeout=timeout_s)
    except GetTimeoutError as error:
        ray.cancel(reference)
        raise DeadlineExceededError(
            f"{what} did not come within {timeout_s:g} s",
            "see whether its node is overloaded or gone: eagleray ps; or raise the timeout",
        ) from error
    except RayError as error:
        raise _mapped(error, what) from error


def _mapped(error: RayError, what: str) -> EagleRayError:
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, EagleRayError):
            return cause
        return ServiceError(f"{what} failed: {type(cause).__name__}: {cause}")
    if isinstance(error, RayActorError):
        return ServiceError(
            f"{what} did not come: its actor is gone ({type(error).__name__})",
            "see why it died: eagleray logs; then start again",
        )
    reason = next(iter(str(error).splitlines()), "")
    return ServiceError(f"{what} did not come: {type(error).__name__}: {reason}")
