"""Ctrl-C waits for a safe place, once."""

import signal
import threading

import pytest

from eagleray.platform.interruption import interruption_deferred


def test_the_first_waits_for_a_safe_place() -> None:
    before = signal.getsignal(signal.SIGINT)
    reached = []
    with interruption_deferred() as raise_waiting:
        raise_waiting()
        signal.raise_signal(signal.SIGINT)
        reached.append("went on")
        with pytest.raises(KeyboardInterrupt):
            raise_waiting()
    assert reached
    assert signal.getsignal(signal.SIGINT) is before


def test_the_second_is_raised_at_once() -> None:
    with interruption_deferred():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_another_thread_is_left_alone() -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with interruption_deferred() as raise_waiting:
                raise_waiting()
        except BaseException as error:  # noqa: BLE001 - shown by the assertion
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert failures == []
