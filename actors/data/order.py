"""The sample order: a pure function of (seed, position), with nothing to save but the step.

Position g = step * batch_size + slot counts samples since the start of the run. Epoch e = g // n
runs over all n samples once, in an order of its own, and epochs follow each other without a gap.
The order inside an epoch is a keyed permutation of 0..n-1, evaluated only where it is needed: any
step costs the same, and neither a shuffle buffer nor an index of n entries exists.

With several domains a mixture says which domain each position draws from and how many of that
domain came before; what is said above then holds inside each domain, with n its size.

The permutation is a generalized Feistel network on Z_a x Z_b with a * b just above n (Black and
Rogaway 2002, "Ciphers with arbitrary finite domains"); values of n and above are walked on until
they fall inside. The round function is SplitMix64's finalizer (Steele et al. 2014), which mixes
well and is no cipher: the order is to be random, not secret.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eagleray.actors.data.mixture import Mixture

IntArray = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

# Eight rounds: with fewer, neighbours stay visibly correlated on domains of a few dozen samples.
_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_DOMAIN_STRIDE = np.uint64(0xD1B54A32D192ED03)  # odd: no two domains share keys
_LIMIT = 2**63


def batch_ids(seed: int, num_samples: int, step: int, batch_size: int) -> IntArray:
    """Sample ids of a global batch, `int64[batch_size]`.

    The same on every machine and whatever reads it: slices for ranks are cut from the result.

    Args:
        seed: 0 <= seed < 2**63.
        num_samples: Size of the split. A batch larger than it runs into the next epochs.
        step: Counted from 0.
        batch_size: Samples per global batch.

    Raises:
        ValueError: An argument is out of range, or the position does not fit 63 bits.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples={num_samples} must be at least 1")
    first = _first_position(seed, step, batch_size)
    position_B = np.arange(first, first + batch_size, dtype=np.uint64)
    return _ordered(seed, _word(0), _word(num_samples), position_B)


def mixed_batch_ids(
    seed: int, sizes: Sequence[int], mixture: Mixture, step: int, batch_size: int
) -> IntArray:
    """Sample ids of a global batch drawn from several domains, `int64[batch_size]`.

    Ids count through the domains in their order: those of domain d begin at the sum of the sizes
    before it. With one domain it is `batch_ids`.

    Args:
        seed: 0 <= seed < 2**63.
        sizes: Samples of each domain; only one that is never drawn from may be empty.
        mixture: Over as many domains.
        step: Counted from 0.
        batch_size: Samples per global batch.

    Raises:
        ValueError: An argument is out of range, or a domain that is drawn from has no samples.
    """
    first = _first_position(seed, step, batch_size)
    domain_B, index_B = mixture.draw(first, batch_size)
    size_D = np.array(sizes, dtype=np.int64)
    empty = np.flatnonzero(size_D[domain_B] < 1)
    if empty.size:
        domain = int(domain_B[empty[0]])
        raise ValueError(f"domain {domain} is drawn from and has {sizes[domain]} samples")
    base_D = np.cumsum(size_D) - size_D
    return base_D[domain_B] + _ordered(
        seed, domain_B.astype(np.uint64), size_D[domain_B].astype(np.uint64),
        index_B.astype(np.uint64),
    )  # fmt: skip


def domains_of(ids: IntArray, sizes: Sequence[int]) -> IntArray:
    """The domain of each sample id, int64 of the same shape."""
    ends = np.cumsum(np.array(sizes, dtype=np.int64))
    return np.searchsorted(ends, ids, side="right").astype(np.int64)


def slice_for_rank(ids: IntArray, rank: int, world_size: int) -> IntArray:
    """The contiguous part of a global batch that one rank trains on; a view.

    Raises:
        ValueError: The batch does not divide evenly, or there is no such rank.
    """
    start, stop = slice_bounds(len(ids), rank, world_size)
    return ids[start:stop]


def slice_bounds(batch_size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Where a rank's part of a global batch starts and ends.

    Raises:
        ValueError: The batch does not divide evenly, or there is no such rank.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} must be in 0..{world_size - 1} (world_size={world_size})")
    if batch_size % world_size:
        raise ValueError(
            f"batch_size {batch_size} must be a multiple of world_size {world_size}: "
            f"{batch_size % world_size} samples would be left over"
        )
    share = batch_size // world_size
    return rank * share, (rank + 1) * share


def _first_position(seed: int, step: int, batch_size: int) -> int:
    if batch_size < 1 or step < 0 or not 0 <= seed < _LIMIT:
        raise ValueError(
            f"batch_size={batch_size} must be at least 1, step={step} at least 0 "
            f"and seed={seed} in [0, 2**63)"
        )
    first = step * batch_size
    if first + batch_size > _LIMIT:
        raise ValueError(f"step={step} x batch_size={batch_size} exceeds 2**63 samples")
    return first


def _ordered(seed: int, domain: _Words, size: _Words, position_B: _Words) -> IntArray:
    """What stands at each position of its domain's endless order.

    `domain` and `size` are of one element or one for each position.
    """
    epoch_B, index_B = np.divmod(position_B, size)
    key_B = _mix(epoch_B + _mix(_word(seed)) + _DOMAIN_STRIDE * domain)
    return _permute(index_B, key_B, size).astype(np.int64)


def _permute(index_B: _Words, key_B: _Words, size: _Words) -> _Words:
    """Where each index goes under its key; a bijection of 0..size-1 for equal keys."""
    a, b = _factors(size)
    rounds = [_mix(key_B + _word(number)) for number in range(_ROUNDS)]
    value_B = _feistel(index_B, rounds, a, b)
    outside = np.flatnonzero(value_B >= size)
    # Walking a cycle must end: it leads back to the index it started from, which is inside.
    while outside.size:
        keys = [key[outside] for key in rounds]
        value_B[outside] = _feistel(value_B[outside], keys, _at(a, outside), _at(b, outside))
        outside = outside[value_B[outside] >= _at(size, outside)]
    return value_B


def _factors(size: _Words) -> tuple[_Words, _Words]:
    """Two factors just above each size, as equal as can be."""
    distinct, place = np.unique(size, return_inverse=True)
    widths = [math.isqrt(int(n) - 1) + 1 for n in distinct]
    heights = [-(-int(n) // width) for n, width in zip(distinct, widths, strict=True)]
    return np.array(widths, np.uint64)[place], np.array(heights, np.uint64)[place]


def _at(values: _Words, places: npt.NDArray[np.intp]) -> _Words:
    return values if values.size == 1 else values[places]


def _feistel(value_B: _Words, rounds: list[_Words], a: _Words, b: _Words) -> _Words:
    left_B, right_B = value_B // b, value_B % b
    for number, key_B in enumerate(rounds):
        if number % 2:
            right_B = (right_B + _mix(left_B + key_B) % b) % b
        else:
            left_B = (left_B + _mix(right_B + key_B) % a) % a
    return left_B * b + right_B


def _word(value: int) -> _Words:
    # One element, not a scalar: numpy warns when scalars wrap, and wrapping is what is wanted.
    return np.array([value], dtype=np.uint64)


def _mix(word: _Words) -> _Words:
    """SplitMix64: every bit of the input moves every bit of the output."""
    word = word + _GOLDEN
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
