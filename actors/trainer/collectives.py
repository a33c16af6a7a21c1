"""What the ranks of a group tell each other beside gradients; with one rank, nothing is sent.

Everything here is called by all ranks of the default process group, in the same order.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eagleray.actors.trainer.seams import Seat

_CHUNK_BYTES = 25 * 2**20


class PeerLostError(RuntimeError):
    """Another rank of the group is gone; model and optimizer are those of a whole step."""


@contextlib.contextmanager
def peers_needed() -> Iterator[None]:
    """Name the failure of a collective.

    Raises:
        PeerLostError: It failed.
    """
    try:
        yield
    except RuntimeError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise PeerLostError(f"a collective failed: {lines[0][:300]}") from error


def over_ranks(values: list[float], seat: Seat) -> list[float]:
    """Sums over the ranks."""
    if seat.world_size == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=_device())
    with peers_needed():
        dist.all_reduce(tensor)
    summed: list[float] = tensor.tolist()
    return summed


def sums_over_ranks(sums: np.ndarray, seat: Seat) -> np.ndarray:
    """Exact sums of whole numbers over the ranks; `sums` stays as it is."""
    if seat.world_size == 1:
        return sums
    tensor = torch.from_numpy(sums.copy()).to(_device())
    with peers_needed():
        dist.all_reduce(tensor)
    summed: np.ndarray = tensor.cpu().numpy()
    return summed


def from_rank_zero(value: int, seat: Seat) -> int:
    """Rank 0's number."""
    return int(array_from(np.array([value], dtype=np.int64), 0, seat)[0])


def array_from(array: np.ndarray, source: int, seat: Seat) -> np.ndarray:
    """The array of rank `source`; of the same shape and type on all ranks."""
    if seat.world_size == 1:
        return array
    tensor = torch.from_numpy(array.copy()).to(_device())
    with peers_needed():
        dist.broadcast(tensor, src=source)
    sent: np.ndarray = tensor.cpu().numpy()
    return sent


def values_from(values: Any, source: int, seat: Seat) -> Any:
    """Plain values of rank `source`; what the others give is not looked at."""
    data = np.frombuffer(json.dumps(values).encode(), dtype=np.uint8)
    size = int(array_from(np.array([len(data)], dtype=np.int64), source, seat)[0])
    if seat.rank != source:
        data = np.zeros(size, dtype=np.uint8)
    return json.loads(array_from(data, source, seat).tobytes())


def share(tensors: Sequence[torch.Tensor], source: int) -> None:
    """Fill tensors with those of rank `source`, in few messages."""
    chunk: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if chunk and (size + tensor.nbytes > _CHUNK_BYTES or tensor.dtype != chunk[0].dtype):
            _share_chunk(chunk, source)
            chunk, size = [], 0
        chunk.append(tensor)
        size += tensor.nbytes
    if chunk:
        _share_chunk(chunk, source)


def _share_chunk(tensors: list[torch.Tensor], source: int) -> None:
    flat = torch.cat([tensor.detach().reshape(-1).to(_device()) for tensor in tensors])
    with peers_needed():
        dist.broadcast(flat, src=source)
    with torch.no_grad():
        offset = 0
        for tensor in tensors:
            part = flat[offset : offset + tensor.numel()]
            tensor.copy_(part.view_as(tensor))
            offset += tensor.numel()


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"
