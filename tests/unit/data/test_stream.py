"""Batches as an iterable: exactly once through any saving, loading, resizing and breaking off."""

import itertools
import json
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagleray.actors.data import BatchStream, Dataset
from eagleray.actors.data.loader import Loader
from eagleray.actors.data.mixture import Mixture
from eagleray.platform.errors import DataError
from eagleray.platform.storage import Storage

Build = Callable[..., Dataset]
SOURCES = [{"path": "raw/a.jsonl", "domain": "a"}, {"path": "raw/b.jsonl", "domain": "b"}]
BATCH = 24
MIXTURE = Mixture.constant([Fraction(2), Fraction(1)])
READERS: list[dict[str, Any]] = [
    {"prefetch_batches": 0},
    {"prefetch_batches": 1, "fetchers": 1},
    {"prefetch_batches": 5, "fetchers": 3},
    {"prefetch_batches": None, "timeout_s": 30.0},
]


@pytest.fixture(scope="module", params=["text", "features"])
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Two domains, some 270 samples: of tokens, or rows of numbers."""
    from eagleray.actors.data import build_dataset
    from eagleray.platform.config import DataConfig

    folder = tmp_path_factory.mktemp("two")
    of_kind: dict[str, Any] = {"tokenizer": {"vocab_size": 300}, "seq_len": 16}
    if request.param == "features":
        of_kind = {"features": {"columns": ["x", "v"], "label": "y", "categories": ["y"]}}
    words = ["peace", "union", "states", "people", "law"]
    for number, name in enumerate("ab"):
        texts = [" ".join(words[(n + i + number) % 5] for i in range(60)) for n in range(40)]
        records: list[dict[str, Any]] = [{"text": f"{n} {text}"} for n, text in enumerate(texts)]
        if request.param == "features":
            records = [{"x": n, "v": [number, n / 7], "y": name} for n in range(170)]
        lines = (json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    sources = [{"path": f"{name}.jsonl", "domain": name} for name in "ab"]
    config = DataConfig.model_validate({"sources": sources, "eval_fraction": 0.2, **of_kind})
    return build_dataset(config, lambda path: folder / path, Storage(folder / "store"))


def stream(dataset: Dataset, **changes: Any) -> BatchStream:
    settings = {"seed": 3, "prefetch_batches": 0, "mixture": MIXTURE, **changes}
    return BatchStream(dataset, BATCH, **settings)


def endless(one: BatchStream) -> Iterator[list[int]]:
    while True:
        for batch in one:
            yield batch.ids.tolist()


def take(dataset: Dataset, count: int, **changes: Any) -> list[list[int]]:
    """Global batches, put together from the parts of all ranks."""
    world_size = changes.pop("world_size", 1)
    streams = [stream(dataset, rank=r, world_size=world_size, **changes) for r in range(world_size)]
    parts = [list(itertools.islice(endless(one), count)) for one in streams]
    return [[i for part in step for i in part] for step in zip(*parts, strict=True)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    seed=st.integers(0, 2**63 - 1),
    worlds=st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=4),
    loaders=st.integers(0, 3),
    saves=st.lists(st.integers(0, 30), min_size=3, max_size=3),
)
def test_any_chain_of_saves_and_resizes_gives_every_global_batch_once(
    two: Dataset, seed: int, worlds: list[int], loaders: int, saves: list[int]
) -> None:
    undisturbed = take(two, 45, seed=seed)
    state: dict[str, Any] | None = None
    found: list[list[int]] = []
    places = [*sorted(saves), 45]
    for number, place in enumerate(places):
        world_size = worlds[number % len(worlds)]
        ranks = [
            stream(two, rank=rank, world_size=world_size, seed=seed, **READERS[loaders])
            for rank in range(world_size)
        ]
        for one in ranks:
            if state is not None:
                one.load_state_dict(state)
                assert one.state_dict() == state
        count = place - len(found)
        parts = [list(itertools.islice(endless(one), count)) for one in ranks]
        found += [[i for part in step for i in part] for step in zip(*parts, strict=True)]
        state = json.loads(json.dumps(ranks[0].state_dict()))
        for one in ranks:
            one.close()
    assert found == undisturbed


# A phase ends amid an epoch and amid the run; one domain is drawn from more often than it is long.
PHASED = MIXTURE.then(40 * BATCH, [Fraction(1), Fraction(3)], 70 * BATCH).then(
    110 * BATCH, [Fraction(5), Fraction(2)], None
)


def test_a_state_of_any_of_200_steps_goes_on_with_each_sample_that_comes_next(two: Dataset) -> None:
    num_steps, ahead = 200, 14
    whole = take(two, num_steps + ahead, mixture=PHASED)
    one = stream(two, mixture=PHASED)
    running = endless(one)
    for step in range(num_steps + 1):
        # More than an epoch from each place, so over every end of an epoch and of a phase.
        resumed = stream(two, mixture=PHASED)
        resumed.load_state_dict(json.loads(json.dumps(one.state_dict())))
        assert list(itertools.islice(endless(resumed), ahead)) == whole[step:][:ahead]
        assert next(running) == whole[step]
    assert one.epoch > 15


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_three_saves_and_loads_in_one_epoch_equal_the_uninterrupted_run(
    two: Dataset, prefetch: int
) -> None:
    whole, found = take(two, 7), list[list[int]]()
    state = stream(two).state_dict()
    for place in (1, 3, 5, 7):
        with stream(two, prefetch_batches=prefetch) as one:
            # As loops do that restore after they have begun: what runs already follows.
            running = endless(one)
            next(running)
            one.load_state_dict(state)
            assert one.state_dict() == state
            found += itertools.islice(running, place - len(found))
            state = one.state_dict()
            assert one.epoch == 0
    assert found == whole


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_global_batches_do_not_depend_on_ranks_and_reading_ahead(
    two: Dataset, world_size: int, prefetch: int
) -> None:
    assert take(two, 25, world_size=world_size, prefetch_batches=prefetch) == take(two, 25)


@pytest.mark.parametrize("resumed_world", [3, 8])
def test_what_four_ranks_left_of_an_epoch_is_read_by_any_number_of_them(
    two: Dataset, resumed_world: int
) -> None:
    n = two.num_samples("train")
    four = [stream(two, rank=rank, world_size=4, mixture=None) for rank in range(4)]
    read = [i for one in four for ids in itertools.islice(endless(one), 5) for i in ids]
    rest: list[int] = []
    for rank in range(resumed_world):
        one = stream(two, rank=rank, world_size=resumed_world, mixture=None)
        one.load_state_dict(four[2].state_dict())
        rest += [i for ids in itertools.islice(endless(one), n // BATCH - 5) for i in ids]
    assert len(read) == len(set(read)) == 5 * BATCH
    assert len(rest) == len(set(rest)) == (n // BATCH - 5) * BATCH
    assert not set(read) & set(rest)


def test_ranks_go_from_epoch_to_epoch_without_one_another(two: Dataset) -> None:
    # One domain, so one shard, for two ranks that read ahead: none waits for the other to arrive.
    alone = Mixture.constant([Fraction(1), Fraction(0)])
    lengths, ids = [], []
    for rank in range(2):
        with stream(two, rank=rank, world_size=2, mixture=alone, prefetch_batches=3) as one:
            epochs = [[batch.ids for batch in one] for _ in range(3)]
        lengths.append([len(epoch) for epoch in epochs])
        ids.append([part.tolist() for epoch in epochs for part in epoch])
    assert lengths[0] == lengths[1]
    merged = [first + second for first, second in zip(*ids, strict=True)]
    assert merged == take(two, len(merged), mixture=alone)


def test_batches_span_shards_that_are_shorter_and_fewer_than_the_ranks(
    build: Build, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = build()
    monkeypatch.setattr("eagleray.actors.data.split_writer.BLOCK_TOKENS", 64)
    monkeypatch.setattr(
        "eagleray.actors.data.shards.ShardWriter.__init__.__kwdefaults__", {"block_tokens": 64}
    )
    cut = build(shard_bytes=600, storage=Storage(storage.root / "cut"))
    (short,) = cut.split("train").streams
    assert short is not None
    assert short.tokens_per_shard // cut.seq_len < BATCH
    (single,) = whole.split("train").streams
    assert single is not None
    assert len(single.shards) < 8
    expected = take(whole, 30, mixture=None)
    for dataset in (whole, cut):
        assert take(dataset, 30, mixture=None, world_size=8) == expected
    tokens = [
        np.concatenate([batch.tokens for batch in stream(dataset, mixture=None)])
        for dataset in (whole, cut)
    ]
    assert np.array_equal(*tokens)


@pytest.mark.parametrize("num_loaders", [1, 2, 3])
def test_however_many_loaders_serve_the_ranks_they_agree(two: Dataset, num_loaders: int) -> None:
    loaders = [Loader(two, "train", 3, BATCH, None, 2, MIXTURE) for _ in range(num_loaders)]
    try:
        for step, whole in enumerate(take(two, 20)):
            parts = [
                loaders[rank % num_loaders].batch(step).slice_for_rank(rank, 4).ids.tolist()
                for rank in range(4)
            ]
            assert [i for part in parts for i in part] == whole
    finally:
        for loader in loaders:
            loader.close()


def test_each_pass_is_one_epoch_and_the_next_begins_where_it_ended(two: Dataset) -> None:
    one = stream(two)
    n = two.num_samples("train")
    lengths = [len(list(one)) for _ in range(5)]
    assert one.step == sum(lengths) == -(-5 * n // BATCH)
    assert set(lengths) <= {n // BATCH, n // BATCH + 1}
    ids = np.concatenate(take(two, one.step, mixture=None))
    assert np.array_equal(np.sort(ids[:n]), np.arange(n))


def test_a_state_at_the_end_of_an_epoch_begins_the_next(two: Dataset) -> None:
    first = stream(two)
    epoch = [batch.ids.tolist() for batch in first]
    resumed = stream(two)
    resumed.load_state_dict(first.state_dict())
    assert resumed.epoch == 1
    second = [batch.ids.tolist() for batch in resumed]
    assert second
    assert epoch + second == take(two, len(epoch) + len(second))


def test_breaking_off_and_going_on_repeats_nothing(two: Dataset) -> None:
    one = stream(two)
    seen = [next(iter(one)).ids.tolist() for _ in range(4)]
    seen += [batch.ids.tolist() for batch in one]
    assert seen == take(two, len(seen))
    assert one.epoch == 1


def test_a_state_loaded_into_an_iterator_under_way_applies_at_once(two: Dataset) -> None:
    one, steps = stream(two), take(two, 9)
    running = iter(one)
    next(running)
    later = {**one.state_dict(), "step": 7}
    one.load_state_dict(later)
    assert next(running).ids.tolist() == steps[7]
    assert one.step == 8


def test_a_state_taken_while_a_batch_is_trained_on_names_the_next(two: Dataset) -> None:
    one = stream(two)
    for batch in one:
        other = stream(two)
        other.load_state_dict(one.state_dict())
        following = next(iter(other)).ids.tolist()
        if batch.step == 3:
            break
    assert following == take(two, 5)[4]


def test_a_batch_larger_than_the_dataset_is_given_not_dropped(two: Dataset) -> None:
    n = two.num_samples("train")
    with BatchStream(two, n + 1, prefetch_batches=0) as one:
        lengths = [len(list(one)) for _ in range(3)]
    assert lengths == [1, 1, 1]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 4}, "state is of seed 3, this stream of 4"),
        ({"split": "eval"}, "state is of split train, this stream of eval"),
        ({"mixture": None}, "state is of mixture"),
    ],
)
def test_a_state_of_another_order_is_refused_by_value(
    two: Dataset, changes: dict[str, Any], named: str
) -> None:
    state = stream(two).state_dict()
    assert len(json.dumps(state)) < 1024
    with pytest.raises(DataError, match=named):
        stream(two, **changes).load_state_dict(state)
    with pytest.raises(DataError, match="has version 9, this program reads 1"):
        stream(two).load_state_dict({**state, "version": 9})


def test_ranks_that_the_batch_does_not_divide_by_are_refused_before_the_first_step(
    two: Dataset,
) -> None:
    with pytest.raises(ValueError, match="batch_size 24 must be a multiple of world_size 5"):
        stream(two, world_size=5)


def test_pages_of_the_dataset_are_not_copied_while_it_is_read(two: Dataset) -> None:
    split = two.split("train")
    block = split.read_block(0)
    assert not block.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        block[0] = 1


def test_a_rank_reads_its_part_alone(two: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    real, sizes = Dataset.read, list[int]()

    def read(self: Dataset, split: str, ids: np.ndarray) -> np.ndarray:
        sizes.append(len(ids))
        return real(self, split, ids)  # type: ignore[arg-type]

    monkeypatch.setattr(Dataset, "read", read)
    with BatchStream(two, 8, rank=3, world_size=4) as stream:
        assert len(next(iter(stream)).ids) == 2
    assert set(sizes) == {2}
