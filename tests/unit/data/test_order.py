"""The sample order: a bijection per epoch, pure, and free of who reads it."""

import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagleray.actors.data.mixture import Mixture
from eagleray.actors.data.order import batch_ids, domains_of, mixed_batch_ids, slice_for_rank

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
    ("seed", "num_samples", "step", "batch_size", "named"),
    [
        (-1, 10, 0, 1, "seed=-1"),
        (2**63, 10, 0, 1, f"seed={2**63}"),
        (0, 0, 0, 1, "num_samples=0"),
        (0, 10, -1, 1, "step=-1"),
        (0, 10, 0, 0, "batch_size=0"),
    ],
)
def test_arguments_out_of_range_are_refused_by_value(
    seed: int, num_samples: int, step: int, batch_size: int, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
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


def mixture_of(*weights: int) -> Mixture:
    return Mixture.constant([Fraction(weight) for weight in weights])


def test_one_domain_is_read_in_the_plain_order() -> None:
    for step in range(9):
        mixed = mixed_batch_ids(42, [100], mixture_of(3), step, 32)
        assert np.array_equal(mixed, batch_ids(42, 100, step, 32))


@given(
    seed=seeds,
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    weights=st.lists(st.integers(1, 9), min_size=5, max_size=5),
    batch_size=st.integers(1, 40),
)
def test_each_domain_repeats_only_after_all_of_it_was_drawn(
    seed: int, sizes: list[int], weights: list[int], batch_size: int
) -> None:
    mixture = mixture_of(*weights[: len(sizes)])
    steps = 3 * sum(sizes) // batch_size + 1
    ids = np.concatenate(
        [mixed_batch_ids(seed, sizes, mixture, step, batch_size) for step in range(steps)]
    )
    domains = domains_of(ids, sizes)
    for domain, size in enumerate(sizes):
        of_domain = ids[domains == domain] - sum(sizes[:domain])
        for start in range(0, len(of_domain) - size + 1, size):
            assert np.array_equal(np.sort(of_domain[start : start + size]), np.arange(size))
        rest = of_domain[len(of_domain) // size * size :]
        assert len(np.unique(rest)) == len(rest)


def test_batches_of_another_size_hold_the_same_samples_in_the_same_order() -> None:
    sizes, mixture = [50, 7, 20], mixture_of(5, 1, 3)
    whole = mixed_batch_ids(3, sizes, mixture, 0, 240)
    for size in (1, 8, 24, 60):
        parts = [mixed_batch_ids(3, sizes, mixture, step, size) for step in range(240 // size)]
        assert np.array_equal(np.concatenate(parts), whole)


def test_domains_of_one_size_have_orders_of_their_own() -> None:
    ids = mixed_batch_ids(0, [50, 50], mixture_of(1, 1), 0, 100)
    assert not np.array_equal(ids[ids < 50], ids[ids >= 50] - 50)


def test_an_empty_domain_may_only_stand_where_it_is_not_drawn_from() -> None:
    ids = mixed_batch_ids(0, [0, 5], mixture_of(0, 1), 0, 5)
    assert sorted(ids.tolist()) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="domain 0 is drawn from and has 0"):
        mixed_batch_ids(0, [0, 5], mixture_of(1, 1), 0, 5)


def test_the_mixed_order_of_this_version_stays_as_it_is() -> None:
    ids = mixed_batch_ids(42, [1000, 300], mixture_of(2, 1), 3, 6)
    assert ids.tolist() == [25, 1238, 922, 850, 1259, 882]
