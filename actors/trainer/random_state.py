"""The random stream of one rank: how it begins, and how it travels in snapshots and journals."""

from collections.abc import Mapping

import numpy as np
import torch

_MAX_SEED = 2**63


def begin_stream(seed: int, rank: int, step: int) -> None:
    """Begin a rank's stream, by seed, rank and the step that it goes on from, and nothing else."""
    torch.manual_seed((seed * 1_000_003 + rank + step * 7_368_787) % _MAX_SEED)


def stream_array(rank: int) -> dict[str, np.ndarray]:
    """The stream's state as an array of a snapshot, uint8, by its name."""
    return {_name(rank): torch.get_rng_state().numpy().copy()}


def restore_stream(arrays: Mapping[str, np.ndarray], rank: int) -> None:
    """Go on with the stream that a snapshot holds for a rank, if it does."""
    state = arrays.get(_name(rank))
    if state is not None:
        torch.set_rng_state(torch.from_numpy(np.array(state, copy=True)))


def stream_bytes() -> bytes:
    """The stream's state as it is noted in a journal."""
    return bytes(torch.get_rng_state().numpy().tobytes())


def restore_bytes(noted: bytes) -> None:
    """Go on with a stream that was noted."""
    torch.set_rng_state(torch.from_numpy(np.frombuffer(noted, dtype=np.uint8).copy()))


def _name(rank: int) -> str:
    return f"rng.{rank}.cpu"
