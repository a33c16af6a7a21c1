"""A worker asks for the next step's batch while it trains on one, as far as that is decided."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from eagleray.actors.data.batch import Batch
from eagleray.actors.data.mixture import Mixture
from eagleray.actors.trainer.process import LoaderSource
from eagleray.platform.errors import ServiceError


class Client:
    """Answers with the step that was asked for; notes the order of things."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.bad: set[int] = set()

    def ask(self, step: int, rank: int, world_size: int, mixture: Mixture | None) -> Any:
        self.log.append(("ask", step))
        return step

    def take(self, step: int, asked: Any) -> Batch:
        self.log.append(("take", asked))
        if step in self.bad:
            raise ServiceError("gone")
        return Batch(step, np.zeros(4, np.int64), np.zeros((4, 9), np.int32))


def asked(client: Client) -> list[int]:
    return [step for what, step in client.log if what == "ask"]


def test_the_next_step_is_asked_for_before_it_is_wanted_and_once() -> None:
    client = Client()
    source = LoaderSource(client, 4)  # type: ignore[arg-type]
    assert [source.batch(step, 0, 1, None).step for step in (7, 8, 9)] == [7, 8, 9]
    assert client.log == [
        ("ask", 7), ("take", 7), ("ask", 8), ("take", 8), ("ask", 9), ("take", 9), ("ask", 10),
    ]  # fmt: skip


def test_a_step_that_was_not_expected_is_asked_for() -> None:
    client = Client()
    source = LoaderSource(client, 4)  # type: ignore[arg-type]
    assert [source.batch(step, 0, 1, None).step for step in (7, 20)] == [7, 20]
    assert asked(client) == [7, 8, 20, 21]


def test_what_is_not_decided_is_not_asked_for_ahead() -> None:
    client = Client()
    source = LoaderSource(client, 4)  # type: ignore[arg-type]
    mixture = Mixture.constant([Fraction(1), Fraction(1)]).until(40)  # 10 steps
    for step in range(7, 10):
        source.batch(step, 0, 1, mixture)
    assert asked(client) == [7, 8, 9]


def test_after_a_failure_the_step_is_asked_for_anew() -> None:
    client = Client()
    source = LoaderSource(client, 4)  # type: ignore[arg-type]
    source.batch(1, 0, 1, None)
    client.bad = {2}
    for _ in range(2):
        with pytest.raises(ServiceError):
            source.batch(2, 0, 1, None)
    client.bad = set()
    assert source.batch(2, 0, 1, None).step == 2
    assert asked(client) == [1, 2, 2, 2, 3]
