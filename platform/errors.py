"""The exception tree and the exit code each branch answers with.

    EagleRayError                 1  something failed while it ran
    |- RunFailedError             1  a training run or a sweep ended badly
    |- UsageError                 2  the caller asked for something that cannot be
    |  `- ConfigError             2  eagleray.yaml or an override breaks rules (all are listed)
    |- DataError                  2  the data a user gave cannot be used as asked
    |- InfeasibleError            3  this machine or cluster cannot hold what was asked
    |- AuthenticationError        4  a key or token is missing or wrong
    |- GateRefusedError           5  an evaluation forbids the act
    |- StorageError               1  storage refused or lost something
    |  |- NotFoundError           2  no such record, run, model or file
    |  |- ConflictError           1  somebody else changed it first
    |  `- IntegrityError          1  the bytes are not those that were written
    `- ServiceError               1  a process or actor of ours did not answer as it should
       |- DeadlineExceededError   1  it did not answer in time
       `- PortInUseError          3  something else listens there

Every message has three parts: what happened; which value, against which rule; what to do next.
Arguments are positional and all go to `super().__init__`, so an error survives Ray's pickling.
"""


class EagleRayError(Exception):
    """Root of every failure that a user may meet.

    Args:
        what: What happened, with the value and the rule it breaks.
        fix: What to do next; shown on its own line. Empty when there is nothing to do.
    """

    exit_code = 1

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what, fix)
        self.what, self.fix = what, fix

    def __str__(self) -> str:
        return f"{self.what}\n  next: {self.fix}" if self.fix else self.what


class RunFailedError(EagleRayError):
    """A training run or a sweep ended without a result."""


class UsageError(EagleRayError):
    """The caller asked for something that cannot be."""

    exit_code = 2


class DataError(EagleRayError):
    """The data that was given cannot be used as asked."""

    exit_code = 2


class InfeasibleError(EagleRayError):
    """This machine or cluster cannot hold what was asked."""

    exit_code = 3


class AuthenticationError(EagleRayError):
    """A key or token is missing or wrong."""

    exit_code = 4


class GateRefusedError(EagleRayError):
    """An evaluation forbids the act."""

    exit_code = 5


class StorageError(EagleRayError):
    """Storage refused or lost something."""


class NotFoundError(StorageError):
    """No such record, run, model or file."""

    exit_code = 2


class ConflictError(StorageError):
    """Somebody else changed the same thing first."""


class IntegrityError(StorageError):
    """The bytes read are not the bytes that were written."""


class ServiceError(EagleRayError):
    """A process or actor of ours did not answer as it should."""


class DeadlineExceededError(ServiceError):
    """No answer came in time."""


class PortInUseError(ServiceError):
    """Something else already listens there."""

    exit_code = 3
