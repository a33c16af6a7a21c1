"""Transforms by the content of their samples: computed once, given back as they were."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from eagleray.actors.cache import FeatureCache, TransformCache
from eagleray.actors.cache.memory_store import MemoryStore
from eagleray.actors.cache.policies import LruK

Transform = Callable[[Any], Any]


def in_memory() -> FeatureCache:
    return FeatureCache(MemoryStore(LruK(2, 100), 1_000_000))


def counted(transform: Transform) -> tuple[list[Any], Transform]:
    seen: list[Any] = []

    def count(sample: Any) -> Any:
        seen.append(sample)
        return transform(sample)

    return seen, count


@given(
    arrays.arrays(
        st.sampled_from(["<f4", ">f8", "i1", "<i8", "?", "<c16", "U3", "M8[s]"]),
        arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    )
)
def test_values_keep_bytes_type_and_shape(value: np.ndarray) -> None:  # type: ignore[type-arg]
    transforms = TransformCache(in_memory(), "any", "1")
    (fresh,) = transforms.map([np.arange(3)], lambda _: value)
    (kept,) = transforms.map([np.arange(3)], lambda _: pytest.fail("computed twice"))
    for found in (fresh, kept):
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert found.tobytes() == value.tobytes()
        assert found.flags.writeable


def test_equal_samples_are_one_and_those_that_differ_in_anything_are_not() -> None:
    transforms = TransformCache(in_memory(), "any", "1")
    seen, transform = counted(lambda sample: sample.sum())
    zeros = [
        np.zeros(4, np.float32), np.zeros((2, 2), np.float32), np.zeros(4, np.int32),
        np.zeros(2, np.float64), np.zeros(4, ">f4"), np.zeros(2, [("a", "<f4"), ("b", "<f4")])["a"],
    ]  # fmt: skip
    values = transforms.map([*zeros, np.zeros(4, np.float32)], transform)
    assert len(seen) == len(zeros)
    assert [value.dtype for value in values[:3]] == [np.float32, np.float32, np.int64]
    # By content, not by how it lies in memory.
    transforms.map([np.zeros((8, 2), np.float32)[::4]], transform)
    assert len(seen) == len(zeros)


@pytest.mark.parametrize(("name", "version"), [("b", "1"), ("a", "2"), ("a', '1", ""), ("a1", "1")])
def test_another_name_or_version_is_another_transform(name: str, version: str) -> None:
    cache, sample = in_memory(), [np.arange(3)]
    TransformCache(cache, "a", "1").map(sample, lambda x: x)
    seen, transform = counted(lambda x: x + 1)
    TransformCache(cache, name, version or "1").map(sample, transform)
    assert len(seen) == 1


def test_rows_of_a_batch_are_samples_and_only_the_missing_are_computed() -> None:
    transforms = TransformCache(in_memory(), "double", "1")
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    transforms.map(rows[1:2], lambda row: row * 2)
    seen, transform = counted(lambda row: row * 2)
    values = transforms.map(rows, transform)
    assert np.array_equal(np.stack(values), rows * 2)
    assert [row.tolist() for row in seen] == [rows[i].tolist() for i in (0, 2, 3)]


def test_without_a_cache_each_value_is_computed() -> None:
    seen, transform = counted(lambda x: x)
    sample = np.arange(3)
    (value,) = TransformCache(None, "a", "1").map([sample], transform)
    TransformCache(None, "a", "1").map([sample], transform)
    assert len(seen) == 2
    value[0] = 9
    assert sample[0] == 0


def test_what_cannot_be_kept_or_told_apart_is_refused() -> None:
    transforms = TransformCache(in_memory(), "a", "1")
    objects = np.array([{}, None], dtype=object)
    with pytest.raises(ValueError, match="dtype object holds Python objects"):
        transforms.map([objects], lambda x: x)
    with pytest.raises(ValueError, match="dtype object holds Python objects"):
        transforms.map([np.arange(2)], lambda x: objects)
    with pytest.raises(ValueError, match="must not be empty"):
        TransformCache(in_memory(), "a", "")


def test_an_error_of_the_transform_passes_through_and_keeps_nothing() -> None:
    transforms = TransformCache(in_memory(), "a", "1")
    with pytest.raises(ZeroDivisionError):
        transforms.map([np.arange(2), np.arange(3)], lambda x: x // 0 if len(x) < 0 else 1 // 0)
    seen, transform = counted(lambda x: x)
    transforms.map([np.arange(2)], transform)
    assert len(seen) == 1
