"""What the ranks of a group tell each other beside gradients; with one rank, nothing is sent.

A simulator may stand in for `Collectives`: nothing else of a rank's loop knows of the group.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from eagleray.actors.trainer.memory_needs import is_out_of_memory
from eagleray.actors.trainer.seams import Seat
from eagleray.platform.errors import ServiceError

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
        if is_out_of_memory(error):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise PeerLostError(f"a collective failed: {lines[0][:300]}") from error


class Collectives:
    """The ranks of the default process group, as seen from one of them.

    Every method is called by all ranks, in the same order.

    Args:
        seat: Of this rank.

    Raises:
        PeerLostError: From every method: another rank is gone.
    """

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def begin_sum(self, flat: torch.Tensor) -> "Pending":
        """Begin to replace a tensor by its sum over the ranks, in place."""
        with peers_needed():
            return _Work(dist.all_reduce(flat, async_op=True))

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sums over the ranks; `values` stays as it is."""
        if self._seat.world_size == 1:
            return values
        tensor = torch.from_numpy(values.copy()).to(_device())
        with peers_needed():
            dist.all_reduce(tensor)
        summed: np.ndarray = tensor.cpu().numpy()
        return summed

    def array_from(self, array: np.ndarray, source: int) -> np.ndarray:
        """The array of rank `source`; of the same shape and type on all ranks."""
        if self._seat.world_size == 1:
            return array
        tensor = torch.from_numpy(array.copy()).to(_device())
        with peers_needed():
            dist.broadcast(tensor, src=source)
        sent: np.ndarray = tensor.cpu().numpy()
        return sent

    def share_chunk(self, flat: torch.Tensor, source: int) -> None:
        """Replace a flat tensor by that of rank `source`, in place."""
        sent = flat.to(_device())
        with peers_needed():
            dist.broadcast(sent, src=source)
        flat.copy_(sent)

    def from_rank_zero(self, value: int) -> int:
        """Rank 0's number."""
        return int(self.array_from(np.array([value], dtype=np.int64), 0)[0])

    def values_from(self, values: Any, source: int) -> Any:
        """Plain values of rank `source`; what the others give is not looked at."""
        data = np.frombuffer(json.dumps(values).encode(), dtype=np.uint8)
        size = int(self.array_from(np.array([len(data)], dtype=np.int64), source)[0])
        if self._seat.rank != source:
            data = np.zeros(size, dtype=np.uint8)
        return json.loads(self.array_from(data, source).tobytes())

    def share(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Fill tensors with those of rank `source`, in few messages."""
        for chunk in _chunks(tensors):
            flat = torch.cat([tensor.detach().reshape(-1).cpu() for tensor in chunk])
            self.share_chunk(flat, source)
            with torch.no_grad():
                offset = 0
                for tensor in chunk:
                    part = flat[offset : offset + tensor.numel()]
                    tensor.copy_(part.view_as(tensor))
                    offset += tensor.numel()


def agree_on(start: int, peers: Collectives, seat: Seat) -> None:
    """Refuse to train from states of different steps, as from a store that died between.

    Args:
        start: The step of this rank's state.
        peers: The ranks.
        seat: Of this one.

    Raises:
        ServiceError: Rank 0 was given that of another step.
    """
    lead = peers.from_rank_zero(start)
    if lead != start:
        raise ServiceError(
            f"rank {seat.rank} was given the state after step {start}, rank 0 that after {lead}: "
            "the checkpoint store was restarted in between",
            "the next attempt starts from one state",
        )


class Pending(Protocol):
    """A sum on its way."""

    def wait(self) -> None:
        """Block until it is there."""


class _Work:
    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        with peers_needed():
            self._work.wait()


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    chunk: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if chunk and (size + tensor.nbytes > _CHUNK_BYTES or tensor.dtype != chunk[0].dtype):
            yield chunk
            chunk, size = [], 0
        chunk.append(tensor)
        size += tensor.nbytes
    if chunk:
        yield chunk


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"
