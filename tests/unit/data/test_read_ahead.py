"""Reading ahead by threads: every step once and right, and nobody waits for ever."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from eagleray.actors.data.activity import Reading, longest
from eagleray.actors.data.pace import Pace
from eagleray.actors.data.read_ahead import ReadAhead
from eagleray.platform.errors import DeadlineExceededError

Until = Callable[..., None]


class Source:
    """Gives the square of a step; `stuck` steps wait until they are let go, `bad` ones fail."""

    def __init__(self) -> None:
        self.reads: list[int] = []
        self.stuck: set[int] = set()
        self.bad: set[int] = set()
        self.gate = threading.Event()
        self.most_at_once = self._at_once = 0
        self._lock = threading.Lock()

    def __call__(self, step: int) -> tuple[int, int]:
        with self._lock:
            self.reads.append(step)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            if step in self.stuck:
                with Reading(f"shard {step}"):
                    assert self.gate.wait(30)
            if step in self.bad:
                raise OSError(5, f"step {step}")
            return step * step, 1
        finally:
            with self._lock:
                self._at_once -= 1


@contextmanager
def ahead(
    source: Source,
    depth: int | None,
    fetchers: int | None = None,
    timeout_s: float | None = None,
    end: int | None = None,
) -> Iterator[Callable[[int], int]]:
    reader = ReadAhead(source, Pace(depth, fetchers), lambda: end, timeout_s)
    try:
        yield lambda step: reader.get(step, source, reader.generation)[0]
    finally:
        source.gate.set()
        reader.close()


@pytest.mark.parametrize("timeout_s", [None, 30.0])
@pytest.mark.parametrize("depth", [0, 1, 7, None])
@pytest.mark.parametrize("fetchers", [1, 4, None])
def test_every_step_is_right_and_read_once(
    depth: int | None, fetchers: int | None, timeout_s: float | None
) -> None:
    source = Source()
    with ahead(source, depth, fetchers, timeout_s) as get:
        assert [get(step) for step in range(200)] == [step * step for step in range(200)]
    assert sorted(source.reads)[:200] == list(range(200))
    assert len(source.reads) == len(set(source.reads))


def test_slow_reads_are_made_at_the_same_time(until: Until) -> None:
    source = Source()
    source.stuck = set(range(1, 100))
    with ahead(source, 6, 4) as get:
        get(0)
        until(lambda: source.most_at_once == 4, "four reads under way")
        assert sorted(source.reads) == [0, 1, 2, 3, 4]


def test_nothing_is_read_beyond_the_end(until: Until) -> None:
    source = Source()
    with ahead(source, 6, 4, end=3) as get:
        get(0)
        until(lambda: sorted(source.reads) == [0, 1, 2], "the steps before the end")
        assert get(9) == 81


def test_a_read_that_hangs_is_given_up_with_its_name_and_the_step_comes_later() -> None:
    source = Source()
    source.stuck = {3}
    with ahead(source, 2, 1, timeout_s=0.2) as get:
        assert [get(step) for step in range(3)] == [0, 1, 4]
        with pytest.raises(
            DeadlineExceededError, match=r"step 3 did not come within 0\.2 s: reading shard 3 takes"
        ):
            get(3)
        source.gate.set()
        assert get(3) == 9
        assert source.reads.count(3) == 1
    assert longest() is None


@pytest.mark.parametrize("timeout_s", [None, 30.0])
def test_what_fails_is_met_by_whoever_asks_and_tried_again(timeout_s: float | None) -> None:
    source = Source()
    source.bad = {2}
    with ahead(source, 4, 2, timeout_s) as get:
        assert [get(0), get(1)] == [0, 1]
        for _ in range(2):
            with pytest.raises(OSError, match="step 2"):
                get(2)
        assert get(3) == 9
        source.bad.clear()
        assert get(2) == 4


def test_many_threads_with_a_deadline_get_what_each_asked_for() -> None:
    source, wrong = Source(), []
    with ahead(source, 3, 2, timeout_s=30) as get:

        def ask(steps: list[int]) -> None:
            wrong.extend(step for step in steps if get(step) != step * step)

        orders = [[*range(60)], [*range(59, -1, -1)], [*range(0, 60, 7)], [1000, 5, 1001, 5] * 5]
        threads = [threading.Thread(target=ask, args=(order,)) for order in orders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
    assert not wrong


def test_what_was_being_read_when_all_was_forgotten_is_read_anew(until: Until) -> None:
    source = Source()
    source.stuck = {1}
    reader = ReadAhead(source, Pace(1, 1), lambda: None)
    try:
        reader.get(0, source, 0)
        until(lambda: 1 in source.reads, "step 1 under way")
        reader.clear()
        source.gate.set()
        assert reader.get(1, source, reader.generation)[0] == 1
        assert source.reads.count(1) == 2
    finally:
        source.gate.set()
        reader.close()


def test_a_caller_of_before_leaves_nothing_behind() -> None:
    source = Source()
    reader = ReadAhead(source, Pace(0), lambda: None)
    assert reader.get(5, lambda step: (-1, 1), reader.generation - 1)[0] == -1
    assert reader.get(5, source, reader.generation)[0] == 25
    reader.close()
