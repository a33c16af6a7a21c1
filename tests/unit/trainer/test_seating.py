"""Who sits where after a death, and whose state all go on from."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagleray.actors.trainer.seams import Bond, Standing
from eagleray.actors.trainer.seating import Place, bond_of, laggards, local_ranks, taken_over


def test_survivors_of_the_same_step_give_their_state_to_the_newcomer() -> None:
    standings = {0: Standing(7, 1, 7), 1: None, 2: Standing(7, 1, 6)}
    assert bond_of(standings) == Bond(done=7, settled=6, source=0, is_shared=True)


def test_a_rank_that_applied_one_step_more_gives_it_to_the_others() -> None:
    standings = {0: Standing(6, 1, 6), 1: Standing(7, 1, 6), 2: None}
    assert bond_of(standings) == Bond(done=7, settled=6, source=1, is_shared=True)


def test_of_equal_steps_the_one_that_has_decided_more_is_the_source() -> None:
    standings = {0: Standing(8, 1, 7), 1: Standing(8, 2, 7)}
    assert bond_of(standings) == Bond(done=8, settled=7, source=1, is_shared=False)


def test_where_all_have_settled_nothing_is_done_twice() -> None:
    standings = {rank: Standing(8, 2, 8) for rank in range(3)}
    assert bond_of(standings) == Bond(done=8, settled=8, source=0, is_shared=False)


def test_with_nobody_left_there_is_nothing_to_go_on_from() -> None:
    assert bond_of({0: None, 1: None}) is None


def test_before_the_first_step_there_is_nothing_to_settle() -> None:
    assert bond_of({0: Standing(0, 0, 0), 1: None}) == Bond(0, 0, 0, is_shared=True)


@given(
    st.dictionaries(
        st.integers(0, 7),
        st.none() | st.builds(Standing, st.integers(3, 4), st.integers(0, 1), st.integers(2, 4)),
        min_size=1,
    )
)
def test_whoever_is_the_source_holds_the_newest_state_and_nothing_is_left_out(
    standings: dict[int, Standing | None],
) -> None:
    bond = bond_of(standings)
    known = [standing for standing in standings.values() if standing]
    assert (bond is None) == (not known)
    if bond is None:
        return
    source = standings[bond.source]
    assert source is not None
    assert source.applied == bond.done == max(standing.applied for standing in known)
    lacking = [s for s in standings.values() if s is None or s.applied != bond.done]
    assert bond.is_shared == bool(lacking)
    # What one rank has not settled, all settle again: its collectives need all of them.
    unsettled = [s for s in standings.values() if s is None or s.settled != bond.done]
    assert (bond.settled == bond.done) == (not unsettled)


def test_ranks_are_numbered_on_their_nodes() -> None:
    places = [Place(0, "a"), Place(1, "b"), Place(2, "a"), Place(3, "b")]
    assert local_ranks(places) == {0: 0, 1: 0, 2: 1, 3: 1}


@pytest.mark.parametrize(
    ("newest", "behind"),
    [({0: 7, 1: 6, 2: 7}, [1]), ({0: 7, 1: 7}, [0, 1]), ({0: 5, 1: 6, 2: 5}, [0, 2]), ({}, [])],
)
def test_those_that_noted_the_fewest_steps_hold_the_others_up(
    newest: dict[int, int], behind: list[int]
) -> None:
    assert laggards(newest) == behind


def test_whoever_stays_on_a_node_keeps_its_rank_or_takes_another_there() -> None:
    places = {0: Place(0, "b"), 1: Place(1, "a"), 2: Place(2, "c")}
    assert taken_over(places, {0: "a", 1: "b"}) == {0: 1, 1: 0}
    assert taken_over({0: Place(0, "b")}, {0: "a", 1: "b"}) == {0: 1}
    assert taken_over(places, {}) == {}


@given(
    st.dictionaries(st.integers(0, 5), st.sampled_from("abc"), min_size=1),
    st.dictionaries(st.integers(0, 5), st.sampled_from("abc")),
)
def test_nobody_sits_at_two_places_or_on_a_node_that_is_not_its_own(
    nodes: dict[int, str], sitting: dict[int, str]
) -> None:
    places = {rank: Place(rank, node) for rank, node in nodes.items()}
    chosen = taken_over(places, sitting)
    assert len(set(chosen.values())) == len(chosen)
    for rank, before in chosen.items():
        assert sitting[before] == nodes[rank]
        # Who could stay where it is does.
        assert before == rank or sitting.get(rank) != nodes[rank]
    for node in "abc":
        wanted = sum(place == node for place in nodes.values())
        there = sum(place == node for place in sitting.values())
        assert sum(nodes[rank] == node for rank in chosen) == min(wanted, there)
