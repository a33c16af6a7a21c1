"""Mixtures that follow the losses: decided from exact sums, one interval ahead, replayed."""

import json
from typing import Any

import numpy as np
import pytest

from eagleray.actors.data.mixer import Mixer, MixerSpec
from eagleray.platform.config import BanditMixtureConfig, DoremiMixtureConfig

BATCH, TOKENS = 10, 16
NAMES, SIZES = ("a", "b", "c"), (50, 30, 20)


def doremi(**changes: Any) -> DoremiMixtureConfig:
    settings = {"kind": "doremi", "every_steps": 4, "floor": 0.05, **changes}
    return DoremiMixtureConfig.model_validate(settings)


def bandit(**changes: Any) -> BanditMixtureConfig:
    settings = {"kind": "bandit", "every_steps": 4, "floor": 0.0, **changes}
    return BanditMixtureConfig.model_validate(settings)


def mixer(config: DoremiMixtureConfig | BanditMixtureConfig) -> Mixer:
    return Mixer(MixerSpec(config, NAMES, SIZES), BATCH)


def interval(mixer: Mixer, *losses: float) -> None:
    """An interval in which each domain has one loss throughout."""
    for domain, loss in enumerate(losses):
        if not np.isnan(loss):
            mixer.add(np.full(5, domain), np.full(5, loss), TOKENS)
    mixer.apply(mixer.decision(mixer.sums()))


def counts(mixer: Mixer, interval: int) -> list[int]:
    """Samples of each domain in one interval."""
    domain_B, _ = mixer.mixture.draw(interval * 4 * BATCH, 4 * BATCH)
    return np.bincount(domain_B, minlength=3).tolist()


def test_the_first_two_intervals_are_drawn_in_the_ratio_of_the_sizes() -> None:
    one = mixer(doremi(floor=0.0))
    assert one.mixture.end == 2 * 4 * BATCH
    assert counts(one, 0) == counts(one, 1) == [20, 12, 8]
    with pytest.raises(ValueError, match="decided up to 80 only"):
        one.mixture.draw(79, 2)


def test_losses_of_an_interval_decide_the_one_after_the_next() -> None:
    one = mixer(doremi(floor=0.0))
    interval(one, 2.0, 2.0, 4.0)
    assert counts(one, 1) == [20, 12, 8]
    decided = counts(one, 2)
    assert decided[2] > 20
    assert sum(decided) == 40
    assert one.mixture.end == 120


def test_a_domain_at_its_reference_loses_to_those_above_theirs() -> None:
    one = mixer(doremi(reference={"a": 3.0, "b": 1.0, "c": 1.0}))
    for _ in range(20):
        interval(one, 3.0, 2.0, 1.5)
    weights = one.weights
    assert weights["b"] > weights["c"] >= weights["a"]
    assert min(weights.values()) >= 0.05
    assert sum(weights.values()) == pytest.approx(1)


def test_the_bandit_comes_to_prefer_the_highest_loss_and_still_explores() -> None:
    one = mixer(bandit())
    for _ in range(50):
        interval(one, 2.0, 3.0, 2.5)
    weights = one.weights
    assert weights["b"] > weights["c"] > weights["a"] > 0.01


def test_huge_losses_overflow_nothing() -> None:
    for config in (doremi(rate=1000.0), bandit(temperature=1e-6)):
        one = mixer(config)
        interval(one, 1e4, 1.0, 5e3)
        assert all(np.isfinite(weight) for weight in one.weights.values())
        assert sum(counts(one, 2)) == 40


def test_without_a_floor_a_weight_may_vanish_and_come_back() -> None:
    one = mixer(doremi(rate=1000.0, floor=0.0, reference={"a": 1.0}))
    interval(one, 1.0, 9.0, 1.0)
    assert one.weights["a"] == 0
    for _ in range(3):
        interval(one, 9.0, 0.0, 0.0)
    assert one.weights["a"] == pytest.approx(1)


def test_a_domain_that_was_not_drawn_keeps_its_weight_in_relation() -> None:
    one = mixer(doremi(reference={"a": 2.0, "b": 2.0}, floor=0.0))
    interval(one, 2.0, 2.0, float("nan"))
    assert one.weights == pytest.approx({"a": 0.5, "b": 0.3, "c": 0.2})
    assert one.losses == {"a": 2.0, "b": 2.0, "c": None}


def test_sums_are_the_same_in_any_order_and_over_any_ranks() -> None:
    rng = np.random.default_rng(0)
    domain_B, loss_B = rng.integers(0, 3, 240), rng.normal(3, 1, 240)
    whole, parts = mixer(doremi()), [mixer(doremi()) for _ in range(4)]
    whole.add(domain_B, loss_B, TOKENS)
    for step in rng.permutation(60):
        part = slice(step * 4, step * 4 + 4)
        parts[step % 4].add(domain_B[part], loss_B[part], TOKENS)
    together = sum(part.sums() for part in parts)
    assert np.array_equal(together, whole.sums())


@pytest.mark.parametrize("config", [doremi(), bandit()], ids=["doremi", "bandit"])
def test_a_state_saved_anywhere_in_an_interval_goes_on_alike(
    config: DoremiMixtureConfig | BanditMixtureConfig,
) -> None:
    rng = np.random.default_rng(1)
    steps = [(rng.integers(0, 3, BATCH), rng.normal(3, 1, BATCH)) for _ in range(40)]

    def go(mixer: Mixer, first: int) -> Mixer:
        for step in range(first, len(steps)):
            mixer.add(*steps[step], TOKENS)
            if mixer.is_due(step + 1):
                mixer.apply(mixer.decision(mixer.sums()))
        return mixer

    whole = go(mixer(config), 0)
    for saved_at in (1, 3, 4, 17, 39):
        before = mixer(config)
        for step in range(saved_at):
            before.add(*steps[step], TOKENS)
            if before.is_due(step + 1):
                before.apply(before.decision(before.sums()))
        state = json.loads(json.dumps(before.state(before.sums())))
        after = mixer(config)
        after.load_state(state, is_first=True)
        gone = go(after, saved_at)
        assert gone.state(gone.sums()) == whole.state(whole.sums())
    assert len(json.dumps(whole.state(whole.sums()))) < 1024


def test_ranks_but_the_first_start_from_the_state_without_its_sums() -> None:
    one = mixer(doremi())
    one.add(np.array([0]), np.array([2.0]), TOKENS)
    other = mixer(doremi())
    other.load_state(one.state(one.sums()), is_first=False)
    assert not other.sums().any()
    assert other.mixture == one.mixture
