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

INTERRUPTING = (signal.SIGINT, signal.SIGTERM)
Before = Callable[[int, FrameType | None], object]


@contextlib.contextmanager
def interruptions_to(handle: Callable[[int, FrameType | None, Before], None]) -> Iterator[None]:
    """Let a function handle Ctrl-C and SIGTERM; it is also given what would have handled them.

    One that is ignored stays so. In another thread than the main one, where no signal raises, it
    does nothing.
    """
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {each: signal.getsignal(each) for each in INTERRUPTING}
        before = {each: handler for each, handler in before.items() if callable(handler)}
    for each in before:
        signal.signal(each, lambda number, frame: handle(number, frame, before[number]))
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextlib.contextmanager
def interruption_deferred() -> Iterator[Callable[[], None]]:
    """Let the first interruption wait for a safe place; the second one is not kept waiting.

    Yields:
        To be called at safe places, often: it raises what waits.
    """
    waiting: list[tuple[int, Before]] = []

    def remember(number: int, frame: FrameType | None, before: Before) -> None:
        waiting.append((number, before))
        if len(waiting) > 1:
            before(number, frame)

    def raise_waiting() -> None:
        if waiting:
            number, before = waiting[-1]
            before(number, None)

    with interruptions_to(remember):
        yield raise_waiting
