"""Batches by step: pure, read ahead within bounds, the same with any cache in any state."""

import itertools
import threading
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest

from eagleray.actors.cache import FeatureCache, open_cache
from eagleray.actors.data import Dataset, batch_ids
from eagleray.actors.data.batch import Batch
from eagleray.actors.data.loader import Loader
from eagleray.actors.data.loader_actor import LoaderServer, LoaderSpec
from eagleray.actors.data.mixture import Mixture
from eagleray.actors.data.order import mixed_batch_ids
from eagleray.platform.config import FeatureCacheConfig
from eagleray.platform.errors import IntegrityError, NotFoundError

Build = Callable[..., Dataset]


class LyingStore:
    """Answers every lookup with the bytes of another block, or with none at all."""

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [None if number % 3 == 0 else bytes(64 * number) for number, _ in enumerate(keys)]

    def put_many(self, items: Sequence[tuple[bytes, bytes]]) -> int:
        return 0

    def close(self) -> None:
        pass


def same(first: Batch, second: Batch) -> bool:
    return (
        first.step == second.step
        and np.array_equal(first.ids, second.ids)
        and np.array_equal(first.tokens, second.tokens)
    )


def test_a_batch_holds_the_samples_of_the_order(build: Build) -> None:
    dataset = build()
    with Loader(dataset, "train", 3, 6) as loader:
        batch = loader.batch(5)
    ids = batch_ids(3, dataset.num_samples("train"), 5, 6)
    assert np.array_equal(batch.ids, ids)
    assert np.array_equal(batch.tokens, dataset.read("train", ids))
    assert (batch.ids.dtype, batch.tokens.dtype) == (np.int64, np.int32)


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_steps_may_be_asked_for_in_any_order(build: Build, prefetch: int) -> None:
    dataset = build()
    steps = [0, 1, 2, 3, 50, 51, 49, 50, 7, 7, 0, 100_000, 100_001]
    with (
        Loader(dataset, "train", 0, 4, prefetch_batches=prefetch) as loader,
        Loader(dataset, "train", 0, 4, prefetch_batches=0) as plain,
    ):
        for step in steps:
            assert same(loader.batch(step), plain.batch(step))


@pytest.mark.parametrize("fetchers", [1, 3, None])
def test_steps_ahead_are_read_within_bounds_and_ready_when_asked_for(
    build: Build, until: Callable[..., None], fetchers: int | None
) -> None:
    with Loader(build(), "train", 0, 4, prefetch_batches=3, fetchers=fetchers) as loader:
        loader.batch(10)
        until(lambda: sorted(loader._ahead._done) == [10, 11, 12, 13], "the first steps ahead")
        for step in (11, 12, 13):
            loader.batch(step)
        assert loader.stats().ready == 3
        assert loader.stats().batches == 4
        wanted = [11, 12, 13, 14, 15, 16]
        until(lambda: sorted(loader._ahead._done) == wanted, "the next steps ahead")


