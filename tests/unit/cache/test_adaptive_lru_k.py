"""LRU-K that adapts is near the best of its settings, whatever the references are like."""

import random
from collections.abc import Iterator

import pytest

from eagleray.actors.cache.policies import AdaptiveLruK, EvictionPolicy, Lru, LruK
from eagleray.actors.cache.policies.adaptive_lru_k import _MAX_SAMPLED

ITEMS = 600


def hits(policy: EvictionPolicy, trace: list[bytes], room: int) -> int:
    """Hits of the second half of a trace, all values being of one byte."""
    found = 0
    for place, key in enumerate(trace):
        found += key in policy and place >= len(trace) // 2
        policy.touch(key, 1)
        while policy.total_bytes > room:
            policy.remove(policy.victim() or b"")
    return found


def epochs(draw: random.Random) -> Iterator[int]:
    for _ in range(8):
        yield from draw.sample(range(ITEMS), ITEMS)


def jobs(draw: random.Random) -> Iterator[int]:
    """Four of them side by side, each with epochs of its own."""
    for several in zip(*(epochs(draw) for _ in range(4)), strict=True):
        yield from several


def bursts(draw: random.Random) -> Iterator[int]:
    """Each key is used for a while, among those that came just before, and never again."""
    for number in range(10_000):
        yield max(0, number - int(draw.expovariate(1 / 100)))


def popular(draw: random.Random) -> Iterator[int]:
    """Zipf's law, and as many keys again that come once."""
    weights = [1 / rank for rank in range(1, ITEMS + 1)]
    for number, key in enumerate(draw.choices(range(ITEMS), weights, k=6000)):
        yield key
        yield ITEMS + number


PATTERNS = {"epochs": epochs, "jobs": jobs, "bursts": bursts, "popular": popular}


@pytest.mark.parametrize("name", list(PATTERNS))
@pytest.mark.parametrize("room", [60, 300])
def test_it_is_not_below_lru_and_not_far_below_lru_k(name: str, room: int) -> None:
    trace = [b"%d" % number for number in PATTERNS[name](random.Random(room))]
    ours = hits(AdaptiveLruK(room), trace, room)
    assert ours >= 0.98 * hits(Lru(), trace, room)
    assert ours >= 0.95 * hits(LruK(2, 4 * room, 0.1 * room), trace, room)


@pytest.mark.parametrize("name", ["jobs", "popular"])
def test_it_is_well_above_lru_where_recency_misleads(name: str) -> None:
    trace = [b"%d" % number for number in PATTERNS[name](random.Random(1))]
    assert hits(AdaptiveLruK(60), trace, 60) > 1.1 * hits(Lru(), trace, 60)


def test_it_is_well_above_lru_k_in_bursts() -> None:
    trace = [b"%d" % number for number in bursts(random.Random(1))]
    assert hits(AdaptiveLruK(60), trace, 60) > 1.1 * hits(LruK(2, 240, 6), trace, 60)


@pytest.mark.parametrize("size", [1, 0])
def test_miniatures_are_bounded_whatever_the_size_of_cache_and_values(size: int) -> None:
    policy = AdaptiveLruK(5000)
    for number in range(20_000):
        policy.touch(b"%d" % (number * number % 7919 + number // 2), size)
        while policy.total_bytes > 5000:
            policy.remove(policy.victim() or b"")
    for one in policy._settings:
        miniature = one.miniature
        assert 0 < len(miniature) <= _MAX_SAMPLED
        assert len(miniature._references) <= 2 * _MAX_SAMPLED
        assert miniature.total_bytes <= policy._room()
