"""Dear transforms of samples, kept in the feature cache by the content of what they were given.

    joined = TransformCache(cache, "weather", "2").map(batch.features, join_weather)

The key is the digest of a sample's bytes, dtype and shape with the name and version of the
transform; so a value is found by any process and in any epoch, and nothing is ever invalidated:
another function is another version. What is kept is a NumPy .npy file, which holds dtype and shape.
"""

import io
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from eagleray.actors.cache.feature_cache import FeatureCache

AnyArray = npt.NDArray[Any]


class TransformCache:
    """One transform, array in and array out. Not for several threads.

    Args:
        cache: Where values are kept; it belongs to the caller. None, as of a cache that is turned
            off: each value is computed.
        name: Of the transform.
        version: Another one for each change of what the transform gives for the same sample.

    Raises:
        ValueError: The name or the version is empty.
    """

    def __init__(self, cache: FeatureCache | None, name: str, version: str) -> None:
        if not name or not version:
            raise ValueError(
                f"name {name!r} and version {version!r} must not be empty: they tell transforms "
                "apart"
            )
        self._cache = cache
        self._prefix = repr(("transform", name, version)).encode()

    def map(
        self, samples: Iterable[AnyArray], transform: Callable[[AnyArray], AnyArray]
    ) -> list[AnyArray]:
        """The transform of each sample; new arrays, which belong to the caller.

        Args:
            samples: Arrays, or one array of them.
            transform: Called with each sample that is missing; samples that are equal are one. Its
                value must follow from the sample alone.

        Raises:
            ValueError: A sample or a value holds Python objects.
            Exception: Whatever `transform` raises; nothing of this call is kept then.
        """
        samples = [np.asarray(sample) for sample in samples]
        if self._cache is None:
            return [np.array(transform(sample)) for sample in samples]
        kept = self._cache.get_or_compute_many(
            [self._key(sample) for sample in samples],
            lambda missing: [_packed(np.asarray(transform(samples[at]))) for at in missing],
        )
        return [_unpacked(value) for value in kept]

    def _key(self, sample: AnyArray) -> bytes:
        _refuse_objects(sample)
        layout = repr((np.lib.format.dtype_to_descr(sample.dtype), sample.shape)).encode()
        digest = blake2b(layout, digest_size=32)
        digest.update(np.ascontiguousarray(sample).tobytes())
        return self._prefix + digest.digest()


def _packed(array: AnyArray) -> bytes:
    _refuse_objects(array)
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=False)
    return file.getvalue()


def _unpacked(value: bytes) -> AnyArray:
    array: AnyArray = np.lib.format.read_array(io.BytesIO(value), allow_pickle=False)
    return array


def _refuse_objects(array: AnyArray) -> None:
    if array.dtype.hasobject:
        raise ValueError(
            f"an array of dtype {array.dtype} holds Python objects, and only numbers and fixed "
            "texts can be kept: convert it first"
        )
