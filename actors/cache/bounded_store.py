"""A store that may hang, asked by a thread, so that nobody waits for it longer than a deadline.

A disk that hangs keeps whoever asks it in the kernel, where nothing reaches it. So a call that is
late is a miss, and its thread is left behind with the store that it holds:

    at once   nobody asks any more, for the breaker's pause (breaker.py)
    then      another thread opens the store anew and asks again
    in all    four threads may be left behind; while they are, nobody asks
    back      one that comes back after all is the one to ask again

The threads are daemons and are never waited for without a limit: neither `close` nor the end of the
process hangs with them.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from eagleray.actors.cache.breaker import Breaker
from eagleray.actors.cache.value_store import ValueStore

logger = logging.getLogger(__name__)

MAX_LEFT_BEHIND = 4
Job = Callable[[ValueStore], Any]


class BoundedStore:
    """A value store that answers in time, whatever the one behind it does.

    `late` are the calls that were not waited for, `left_behind` the threads that still hang in one.
    Not for several threads.

    Args:
        open_store: Opens the store, in the thread that will use it; called again for another one.
        timeout_s: The deadline of a call, and of opening the store.
        name: Of the threads.
        clock: Seconds that only grow.

    Raises:
        Exception: What `open_store` raises, if it does so in time.
    """

    def __init__(
        self,
        open_store: Callable[[], ValueStore],
        timeout_s: float,
        name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_store, self._timeout_s, self._name = open_store, timeout_s, name
        self._breaker = Breaker(clock, max_failures=1)
        self._left: list[_Holder] = []
        self._is_closed = False
        self.late = 0
        self._holder: _Holder | None = _Holder(open_store, name)
        opened = self._holder.opened
        if self._came(self._holder, opened) and (error := opened.exception()):
            self.close()
            raise error

    @property
    def left_behind(self) -> int:
        """Threads that still hang in a call that was late."""
        return sum(holder.is_busy for holder in self._left)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The payload under each key digest; None where there is none to be had in time."""
        found: list[bytes | None] | None = self._ask(lambda store: store.get_many(keys))
        return [None] * len(keys) if found is None else found

    def put_many(self, items: Sequence[tuple[bytes, bytes]]) -> int:
        """Store payloads where there is room; how many are known to be stored."""
        return self._ask(lambda store: store.put_many(items)) or 0

    def close(self) -> None:
        """Let go; threads that hang are left to end with the process. Repeatable."""
        self._is_closed = True
        for holder in self._left:
            holder.end()
        if self._holder:
            self._holder.end()
            self._holder.thread.join(self._timeout_s)
            self._holder = None

    def _ask(self, job: Job) -> Any:
        """What a call gives, None if it fails or is late."""
        holder = self._ready()
        if holder is None:
            return None
        answer = holder.ask(job)
        if not self._came(holder, answer):
            return None
        if error := answer.exception():
            logger.warning("a level of the cache failed thread=%s error=%r", self._name, error)
            holder.end()
            self._holder = None
            self._breaker.failed()
            return None
        self._breaker.succeeded()
        return answer.result()

    def _came(self, holder: "_Holder", answer: "Future[Any]") -> bool:
        """Wait for an answer; a thread that is late is left behind."""
        if wait([answer], self._timeout_s).done:
            return True
        self.late += 1
        if self.late == 1:
            logger.warning(
                "a level of the cache hangs, reading without it thread=%s timeout_s=%g",
                self._name, self._timeout_s,
            )  # fmt: skip
        self._left.append(holder)
        self._holder = None
        self._breaker.failed()
        return False

    def _ready(self) -> "_Holder | None":
        """Whom to ask; None while nobody is."""
        if self._is_closed or not self._breaker.allows():
            return None
        for holder in [each for each in self._left if not each.is_busy]:
            self._left.remove(holder)
            if self._holder is None:
                self._holder = holder
            else:
                holder.end()
        if self._holder is None and len(self._left) < MAX_LEFT_BEHIND:
            self._holder = _Holder(self._open_store, self._name)
        return self._holder


class _Holder:
    """A thread with a store of its own, for one call after the other."""

    def __init__(self, open_store: Callable[[], ValueStore], name: str) -> None:
        self._open_store = open_store
        self._jobs: queue.SimpleQueue[tuple[Job, Future[Any]] | None] = queue.SimpleQueue()
        self.opened: Future[ValueStore] = Future()
        self._last: Future[Any] = self.opened
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether the last call is still under way."""
        return not self._last.done()

    def ask(self, job: Job) -> "Future[Any]":
        """Begin a call."""
        self._last = Future()
        self._jobs.put((job, self._last))
        return self._last

    def end(self) -> None:
        """Close the store and end, once what is under way is over."""
        self._jobs.put(None)

    def _work(self) -> None:
        _settle(self.opened, self._open_store)
        while (entry := self._jobs.get()) is not None:
            job, answer = entry
            _settle(answer, partial(self._do, job))
        if self.opened.exception() is None:
            self.opened.result().close()

    def _do(self, job: Job) -> Any:
        return job(self.opened.result())


def _settle(future: "Future[Any]", function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except Exception as error:  # The thread must live; whoever waits meets the error.
        logger.debug("a call failed", exc_info=True)
        future.set_exception(error)
