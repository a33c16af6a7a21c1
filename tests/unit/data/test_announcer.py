"""The cache is told what a loader will look up: all of it, once, in bounded pieces, in time."""

from collections.abc import Callable
from typing import Any

import pytest

from eagleray.actors.cache import FeatureCache, open_cache
from eagleray.actors.cache.policies import PolicyName
from eagleray.actors.cache.touches import Schedule
from eagleray.actors.data import Dataset
from eagleray.actors.data.announcer import CHUNK_STEPS, MAX_KEYS_AHEAD, Announcer
from eagleray.actors.data.loader import Loader
from eagleray.actors.data.shards import ShardWriter
from eagleray.platform.config import FeatureCacheConfig

Build = Callable[..., Dataset]


class Plans:
    """Takes schedules."""

    def __init__(self) -> None:
        self.taken: list[Schedule] = []

    def __call__(self, schedule: Schedule) -> None:
        self.taken.append(schedule)

    def steps(self) -> list[int]:
        return [step for schedule in self.taken for step in schedule.steps]


@pytest.fixture
def plans() -> Plans:
    return Plans()


@pytest.fixture
def cache(plans: Plans) -> FeatureCache:
    config = FeatureCacheConfig(max_bytes=1000)
    opened = open_cache(config, None)
    assert opened is not None
    return FeatureCache(opened.store, plan=plans)


def test_every_step_from_here_on_is_told_once(cache: FeatureCache, plans: Plans) -> None:
    announcer = Announcer(cache, lambda step: [b"%d" % (step % 7)])
    for step in range(10, 600):
        announcer.at(step)
        assert step <= plans.taken[-1].steps[-1]
    steps = plans.steps()
    assert steps == list(range(10, steps[-1] + 1))
    assert [schedule.now for schedule in plans.taken] == sorted(s.now for s in plans.taken)


def test_it_runs_ahead_up_to_its_bound(cache: FeatureCache, plans: Plans) -> None:
    per_step = 50
    keys = [b"%d" % n for n in range(per_step)]
    announcer = Announcer(cache, lambda _: keys)
    for step in range(200):
        announcer.at(step)
    ahead = (plans.steps()[-1] - 199) * per_step
    assert MAX_KEYS_AHEAD - CHUNK_STEPS * per_step < ahead
    assert ahead < MAX_KEYS_AHEAD + 2 * CHUNK_STEPS * per_step


def test_whoever_goes_elsewhere_is_told_from_there(cache: FeatureCache, plans: Plans) -> None:
    announcer = Announcer(cache, lambda step: [b"%d" % step])
    announcer.at(5000)
    plans.taken.clear()
    announcer.at(300)
    assert plans.taken[0].now == plans.steps()[0] == 300


def test_what_is_not_decided_is_told_when_it_is(cache: FeatureCache, plans: Plans) -> None:
    end = 100
    announcer = Announcer(cache, lambda step: [b"x"] if step < end else None)
    announcer.at(0)
    assert plans.steps() == list(range(CHUNK_STEPS))
    end = 500
    announcer.at(1)
    assert plans.steps() == list(range(3 * CHUNK_STEPS))


@pytest.fixture
def blocks(build: Build, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """A dataset in many small blocks."""
    monkeypatch.setattr("eagleray.actors.data.split_writer.BLOCK_TOKENS", 64)
    monkeypatch.setitem(ShardWriter.__init__.__kwdefaults__, "block_tokens", 64)
    dataset = build(seq_len=16)
    assert dataset.split("train").streams[0].num_blocks > 40  # type: ignore[union-attr]
    return dataset


def test_blocks_of_samples_are_those_that_reading_them_asks_for(blocks: Dataset) -> None:
    split = blocks.split("train")
    with Loader(blocks, "train", 3, 6, prefetch_batches=0) as loader:
        for step in range(30):
            ids = loader.batch(step).ids
            asked: list[int] = []

            def fetch(wanted: list[int], asked: list[int] = asked) -> Any:
                asked.extend(wanted)
                return [split.read_block(block) for block in wanted]

            split.read_through(ids, fetch)
            assert asked == split.blocks_of(ids) == sorted(set(asked))


def hits(dataset: Dataset, policy: PolicyName) -> int:
    """Blocks found by a cache of a tenth of the dataset, over two epochs."""
    room = dataset.split("train").num_samples * 32 // 10
    cache = open_cache(FeatureCacheConfig(max_bytes=room, policy=policy), None)
    with (
        Loader(dataset, "train", 3, 6, cache, prefetch_batches=0) as loader,
        Loader(dataset, "train", 3, 6, prefetch_batches=0) as plain,
    ):
        for step in range(2 * dataset.num_samples("train") // 6):
            assert (loader.batch(step).tokens == plain.batch(step).tokens).all()
        return loader.stats().cache_hits


def test_a_cache_that_knows_the_order_finds_far_more(blocks: Dataset) -> None:
    found = {name: hits(blocks, name) for name in ("lru", "lru-k", "auto")}
    assert found["auto"] > 1.5 * max(found["lru"], found["lru-k"])