def test_ranks_that_ask_for_one_step_share_one_reading(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    real = Dataset.read
    with Loader(build(), "train", 0, 4, prefetch_batches=0) as loader:
        monkeypatch.setattr(
            Dataset,
            "read",
            lambda self, split, ids: reads.append(len(ids)) or real(self, split, ids),
        )
        parts = [loader.batch(9).slice_for_rank(rank, 4) for rank in range(4)]
        loader.batch(10)
        assert loader.batch(9).slice_for_rank(0, 4).ids == parts[0].ids
    assert reads == [4, 4]
    assert np.array_equal(np.concatenate([p.tokens for p in parts]), loader.batch(9).tokens)


@pytest.mark.parametrize("max_bytes", [0, 1000, 10_000_000])
def test_a_cache_of_any_size_changes_nothing(build: Build, max_bytes: int) -> None:
    dataset = build()
    cache = open_cache(FeatureCacheConfig(max_bytes=max_bytes), None)
    with (
        Loader(dataset, "train", 0, 4, cache, prefetch_batches=0) as loader,
        Loader(dataset, "train", 0, 4, prefetch_batches=0) as plain,
    ):
        assert all(same(loader.batch(step), plain.batch(step)) for step in range(20))
        if max_bytes > 1000:
            assert loader.stats().cache_hits > 0
            assert loader.stats().cache_misses == 1  # The small corpus is one block.


def test_a_cache_that_lies_changes_nothing(build: Build) -> None:
    dataset = build()
    with (
        Loader(dataset, "train", 0, 4, FeatureCache(LyingStore())) as loader,
        Loader(dataset, "train", 0, 4, prefetch_batches=0) as plain,
    ):
        assert all(same(loader.batch(step), plain.batch(step)) for step in range(20))


def test_evaluation_goes_over_the_held_out_samples_whatever_the_seed(build: Build) -> None:
    dataset = build()
    with (
        Loader(dataset, "train", 1, 4, prefetch_batches=0) as first,
        Loader(dataset, "train", 2, 4, prefetch_batches=0) as second,
    ):
        batches = list(first.eval_batches(5))
        assert all(map(same, batches, second.eval_batches(5)))
    ids = np.concatenate([batch.ids for batch in batches])
    assert len(ids) == len(set(ids.tolist())) == 20
    assert np.array_equal(batches[2].tokens, dataset.read("eval", batches[2].ids))


def test_damage_ahead_is_met_when_its_step_is_asked_for(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = build()
    bad_id = int(batch_ids(0, dataset.num_samples("train"), 2, 1)[0])
    real = Dataset.read

    def read(self: Dataset, split: str, ids: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        if bad_id in ids:
            raise IntegrityError("shard train-00000.bin: block 7 fails its checksum")
        return real(self, split, ids)  # type: ignore[arg-type]

    monkeypatch.setattr(Dataset, "read", read)
    with Loader(dataset, "train", 0, 1, prefetch_batches=4) as loader:
        for step in (0, 1):
            loader.batch(step)
        for _ in range(2):
            with pytest.raises(IntegrityError, match="block 7"):
                loader.batch(2)
        assert loader.batch(3).step == 3


def test_several_threads_get_what_each_asked_for(build: Build) -> None:
    dataset = build()
    expected = {step: batch_ids(0, dataset.num_samples("train"), step, 4) for step in range(40)}
    wrong: list[int] = []

    def ask(steps: Sequence[int]) -> None:
        wrong.extend(s for s in steps if not np.array_equal(loader.batch(s).ids, expected[s]))

    with Loader(dataset, "train", 0, 4, prefetch_batches=2) as loader:
        orders = [range(40), range(39, -1, -1), [*range(0, 40, 3)]]
        threads = [threading.Thread(target=ask, args=(order,)) for order in orders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert not wrong


def test_waiting_and_reading_are_timed(build: Build) -> None:
    ticks = itertools.count()
    with Loader(build(), "train", 0, 4, prefetch_batches=0, clock=lambda: next(ticks)) as loader:
        loader.batch(0)
        assert (loader.stats().wait_s, loader.stats().read_s) == (7, 1)


def test_closing_twice_is_no_harm(build: Build) -> None:
    loader = Loader(build(), "train", 0, 4, prefetch_batches=2)
    loader.batch(0)
    loader.close()
    loader.close()
    assert loader._ahead._threads
    assert not any(thread.is_alive() for thread in loader._ahead._threads)


def test_the_actors_logic_cuts_slices_and_opens_its_dataset_on_the_first_call(build: Build) -> None:
    dataset = build()
    spec = LoaderSpec(dataset.folder.parents[1], dataset.digest, 3, 6, prefetch_batches=0)
    server = LoaderServer(spec)
    with Loader(dataset, "train", 3, 6, prefetch_batches=0) as plain:
        assert same(server.batch(2, 1, 3), plain.batch(2).slice_for_rank(1, 3))
        assert same(server.eval_batch(1, 0, 2), plain.eval_batch(1).slice_for_rank(0, 2))
    assert server.stats().batches == 1
    missing = LoaderServer(LoaderSpec(dataset.folder.parents[1], "0" * 64, 3, 6))
    with pytest.raises(NotFoundError):
        missing.batch(0, 0, 1)


def decided(end: int, *later: tuple[int, int]) -> Mixture:
    """Equal weights of two domains up to `end`, then others, each for 40 samples."""
    mixture = Mixture.constant([Fraction(1), Fraction(1)]).until(end)
    for weights in later:
        assert mixture.end is not None
        first = mixture.end
        mixture = mixture.then(first, [Fraction(w) for w in weights], 40).until(first + 40)
    return mixture


@pytest.fixture
def two_domains(build: Build) -> Dataset:
    paths = {"a": "raw/a.jsonl", "b": "raw/b.jsonl"}
    return build(sources=[{"path": path, "domain": name} for name, path in paths.items()])


def plain_ids(dataset: Dataset, mixture: Mixture, step: int) -> list[int]:
    return mixed_batch_ids(0, dataset.sizes("train"), mixture, step, 4).tolist()


def test_nothing_is_read_ahead_that_is_not_decided(
    two_domains: Dataset, until: Callable[..., None]
) -> None:
    short, longer = decided(40), decided(40, (3, 1))
    with Loader(two_domains, "train", 0, 4, None, 6, short) as loader:
        assert loader.batch(7).ids.tolist() == plain_ids(two_domains, longer, 7)
        until(lambda: {8, 9} <= loader._ahead._done.keys(), "the batches that are decided")
        assert max(loader._ahead._done) == 9
        with pytest.raises(ValueError, match="decided up to 40 only"):
            loader.batch(10)
        loader.batch(8, longer)
        until(lambda: 14 in loader._ahead._done, "batches of the next weights")
        for step in range(10, 15):
            assert loader.batch(step).ids.tolist() == plain_ids(two_domains, longer, step)


def test_a_rank_that_knows_less_is_answered_alike(two_domains: Dataset) -> None:
    short, longer = decided(40), decided(40, (3, 1), (1, 3))
    with Loader(two_domains, "train", 0, 4, None, 0, short) as loader:
        for step, known in ((9, short), (12, longer.since(48)), (11, decided(40, (3, 1)))):
            ids = loader.batch(step, known).ids.tolist()
            assert ids == plain_ids(two_domains, longer, step)


def test_another_attempts_decisions_replace_what_was_read_ahead(
    two_domains: Dataset, until: Callable[..., None]
) -> None:
    first, second = decided(40, (3, 1)), decided(40, (1, 3))
    with Loader(two_domains, "train", 0, 4, None, 4, first) as loader:
        loader.batch(9)
        until(lambda: 12 in loader._ahead._done, "batches by the first attempt's weights")
        for step in range(10, 18):
            ids = loader.batch(step, second.since(40)).ids.tolist()
            assert ids == plain_ids(two_domains, second, step)


def test_an_attempt_that_starts_over_further_back_is_answered(two_domains: Dataset) -> None:
    whole = decided(40, (3, 1), (1, 3), (2, 2))
    with Loader(two_domains, "train", 0, 4, None, 0, decided(40)) as loader:
        loader.batch(35, whole.since(120))
        earlier = decided(40, (3, 1)).since(40)
        assert loader.batch(12, earlier).ids.tolist() == plain_ids(two_domains, whole, 12)
        assert loader.batch(35, whole.since(120)).ids.tolist() == plain_ids(two_domains, whole, 35)
