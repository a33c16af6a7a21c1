"""Commands to several Redis servers at once, over one link each (redis_link.py).

Servers that say nothing are waited for together: any number of them costs the time-out once. One
that falls silent amid its replies is waited for alone, and that once: its link is closed then.
"""

import select
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from redis.exceptions import RedisError, TimeoutError

from eagleray.actors.cache.redis_link import Command, RedisLink


def exchange(
    calls: Sequence[tuple[RedisLink, Sequence[Command]]],
) -> list[list[Any] | Exception]:
    """What comes of commands to several servers: the replies of each, or why there are none.

    A refusal of one command stands in its place among the replies, as a ResponseError.

    Args:
        calls: A link, each one once, and what to send over it.
    """
    if len(calls) == 1:
        return [_alone(*calls[0])]
    under_way = [_Call(link, commands) for link, commands in calls]
    try:
        _open([each for each in under_way if not each.link.is_open])
        _talk([each for each in under_way if each.outcome is None])
    finally:
        # At an interrupt: replies under way would be taken for those of the next call.
        for each in under_way:
            if each.outcome is None:
                each.link.close()
    return [each.outcome for each in under_way if each.outcome is not None]


def _alone(link: RedisLink, commands: Sequence[Command]) -> list[Any] | Exception:
    try:
        return link.pipeline(commands)
    except (RedisError, OSError) as error:
        return error


class _Call:
    """What is under way with one server."""

    def __init__(self, link: RedisLink, commands: Sequence[Command]) -> None:
        self.link, self.commands = link, commands
        self.outcome: list[Any] | Exception | None = None
        self.descriptor = -1
        self._unsent = memoryview(b"")
        self._silent_since = 0.0

    def open(self) -> None:
        try:
            self.link.open()
        except (RedisError, OSError) as error:
            self.fail(error)

    def begin(self) -> None:
        try:
            self.descriptor, self._unsent = self.link.begin(self.commands)
        except (RedisError, OSError) as error:
            self.fail(error)
        self._silent_since = time.monotonic()

    @property
    def awaits(self) -> int:
        """What to wait for: room for what is not sent yet, then an answer."""
        return select.POLLOUT if self._unsent else select.POLLIN

    @property
    def deadline_s(self) -> float:
        return self._silent_since + self.link.timeout_s

    def go_on(self) -> None:
        """What was awaited is there."""
        try:
            if self._unsent:
                self._unsent = self.link.send_some(self._unsent)
            else:
                self.outcome = self.link.receive(len(self.commands))
        except (RedisError, OSError) as error:
            self.fail(error)
        self._silent_since = time.monotonic()

    def fail(self, error: Exception) -> None:
        self.link.close()
        self.outcome = error


def _open(closed: Sequence[_Call]) -> None:
    """Connect, to several servers by threads: one that takes no connection holds up no other."""
    if len(closed) == 1:
        closed[0].open()
    elif closed:
        with ThreadPoolExecutor(len(closed)) as threads:
            list(threads.map(_Call.open, closed))


def _talk(opened: Sequence[_Call]) -> None:
    for each in opened:
        each.begin()
    waiting = {each.descriptor: each for each in opened if each.outcome is None}
    poll = select.poll()
    for each in waiting.values():
        poll.register(each.descriptor, each.awaits)
    while waiting:
        next_deadline_s = min(each.deadline_s for each in waiting.values())
        ready = poll.poll(max(0.0, 1000 * (next_deadline_s - time.monotonic())))
        for descriptor, _ in ready:
            waiting[descriptor].go_on()
        now = time.monotonic()
        for each in list(waiting.values()):
            # With `ready` it may have answered while another one was read from: asked once more.
            if each.outcome is None and not ready and now >= each.deadline_s:
                each.fail(TimeoutError("no answer in time"))
            if each.outcome is None:
                poll.modify(each.descriptor, each.awaits)
            else:
                poll.unregister(each.descriptor)
                del waiting[each.descriptor]
