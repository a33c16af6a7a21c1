"""Ctrl-C and SIGTERM at safe places only.

Python raises at whatever line runs when a signal comes. If that is a destructor, or a C function
that cannot fail, the exception is printed and dropped, and the program goes on as if nobody had
asked.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def interruption_deferred() -> Iterator[Callable[[], None]]:
    """Let the first interruption wait for a safe place; the second one is not kept waiting.

    In another thread than the main one, where no signal raises, it does nothing.

    Yields:
        To be called at safe places, often: it raises what waits.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before: dict[int, Any] = {}
    waiting: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        waiting.append(number)
        if len(waiting) > 1:
            before[number](number, frame)

    def raise_waiting() -> None:
        if waiting:
            before[waiting[-1]](waiting[-1], None)

    for each in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(each)
        if callable(handler):
            before[each] = handler
            signal.signal(each, remember)
    try:
        yield raise_waiting
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
