"""Why the engine refuses a request, whatever protocol it came by.

InvalidRequestError (UsageError)   it breaks a rule; `param` names the field
QueueFullError (ServiceError)      every place is taken; `retry_after_s` says when to come back
EngineStoppedError (ServiceError)  the engine is shutting down or has died
"""

from eagleray.platform.errors import ServiceError, UsageError


class InvalidRequestError(UsageError):
    """A request breaks a rule; it will never be accepted as it is.

    Args:
        what: The value and the rule it breaks.
        fix: What to send instead.
        param: The field at fault, as the client spells it; empty if it is no single one.
    """

    def __init__(self, what: str, fix: str = "", param: str = "") -> None:
        super().__init__(what, fix)
        # Rebuilt from its own arguments on the other side of a process border.
        self.args = (what, fix, param)
        self.param = param


class QueueFullError(ServiceError):
    """Every running and waiting place is taken.

    Args:
        num_requests: Requests in the engine now.
        limit: The most it holds.
        retry_after_s: Seconds after which a place is likely free.
    """

    def __init__(self, num_requests: int, limit: int, retry_after_s: float) -> None:
        super().__init__(
            f"{num_requests} requests are running or waiting; the limit is {limit}",
            f"retry after {retry_after_s:.0f} s, or raise serve.max_queued",
        )
        self.args = (num_requests, limit, retry_after_s)
        self.num_requests, self.limit, self.retry_after_s = num_requests, limit, retry_after_s


class EngineStoppedError(ServiceError):
    """The engine takes no more requests."""
