"""Batches of features: parted, cut for ranks, and the same with any cache in any state."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagleray.actors.cache import FeatureCache, open_cache
from eagleray.actors.data import BatchStream, Dataset, batch_ids, build_dataset
from eagleray.actors.data import rows as row_shards
from eagleray.actors.data.batch import Batch
from eagleray.actors.data.loader import Loader
from eagleray.actors.data.loader_actor import LoaderServer, LoaderSpec
from eagleray.platform.config import DataConfig, FeatureCacheConfig
from eagleray.platform.errors import DataError
from eagleray.platform.storage import Storage


class LyingStore:
    """Answers every lookup with the bytes of another block, or with none at all."""

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [None if number % 3 == 0 else bytes(64 * number) for number, _ in enumerate(keys)]

    def put_many(self, items: Sequence[tuple[bytes, bytes]]) -> int:
        return 0

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Some 400 rows of 4 features and a class, in blocks of 7 rows."""
    folder = tmp_path_factory.mktemp("rows")
    draw = random.Random(3)
    records = [
        {"v": [draw.gauss(0, 1) for _ in range(3)], "x": n, "y": draw.choice("abc")}
        for n in range(500)
    ]
    return build(folder, records, label="y", categories=["y"])


def build(folder: Path, records: list[dict[str, Any]], **features: Any) -> Dataset:
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = DataConfig.model_validate(
        {"sources": [{"path": "a.jsonl"}], "features": features, "eval_fraction": 0.2}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_shards, "BLOCK_BYTES", 140)
        return build_dataset(config, lambda path: folder / path, Storage(folder / "store"))


def same(first: Batch, second: Batch) -> bool:
    return (
        first.step == second.step
        and np.array_equal(first.ids, second.ids)
        and first.samples.tobytes() == second.samples.tobytes()
        and first.layout == second.layout
    )


def test_a_batch_parts_the_rows_of_the_order(dataset: Dataset) -> None:
    with Loader(dataset, "train", 3, 6) as loader:
        batch = loader.batch(5)
    ids = batch_ids(3, dataset.num_samples("train"), 5, 6)
    rows = dataset.read("train", ids)
    assert np.array_equal(batch.ids, ids)
    assert np.array_equal(batch.features, rows[:, :4])
    assert np.array_equal(batch.labels, rows[:, 4])
    assert (batch.features.dtype, batch.labels.dtype) == (np.float32, np.int64)
    assert batch.features.flags.c_contiguous
    assert batch.features.flags.writeable
    assert batch.features is batch.features


def test_a_number_is_a_label_of_float32_and_rows_may_have_none(tmp_path: Path) -> None:
    records = [{"x": n, "y": n / 3} for n in range(40)]
    with BatchStream(build(tmp_path, records, label="y"), 4) as stream:
        batch = next(iter(stream))
    assert batch.features.shape == (4, 1)
    assert batch.labels.dtype == np.float32
    assert np.array_equal(batch.labels, (batch.features[:, 0].astype(float) / 3).astype("f4"))
    with BatchStream(build(tmp_path, records), 4) as stream:
        batch = next(iter(stream))
    assert batch.features.shape == (4, 2)
    with pytest.raises(DataError, match="have no label") as failed:
        _ = batch.labels
    assert "data.features.label" in failed.value.fix


def test_each_kind_of_batch_refuses_what_it_does_not_hold(dataset: Dataset) -> None:
    with Loader(dataset, "train", 0, 4) as loader, pytest.raises(DataError, match="not tokens"):
        _ = loader.batch(0).tokens
    of_text = Batch(0, np.arange(2), np.zeros((2, 5), np.int32))
    assert of_text.tokens is of_text.samples
    for name in ("features", "labels"):
        with pytest.raises(DataError, match="holds tokens, not rows of numbers"):
            getattr(of_text, name)


def test_parts_for_ranks_make_up_the_whole(dataset: Dataset) -> None:
    with Loader(dataset, "train", 0, 12) as loader:
        whole = loader.batch(3)
        parts = [whole.slice_for_rank(rank, 4) for rank in range(4)]
    assert np.array_equal(np.concatenate([part.features for part in parts]), whole.features)
    assert np.array_equal(np.concatenate([part.labels for part in parts]), whole.labels)


@pytest.mark.parametrize("max_bytes", [0, 1000, 10_000_000])
def test_a_cache_of_any_size_changes_nothing(dataset: Dataset, max_bytes: int) -> None:
    cache = open_cache(FeatureCacheConfig(max_bytes=max_bytes), None)
    with (
        Loader(dataset, "train", 0, 8, cache) as loader,
        Loader(dataset, "train", 0, 8, prefetch_batches=0) as plain,
    ):
        assert all(same(loader.batch(step), plain.batch(step)) for step in range(60))
        if max_bytes > 1000:
            num_blocks = -(-dataset.num_samples("train") // 7)
            assert loader.stats().cache_misses == num_blocks
            assert loader.stats().cache_hits > 0


def test_a_cache_that_lies_changes_nothing(dataset: Dataset) -> None:
    with (
        Loader(dataset, "train", 0, 8, FeatureCache(LyingStore())) as loader,
        Loader(dataset, "train", 0, 8, prefetch_batches=0) as plain,
    ):
        assert all(same(loader.batch(step), plain.batch(step)) for step in range(20))


def test_the_last_row_of_a_block_asks_for_no_block_beyond(dataset: Dataset) -> None:
    split = dataset.split("train")
    asked: list[int] = []

    def fetch(blocks: list[int]) -> list[np.ndarray]:  # type: ignore[type-arg]
        asked.extend(blocks)
        return [split.read_block(block) for block in blocks]

    ids = np.array([6, dataset.num_samples("train") - 1, 6])
    rows = split.read_through(ids, fetch)
    assert rows.tobytes() == dataset.read("train", ids).tobytes()
    assert asked == [0, int(ids[1]) // 7]


def test_the_actors_logic_cuts_rows(dataset: Dataset) -> None:
    spec = LoaderSpec(dataset.folder.parents[1], dataset.digest, 3, 6, prefetch_batches=0)
    server = LoaderServer(spec)
    with Loader(dataset, "train", 3, 6, prefetch_batches=0) as plain:
        assert same(server.batch(2, 1, 3), plain.batch(2).slice_for_rank(1, 3))
        assert same(server.eval_batch(1, 0, 2), plain.eval_batch(1).slice_for_rank(0, 2))
