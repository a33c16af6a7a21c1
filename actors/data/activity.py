"""What each thread of this process is reading at the moment, for the message when it hangs."""

import threading
import time
from types import TracebackType

_now: dict[int, tuple[str, float]] = {}


class Reading:
    """While it is entered, its thread reads this.

    A class, not a generator: it stands on the path of every read.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        self._before = _now.get(threading.get_ident())
        _now[threading.get_ident()] = (self._what, time.monotonic())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is None:
            del _now[threading.get_ident()]
        else:
            _now[threading.get_ident()] = self._before


def longest() -> tuple[str, float] | None:
    """What has been read for longest, and for how many seconds; None: nothing is read."""
    readings = list(_now.values())
    if not readings:
        return None
    what, since = min(readings, key=lambda reading: reading[1])
    return what, time.monotonic() - since
