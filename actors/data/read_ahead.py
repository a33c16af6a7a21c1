"""Steps read before they are asked for, by as many threads and as far ahead as pays.

It keeps no position: whoever asks for another step sends it there. What was read a little behind
the newest step that was asked for is kept, for callers that lag.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from eagleray.actors.data.activity import longest
from eagleray.actors.data.pace import Pace
from eagleray.platform.errors import DeadlineExceededError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Read = Callable[[int], tuple[T, int]]
"""Gives the value of a step, and its bytes."""
KEEP_BEHIND = 2
_END_S = 5.0


class ReadAhead(Generic[T]):
    """Values by step. Safe for several threads; close it.

    Args:
        read: Called by several threads at once.
        pace: How far, and by how many.
        end: The first step that must not be read ahead yet; None: there is none.
        timeout_s: How long `get` waits at most; None: without end, and what is cheap to read is
            read by whoever asks for it.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        read: Read[T],
        pace: Pace,
        end: Callable[[], int | None],
        timeout_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.lock = threading.RLock()
        # Apart: a thread that has nothing to do is not woken for what a caller waits for.
        self._came, self._work = threading.Condition(self.lock), threading.Condition(self.lock)
        self._read, self._pace, self._end = read, pace, end
        self._timeout_s, self._clock = timeout_s, clock
        self._done: dict[int, T] = {}
        self._failed: dict[int, Exception] = {}
        self._in_hand: set[int] = set()
        self._asked: Counter[int] = Counter()
        self._aim: int | None = None
        self._generation = 0
        self._given_at: float | None = None
        self._is_closed = False
        self._busy = 0
        self._threads: list[threading.Thread] = []

    @property
    def generation(self) -> int:
        """How often what was read has been forgotten."""
        return self._generation

    def get(self, step: int, read: Read[T], generation: int) -> tuple[T, bool]:
        """The value of a step, and whether it had been read before it was asked for.

        Args:
            step: Which.
            read: Reads it, if it is read by the caller.
            generation: In which `read` gives the right value.

        Raises:
            DeadlineExceededError: It did not come in time; names what was being read.
            Exception: What reading it raised.
        """
        started = self._clock()
        with self.lock:
            is_news = self._aim is None or step >= self._aim
            self._re_aim(step + 1)
            is_ready = step in self._done
            value = self._waited_for(step)
        if value is None:
            value = self._read_here(step, read, generation)
        ended = self._clock()
        with self.lock:
            if is_news and self._given_at is not None:
                self._pace.asked(started - self._given_at, ended - started, was_ready=is_ready)
            self._given_at = ended
        return value, is_ready

    def clear(self) -> None:
        """Forget what was read, and what is being read: it would be another value now."""
        with self.lock:
            self._done.clear()
            self._aim = None
            self._generation += 1

    def look(self) -> None:
        """Have a thread see whether there is something to read."""
        with self.lock:
            if self._pace.depth:
                self._work.notify()

    def close(self) -> None:
        """Stop the threads; one that hangs in a read is left to end with the process."""
        with self.lock:
            self._is_closed = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join(_END_S)

    def _waited_for(self, step: int) -> T | None:
        """A value that is there, or that another thread reads; None if the caller should."""
        waits_always = self._timeout_s is not None
        if waits_always:
            self._asked[step] += 1
            self._work.notify()
        try:
            deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
            while (value := self._done.get(step)) is None:
                if (error := self._failed.pop(step, None)) is not None:
                    raise error
                if not waits_always and step not in self._in_hand:
                    self._in_hand.add(step)
                    return None
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise self._too_late(step)
                self._came.wait(left_s)
            return value
        finally:
            if waits_always:
                self._asked[step] -= 1
                if not self._asked[step]:
                    del self._asked[step]
                    self._failed.pop(step, None)

    def _too_late(self, step: int) -> DeadlineExceededError:
        found = longest()
        where = "no read is under way"
        if found is not None:
            where = f"reading {found[0]} takes {found[1]:.1f} s by now"
        return DeadlineExceededError(
            f"the batch of step {step} did not come within {self._timeout_s:g} s: {where}",
            "see whether the storage that the dataset lies on answers",
        )

    def _read_here(self, step: int, read: Read[T], generation: int) -> T:
        try:
            value = self._timed(step, read)
        except BaseException:  # Also at Ctrl-C: whoever waits for this step would wait for ever.
            with self.lock:
                self._in_hand.discard(step)
                self._came.notify_all()
            raise
        self._finish(step, generation, value)
        return value

    def _timed(self, step: int, read: Read[T]) -> T:
        started = self._clock()
        value, num_bytes = read(step)
        took_s = self._clock() - started
        with self.lock:
            self._pace.read(took_s, num_bytes)
        return value

    def _finish(self, step: int, generation: int, value: T) -> None:
        with self.lock:
            self._in_hand.discard(step)
            if generation == self._generation:
                self._done[step] = value
                self._drop_far()
            self._came.notify_all()

    def _re_aim(self, step: int) -> None:
        """Read on from here, unless this is a caller that lags a little behind the others."""
        aim = self._aim
        if aim is None or step > aim or step < aim - KEEP_BEHIND:
            self._aim = step
            self._drop_far()
            self._staff()
            self.look()

    def _staff(self) -> None:
        wanted = min(self._pace.fetchers, self._pace.depth)
        if self._timeout_s is not None:
            wanted = max(1, wanted)
        for number in range(len(self._threads), wanted):
            name = f"read-ahead-{number}"
            thread = threading.Thread(target=self._fetch, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _drop_far(self) -> None:
        if len(self._done) <= KEEP_BEHIND + 1:
            return
        aim = self._aim or 0
        wanted = range(aim - 1 - KEEP_BEHIND, aim + self._pace.most)
        for step in [step for step in self._done if step not in wanted and step not in self._asked]:
            del self._done[step]

    def _next(self) -> int | None:
        """What to read now: what somebody waits for, then what will be asked for."""
        for step in self._asked:
            if not (step in self._done or step in self._in_hand or step in self._failed):
                return step
        if self._aim is None:
            return None
        last, end = self._aim + self._pace.depth, self._end()
        ahead = range(self._aim, last if end is None else min(last, end))
        return next((s for s in ahead if s not in self._done and s not in self._in_hand), None)

    def _has_work(self) -> bool:
        return self._busy < max(self._pace.fetchers, 1) and self._next() is not None

    def _fetch(self) -> None:
        while True:
            with self.lock:
                self._work.wait_for(lambda: self._is_closed or self._has_work())
                step = self._next()
                if self._is_closed or step is None:
                    return
                self._in_hand.add(step)
                self._busy += 1
                generation = self._generation
                if self._has_work():
                    self._work.notify()
            try:
                value = self._timed(step, self._read)
            except Exception as error:  # The thread must live; who asks for this step meets it.
                logger.debug("reading ahead failed step=%d", step, exc_info=True)
                with self.lock:
                    self._in_hand.discard(step)
                    self._aim = None
                    if step in self._asked:
                        self._failed[step] = error
                    self._came.notify_all()
            else:
                self._finish(step, generation, value)
            with self.lock:
                self._busy -= 1
