"""The breaker opens after three failures, pauses longer each time, and closes on one success."""

from eagleray.actors.cache.breaker import Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_two_failures_in_a_row_are_let_through_and_a_success_forgets_them() -> None:
    breaker = Breaker(Clock())
    for _ in range(5):
        breaker.failed()
        breaker.failed()
        assert breaker.allows()
        breaker.succeeded()
    assert breaker.times_opened == 0


def test_pauses_double_from_one_second_to_thirty() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    breaker.failed()
    breaker.failed()
    pauses = []
    for _ in range(8):
        breaker.failed()
        opened = clock.now
        assert not breaker.allows()
        while not breaker.allows():
            clock.now += 0.5
        pauses.append(clock.now - opened)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]


def test_one_success_closes_it_and_the_next_pause_is_short_again() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(6):
        breaker.failed()
    clock.now += 30
    assert breaker.allows()
    breaker.succeeded()
    for _ in range(3):
        breaker.failed()
    clock.now += 1
    assert breaker.allows()
