"""Mixtures: within one sample of their share at every prefix, and the same from any place on."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagleray.actors.data.mixture import MAX_PERIOD, Mixture, exact, quotas_of

weights_lists = st.lists(st.integers(0, 40), min_size=1, max_size=7).filter(any)


def off_by(mixture: Mixture, count: int) -> np.ndarray:
    """How far each domain is from its share after each of the first samples, [count, D]."""
    quotas = np.array(mixture.segments[0].quotas)
    domain_B, _ = mixture.draw(0, count)
    drawn = np.cumsum(domain_B[:, None] == np.arange(len(quotas)), axis=0)
    return drawn - np.arange(1, count + 1)[:, None] * quotas / quotas.sum()


@given(weights_lists)
def test_counts_are_within_one_sample_of_their_share_at_every_prefix(weights: list[int]) -> None:
    mixture = Mixture.constant([Fraction(weight) for weight in weights])
    assert np.abs(off_by(mixture, 3 * sum(weights))).max() < 1


def test_it_holds_for_awkward_weights_over_a_long_run() -> None:
    rng = np.random.default_rng(5)
    for num_domains in (2, 3, 20, 64):
        weights = [exact(float(weight)) for weight in rng.dirichlet([0.3] * num_domains)]
        mixture = Mixture.constant(weights)
        assert sum(mixture.segments[0].quotas) == MAX_PERIOD
        bound = 1 - 1 / (2 * num_domains - 2)
        assert np.abs(off_by(mixture, MAX_PERIOD + 5000)).max() <= bound + 1e-9


@given(weights_lists, st.integers(0, 3000), st.integers(1, 200))
def test_any_stretch_equals_that_part_of_the_whole(
    weights: list[int], first: int, count: int
) -> None:
    mixture = Mixture.constant([Fraction(weight) for weight in weights])
    whole = mixture.draw(0, first + count)
    part = mixture.draw(first, count)
    for one, other in zip(whole, part, strict=True):
        assert np.array_equal(one[first:], other)


@given(
    st.lists(st.tuples(weights_lists, st.integers(1, 90)), min_size=1, max_size=5),
    st.integers(1, 16),
)
def test_no_index_of_a_domain_is_left_out_or_drawn_twice_over_changes_of_weights(
    phases: list[tuple[list[int], int]], batch: int
) -> None:
    num_domains = max(len(weights) for weights, _ in phases)
    mixture, first = None, 0
    for weights, steps in phases:
        padded = [Fraction(w) for w in weights + [0] * (num_domains - len(weights))]
        mixture = (mixture or Mixture.constant(padded)).then(first, padded, steps * batch)
        first += steps * batch
    assert mixture is not None
    domain_B, index_B = mixture.draw(0, first)
    for domain in range(num_domains):
        of_domain = index_B[domain_B == domain]
        assert np.array_equal(of_domain, np.arange(len(of_domain)))
    assert mixture.drawn_at(first) == tuple(np.bincount(domain_B, minlength=num_domains))


def test_what_was_drawn_does_not_change_when_weights_change_later() -> None:
    before = Mixture.constant([Fraction(3), Fraction(1)])
    after = before.then(40, [Fraction(1), Fraction(1)], 10)
    assert all(
        np.array_equal(a, b) for a, b in zip(before.draw(0, 40), after.draw(0, 40), strict=True)
    )
    assert np.bincount(after.draw(40, 10)[0]).tolist() == [5, 5]


def test_a_phase_whose_length_the_weights_do_not_divide_ends_as_near_as_can_be() -> None:
    mixture = Mixture.constant([exact(0.7), exact(0.3)]).then(0, [exact(0.7), exact(0.3)], 32_003)
    assert mixture.drawn_at(32_003) == (22_402, 9_601)
    assert len(mixture.segments) == 2


def test_weights_are_meant_as_they_are_written() -> None:
    assert quotas_of([exact(0.7), exact(0.3)]) == (7, 3)
    assert quotas_of([exact(1), exact(2), exact(0)]) == (1, 2, 0)
    assert quotas_of([exact(2e-5), exact(1)]) == (1, 50_000)
    assert sum(quotas_of([exact(2**0.5), exact(1)])) == MAX_PERIOD


@pytest.mark.parametrize("weights", [[], [Fraction(0)], [Fraction(-1), Fraction(2)]])
def test_weights_without_a_positive_sum_are_refused(weights: list[Fraction]) -> None:
    with pytest.raises(ValueError, match="must be at least 0"):
        quotas_of(weights)


def test_a_state_gives_an_equal_mixture_back() -> None:
    mixture = Mixture.constant([Fraction(1), Fraction(2)]).then(9, [Fraction(1), Fraction(0)], None)
    again = Mixture.from_state(mixture.state())
    assert again == mixture
    assert again.draw(5, 20)[1].tolist() == mixture.draw(5, 20)[1].tolist()


def test_positions_beyond_32_bits_are_counted_in_64() -> None:
    mixture = Mixture.constant([Fraction(1), Fraction(3)])
    domain_B, index_B = mixture.draw(2**40, 4)
    assert index_B.max() >= 3 * 2**38
    assert np.bincount(domain_B).tolist() == [1, 3]
