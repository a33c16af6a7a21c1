"""The evictor: within its budget, in small chunks, and patient with a Redis that is away."""

from collections.abc import Sequence

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from eagleray.actors.cache.evictor import CHUNK_KEYS, Evictor
from eagleray.actors.cache.frame import digest_key
from eagleray.actors.cache.policies import LruK, make_policy
from eagleray.actors.cache.touches import MAX_TOUCHES, Schedule, TouchBatch, TouchBuffer


def batch(*names: int, size: int = 10) -> TouchBatch:
    return TouchBatch(b"".join(digest_key(b"%d" % n) for n in names), (size,) * len(names))


class Unlinked:
    def __init__(self) -> None:
        self.chunks: list[list[bytes]] = []
        self.is_away = False

    def __call__(self, keys: Sequence[bytes]) -> None:
        if self.is_away:
            raise RedisConnectionError("away")
        self.chunks.append(list(keys))


def test_nothing_goes_within_the_budget_and_down_to_85_percent_beyond_it() -> None:
    unlinked = Unlinked()
    evictor = Evictor(LruK(2, 100), 1000, unlinked)
    evictor.touch(batch(*range(100)))
    assert unlinked.chunks == []
    evictor.touch(batch(100))
    assert evictor.stats().bytes == 850
    assert [key for chunk in unlinked.chunks for key in chunk] == [
        digest_key(b"%d" % n) for n in range(16)
    ]


def test_chunks_stay_small_however_much_must_go() -> None:
    unlinked = Unlinked()
    Evictor(LruK(2, 100), 100, unlinked).touch(batch(*range(500)))
    assert {len(chunk) for chunk in unlinked.chunks[:-1]} == {CHUNK_KEYS}
    assert sum(map(len, unlinked.chunks)) == 492


def test_keys_that_are_referenced_again_outlive_newer_ones() -> None:
    unlinked = Unlinked()
    evictor = Evictor(LruK(2, 100), 100, unlinked)
    evictor.touch(batch(1, 2, 1, 2))
    evictor.touch(batch(*range(10, 30)))
    gone = {key for chunk in unlinked.chunks for key in chunk}
    assert not gone & {digest_key(b"1"), digest_key(b"2")}


def test_while_redis_is_away_keys_stay_counted_and_go_later() -> None:
    unlinked = Unlinked()
    evictor = Evictor(LruK(2, 100), 100, unlinked)
    unlinked.is_away = True
    evictor.touch(batch(*range(20)))
    assert (evictor.stats().bytes, evictor.stats().evicted) == (200, 0)
    unlinked.is_away = False
    evictor.touch(batch(20))
    assert evictor.stats().bytes <= 85
    assert evictor.stats().evicted == sum(map(len, unlinked.chunks))


def expected(now: int, *uses: tuple[int, Sequence[int]]) -> Schedule:
    """What a reader says; keys as those of `batch`."""
    keys = b"".join(digest_key(b"%d" % number) for _, numbers in uses for number in numbers)
    steps, counts = tuple(step for step, _ in uses), tuple(len(numbers) for _, numbers in uses)
    return Schedule(now, steps, counts, keys)


def test_what_is_looked_up_last_goes_first() -> None:
    unlinked = Unlinked()
    evictor = Evictor(make_policy("auto", 100), 100, unlinked)
    evictor.expect(expected(0, (0, range(12)), (1, [0, 1, 2]), (2, [3, 4, 5]), (3, [6, 7])))
    evictor.touch(batch(*range(12)))
    # Four that nobody expects any more; 85 of 120 bytes stay.
    assert set(unlinked.chunks[0]) == {digest_key(b"%d" % number) for number in (8, 9, 10, 11)}


def test_a_policy_that_does_not_plan_hears_no_schedule() -> None:
    evictor = Evictor(LruK(2, 100), 100, Unlinked())
    evictor.expect(expected(0, (0, range(12))))
    evictor.touch(batch(*range(3)))
    assert evictor.stats().keys == 3


def test_figures_count_touches_and_keys() -> None:
    evictor = Evictor(LruK(2, 100), 1000, Unlinked())
    evictor.touch(batch(1, 1, 2))
    stats = evictor.stats()
    assert (stats.keys, stats.bytes, stats.touches, stats.evicted) == (2, 20, 3, 0)


class Sink:
    def __init__(self) -> None:
        self.batches: list[TouchBatch] = []

    def touch(self, batch: TouchBatch) -> None:
        self.batches.append(batch)

    def expect(self, schedule: Schedule) -> None:
        pytest.fail("nobody planned")


def test_touches_go_out_in_batches_by_count() -> None:
    sink = Sink()
    buffer = TouchBuffer(sink, lambda: 0.0)
    for number in range(2 * MAX_TOUCHES + 1):
        buffer.add(digest_key(b"%d" % number), number)
    assert [len(batch) for batch in sink.batches] == [MAX_TOUCHES, MAX_TOUCHES]
    buffer.flush()
    buffer.flush()
    assert sink.batches[2].pairs() == [(digest_key(b"512"), 512)]
    assert len(sink.batches) == 3


@pytest.mark.parametrize(("age_s", "sent"), [(0.05, 0), (0.1, 1)])
def test_touches_go_out_with_the_first_one_after_100_ms(age_s: float, sent: int) -> None:
    now = 0.0
    sink = Sink()
    buffer = TouchBuffer(sink, lambda: now)
    buffer.add(digest_key(b"a"), 1)
    now += age_s
    buffer.add(digest_key(b"b"), 1)
    assert len(sink.batches) == sent
