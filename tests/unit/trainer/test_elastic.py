"""How many workers a run has."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision
from ray.train.v2.api.config import ScalingConfig

from eagleray.actors.trainer import elastic
from eagleray.actors.trainer.elastic import ElasticPolicy, Sizer, room_for


class Clock:
    """Time that passes when it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("room", "first"), [(0, 2), (1, 2), (2, 2), (3, 2), (5, 4), (100, 8)])
def test_a_run_starts_with_as_many_as_fit_or_waits_for_the_fewest(room: int, first: int) -> None:
    assert Sizer([2, 4, 8], 10).first(room) == first


def test_more_are_started_once_there_has_been_room_for_a_while() -> None:
    clock = Clock()
    sizer = Sizer([1, 2, 4], 10, clock)
    assert sizer.next(1, 1, is_leaving=False) is None
    assert sizer.next(1, 3, is_leaving=False) is None
    clock.now = 9
    assert sizer.next(1, 4, is_leaving=False) is None
    # The node went and another one came: that is not ten seconds of room.
    assert sizer.next(1, 1, is_leaving=False) is None
    assert sizer.next(1, 2, is_leaving=False) is None
    clock.now = 18
    assert sizer.next(1, 2, is_leaving=False) is None
    clock.now = 19
    assert sizer.next(1, 2, is_leaving=False) == 2


def test_a_node_that_goes_is_left_at_once_if_there_is_room_elsewhere() -> None:
    sizer = Sizer([2, 4], 10)
    assert sizer.next(4, 3, is_leaving=True) == 2
    # The same number, on other nodes.
    assert sizer.next(4, 4, is_leaving=True) == 4
    assert sizer.next(4, 1, is_leaving=True) is None


def test_fewer_than_there_are_is_never_chosen_while_their_places_stand() -> None:
    assert Sizer([1, 2, 4], 0).next(4, 2, is_leaving=False) is None


def test_room_is_counted_by_node_and_what_we_hold_counts_as_ours() -> None:
    each = {"CPU": 2.0, "GPU": 1.0}
    free = {
        "a": {"CPU": 7.0, "GPU": 2.0}, "b": {"CPU": 1.0, "GPU": 8.0}, "c": {"CPU": 4.0}, "d": {},
    }  # fmt: skip
    assert room_for(free, {}, each) == 2
    assert room_for(free, {"b": 3, "gone": 5}, each) == 5


def test_thirds_of_a_cpu_add_up() -> None:
    assert room_for({"a": {"CPU": 0.9999}}, {}, {"CPU": 1.0 / 3.0}) == 3


class Gang:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.save = SimpleNamespace(remote=self.told.append)


class Looks(ElasticPolicy):
    """A policy that sees what it is told: places, and nodes of ours that go."""

    def __init__(self, gang: Gang, sizes: list[int], room: int, leaving: set[str]) -> None:
        sizer, config = Sizer(sizes, 0), ScalingConfig(num_workers=sizes[-1])
        super().__init__(config, sizer, "run", gang, has_autoscaler=False)
        self._seen = room, leaving

    def _room(self, alive: set[str]) -> tuple[int, set[str]]:
        return self._seen


def decisions(policy: ElasticPolicy, size: int, count: int) -> list[Any]:
    state: Any = SimpleNamespace(num_workers=size)
    return [policy.make_decision_for_running_worker_group(state, None) for _ in range(count)]


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "alive_ids", lambda: {"a", "b"})


def test_where_a_node_goes_and_there_is_no_room_elsewhere_a_snapshot_is_taken_once() -> None:
    gang = Gang()
    found = decisions(Looks(gang, [2], room=1, leaving={"b"}), size=2, count=3)
    assert all(isinstance(decision, NoopDecision) for decision in found)
    assert gang.told == ["nodes are being taken away: b"]


def test_where_there_is_room_elsewhere_the_workers_move_there() -> None:
    gang = Gang()
    (decision,) = decisions(Looks(gang, [1, 2], room=1, leaving={"b"}), size=2, count=1)
    assert isinstance(decision, ResizeDecision)
    assert decision.num_workers == 1
    assert gang.told == []
