"""The sample order: a bijection per epoch, pure, and free of who reads it."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagleray.actors.data.order import batch_ids, slice_for_rank

seeds = st.integers(0, 2**63 - 1)


@pytest.mark.parametrize("num_samples", range(1, 301))
def test_each_epoch_holds_every_sample_once(num_samples: int) -> None:
    for epoch in range(2):
        ids = batch_ids(7, num_samples, epoch, num_samples)
        assert sorted(ids.tolist()) == list(range(num_samples))


@given(seed=seeds, num_samples=st.integers(1, 5000), epoch=st.integers(0, 10**9))
def test_any_epoch_of_any_seed_holds_every_sample_once(
    seed: int, num_samples: int, epoch: int
) -> None:
    ids = batch_ids(seed, num_samples, epoch, num_samples)
    assert np.array_equal(np.sort(ids), np.arange(num_samples))


@pytest.mark.parametrize("num_samples", [65_536, 99_999, 1_000_003])
def test_large_epochs_hold_every_sample_once(num_samples: int) -> None:
    ids = batch_ids(3, num_samples, 5, num_samples)
    assert np.array_equal(np.sort(ids), np.arange(num_samples))


@given(
    seed=seeds,
    num_samples=st.integers(1, 2**62),
    step=st.integers(0, 2**40),
    batch_size=st.integers(1, 64),
)
def test_ids_are_int64_and_in_range_for_any_size(
    seed: int, num_samples: int, step: int, batch_size: int
) -> None:
    ids = batch_ids(seed, num_samples, step, batch_size)
    assert ids.dtype == np.int64
    assert ids.shape == (batch_size,)
    assert 0 <= ids.min() <= ids.max() < num_samples


@given(seed=seeds, num_samples=st.integers(1, 200), size=st.integers(1, 50))
def test_batch_size_does_not_change_the_order(seed: int, num_samples: int, size: int) -> None:
    whole = batch_ids(seed, num_samples, 0, 10 * size)
    parts = [batch_ids(seed, num_samples, step, size) for step in range(10)]
    assert np.array_equal(np.concatenate(parts), whole)


@given(world_size=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]), step=st.integers(0, 100))
def test_slices_of_all_ranks_make_the_global_batch(world_size: int, step: int) -> None:
    ids = batch_ids(1, 100, step, 24)
    slices = [slice_for_rank(ids, rank, world_size) for rank in range(world_size)]
    assert {len(part) for part in slices} == {24 // world_size}
    assert np.array_equal(np.concatenate(slices), ids)


@pytest.mark.parametrize("resumed_world", [1, 3, 8, 12])
def test_resuming_with_another_world_size_goes_on_in_the_same_order(resumed_world: int) -> None:
    def consumed(steps: range, world_size: int) -> list[int]:
        return [
            sample
            for step in steps
            for rank in range(world_size)
            for sample in slice_for_rank(batch_ids(1, 101, step, 24), rank, world_size).tolist()
        ]

    assert consumed(range(7), 4) + consumed(range(7, 20), resumed_world) == consumed(range(20), 1)


def test_resuming_at_any_step_loses_and_doubles_nothing() -> None:
    uninterrupted = [batch_ids(5, 37, step, 8).tolist() for step in range(30)]
    for resumed_at in range(30):
        again = [batch_ids(5, 37, step, 8).tolist() for step in range(resumed_at, 30)]
        assert uninterrupted[:resumed_at] + again == uninterrupted


def test_a_batch_larger_than_the_split_runs_into_the_next_epoch() -> None:
    ids = batch_ids(0, 100, 0, 101).tolist()
    assert sorted(ids[:100]) == list(range(100))
    assert ids[100] == batch_ids(0, 100, 1, 100)[0]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(batch_ids(seed, 50, epoch, 50)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


def test_every_sample_is_equally_likely_at_every_place() -> None:
    # Chi-square over 13 x 13 cells with 1,000 draws per place: 144 degrees of freedom, sd 17.
    counts = np.zeros((13, 13))
    for seed in range(1000):
        counts[np.arange(13), batch_ids(seed, 13, 0, 13)] += 1
    expected = 1000 / 13
    assert ((counts - expected) ** 2 / expected).sum() < 144 + 6 * 17


def test_neighbours_are_not_correlated() -> None:
    ids = batch_ids(11, 10_000, 0, 10_000).astype(float)
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(ids, np.arange(10_000))[0, 1]) < 0.05


def test_a_far_step_costs_no_memory_for_the_samples_before_it() -> None:
    tracemalloc.start()
    batch_ids(0, 2**50, 2**40, 32)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100_000


def test_the_order_of_this_version_stays_as_it_is() -> None:
    assert batch_ids(42, 1000, 3, 6).tolist() == [490, 746, 430, 87, 464, 7]


@pytest.mark.parametrize(
    ("seed", "num_samples", "step", "batch_size"),
    [(-1, 10, 0, 1), (2**63, 10, 0, 1), (0, 0, 0, 1), (0, 10, -1, 1), (0, 10, 0, 0)],
)
def test_arguments_out_of_range_are_refused_by_value(
    seed: int, num_samples: int, step: int, batch_size: int
) -> None:
    with pytest.raises(ValueError, match=f"num_samples={num_samples} .*batch_size={batch_size}"):
        batch_ids(seed, num_samples, step, batch_size)


def test_a_position_beyond_63_bits_is_refused() -> None:
    assert batch_ids(0, 10, 2**63 - 1, 1).shape == (1,)
    with pytest.raises(ValueError, match="exceeds 2\\*\\*63"):
        batch_ids(0, 10, 2**62, 3)


def test_a_batch_that_does_not_divide_names_both_sizes() -> None:
    with pytest.raises(ValueError, match="batch_size 10 must be a multiple of world_size 4"):
        slice_for_rank(np.arange(10), 0, 4)
    with pytest.raises(ValueError, match="rank 4"):
        slice_for_rank(np.arange(8), 4, 4)
