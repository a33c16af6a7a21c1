"""An open dataset: checked when opened, when read, and when asked."""

import random
import shutil
from collections.abc import Callable

import numpy as np
import pytest

from eagleray.actors.data import Dataset
from eagleray.platform.errors import IntegrityError, NotFoundError
from eagleray.platform.storage import Storage, canonical_json, digest_bytes

Build = Callable[..., Dataset]


def test_a_digest_that_is_not_there_says_how_to_build(storage: Storage) -> None:
    with pytest.raises(NotFoundError, match="eagleray data build"):
        Dataset.open(storage, "0" * 64)


def test_reads_are_new_int32_arrays_that_may_be_written(build: Build) -> None:
    dataset = build()
    first = dataset.read("train", np.array([3, 0, 3]))
    assert (first.dtype, first.shape) == (np.int32, (3, 17))
    first[:] = -1
    assert dataset.read("train", np.array([3])).min() >= 0


def test_reading_through_blocks_gives_the_same(build: Build) -> None:
    dataset = build()
    split = dataset.split("train")
    (stream,) = split.streams
    assert stream is not None
    stream.block_tokens = 50  # Samples of 17 tokens then lie across blocks.
    tokens = stream.shards[0].read(0, stream.num_tokens)
    asked: list[int] = []

    def fetch(blocks: list[int]) -> list[np.ndarray]:  # type: ignore[type-arg]
        asked.extend(blocks)
        return [tokens[block * 50 : block * 50 + 50] for block in blocks]

    ids = np.random.default_rng(1).integers(0, dataset.num_samples("train"), 40)
    ids[0] = dataset.num_samples("train") - 1
    through = split.read_through(ids, fetch)
    assert np.array_equal(through, dataset.read("train", ids))
    assert asked == sorted(set(asked))


@pytest.mark.parametrize("bad", [-1, 10**6])
def test_an_id_out_of_range_is_refused(build: Build, bad: int) -> None:
    with pytest.raises(ValueError, match=f"{bad}.* must be in 0"):
        build().read("train", np.array([bad]))


def test_an_unknown_split_is_refused(build: Build) -> None:
    with pytest.raises(ValueError, match="'test' must be one of train, eval"):
        build().num_samples("test")  # type: ignore[arg-type]


def test_verify_finds_any_flipped_byte_of_any_file(build: Build, storage: Storage) -> None:
    dataset = build()
    assert dataset.verify() == []
    draw = random.Random(4)
    for path in sorted(dataset.folder.iterdir()):
        sound = path.read_bytes()
        for place in draw.sample(range(len(sound)), 25):
            damaged = bytearray(sound)
            damaged[place] ^= 1 << draw.randrange(8)
            path.write_bytes(damaged)
            if path.name == "manifest.json":
                with pytest.raises(IntegrityError, match=r"manifest\.json"):
                    Dataset.open(storage, dataset.digest)
            else:
                assert path.name in {damage.file for damage in dataset.verify()}
        path.write_bytes(sound)
    assert dataset.verify() == []


@pytest.mark.parametrize("name", ["main.train-00000.bin", "main.eval-00000.bin"])
def test_a_missing_shard_does_not_open(build: Build, storage: Storage, name: str) -> None:
    dataset = build()
    (dataset.folder / name).unlink()
    with pytest.raises(IntegrityError, match=name):
        Dataset.open(storage, dataset.digest)


def test_a_shard_of_the_other_split_in_its_place_does_not_open(
    build: Build, storage: Storage
) -> None:
    dataset = build()
    shutil.copy(dataset.folder / "main.eval-00000.bin", dataset.folder / "main.train-00000.bin")
    with pytest.raises(IntegrityError, match="not the one that the manifest names"):
        Dataset.open(storage, dataset.digest)


def test_a_tokenizer_that_was_changed_is_refused(build: Build, storage: Storage) -> None:
    dataset = build()
    (dataset.folder / "tokenizer.json").write_text("{}")
    with pytest.raises(IntegrityError, match=r"tokenizer\.json does not have the digest"):
        _ = Dataset.open(storage, dataset.digest).tokenizer_json
    (dataset.folder / "tokenizer.json").unlink()
    with pytest.raises(IntegrityError, match=r"tokenizer\.json cannot be read"):
        _ = Dataset.open(storage, dataset.digest).tokenizer_json


def test_a_later_format_is_named(storage: Storage) -> None:
    manifest = canonical_json({"format": 4})
    storage.put(manifest, "datasets", digest_bytes(manifest), "manifest.json")
    with pytest.raises(Exception, match="has format 4, this program reads 1, 2 and 3"):
        Dataset.open(storage, digest_bytes(manifest))
