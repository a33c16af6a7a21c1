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
    from eagleray.platform.storage import Storage

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
