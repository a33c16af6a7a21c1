"""Feasibility: the impossible is refused with figures, what may fit later is waited for."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagleray.platform.cluster.resources import (
    Demand,
    NodeResources,
    check_feasible,
    wait_for_resources,
)
from eagleray.platform.errors import DeadlineExceededError, InfeasibleError

TWO_NODES = [NodeResources("a", 4, 0), NodeResources("b", 2, 1)]


@pytest.mark.parametrize(
    ("demand", "fits"),
    [
        (Demand(6, cpus=1), True),
        (Demand(7, cpus=1), False),
        (Demand(3, cpus=2), True),
        # Six CPUs in all, but no node has five.
        (Demand(1, cpus=5), False),
        (Demand(1, cpus=1, gpus=1), True),
        (Demand(2, cpus=1, gpus=1), False),
        (Demand(10, cpus=0.6), False),
        (Demand(9, cpus=0.6), True),
        (Demand(5), True),
    ],
)
def test_bundles_must_fit_on_nodes_whole(demand: Demand, fits: bool) -> None:
    assert demand.fits(TWO_NODES) is fits


def test_tenths_add_up_as_people_expect() -> None:
    assert Demand(10, cpus=0.1).fits([NodeResources("a", 1.0, 0)])


def test_no_nodes_hold_nothing() -> None:
    assert not Demand(1).fits([])


def test_the_refusal_says_what_was_asked_and_what_there_is() -> None:
    with pytest.raises(InfeasibleError) as refused:
        check_feasible(Demand(2, cpus=1, gpus=1), TWO_NODES)
    assert "2 workers of 1 CPU and 1 GPU each (2 CPU and 2 GPU in all)" in refused.value.what
    assert "6 CPU and 1 GPU on 2 nodes, at most 2 CPU and 1 GPU on one" in refused.value.what
    assert "cluster.num_cpus" in refused.value.fix


def test_an_empty_cluster_is_refused_too() -> None:
    with pytest.raises(InfeasibleError, match="0 CPU on 0 nodes"):
        check_feasible(Demand(1, cpus=1), [])


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), max_size=5),
    st.integers(1, 10),
    st.integers(1, 4),
    st.integers(0, 2),
)
def test_what_fits_can_really_be_packed(
    amounts: list[tuple[int, int]], count: int, cpus: int, gpus: int
) -> None:
    nodes = [NodeResources(str(i), c, g) for i, (c, g) in enumerate(amounts)]
    placed = 0
    for node_cpus, node_gpus in amounts:
        while node_cpus >= cpus and node_gpus >= gpus:
            node_cpus, node_gpus, placed = node_cpus - cpus, node_gpus - gpus, placed + 1
    assert Demand(count, cpus, gpus).fits(nodes) is (placed >= count)


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def _free_after(clock: _Clock, moment_s: float) -> Callable[[], list[NodeResources]]:
    return lambda: [NodeResources("a", 2 if clock.now >= moment_s else 0, 0)]


def test_waiting_ends_when_the_resources_come_free() -> None:
    clock = _Clock()
    wait_for_resources(Demand(1, 2), _free_after(clock, 7), 60, clock, clock.sleep)
    assert 7 <= clock.now < 8


def test_waiting_gives_up_at_its_deadline_and_says_what_is_free() -> None:
    clock = _Clock()
    with pytest.raises(DeadlineExceededError, match=r"found no place in 3 s: 0 CPU free on 1 node"):
        wait_for_resources(Demand(1, 2), _free_after(clock, 7), 3, clock, clock.sleep)
    assert 3 <= clock.now < 4
