"""Tensors from a GPU into a snapshot's arrays, by a stream beside the one that trains."""

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from eagleray.actors.checkpoint.snapshot_buffer import SnapshotBuffer


class DeviceCopy:
    """Copies the tensors that are on a GPU; does nothing for others.

    A shared buffer is pinned when it is first used, so that copies run beside the kernels.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._ready: torch.cuda.Event | None = None
        # Never unmapped: the driver has their pages.
        self._pinned: dict[bytes, SnapshotBuffer] = {}

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Call on the thread that trains: copies start after what it has launched so far."""
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if device is None:
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._ready.record(torch.cuda.current_stream(device))

    def start(
        self,
        tensors: Mapping[str, torch.Tensor],
        arrays: Mapping[str, np.ndarray],
        buffer: SnapshotBuffer | None,
    ) -> None:
        """Launch the copies."""
        if self._stream is None or self._ready is None:
            return
        if buffer is not None and buffer.name.token not in self._pinned:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            error = runtime.cudaHostRegister(buffer.address, buffer.mapped_bytes, 0)
            torch.cuda.check_error(int(error))
            self._pinned[buffer.name.token] = buffer
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            for name, tensor in tensors.items():
                if tensor.is_cuda:
                    torch.from_numpy(arrays[name]).copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        """Return when they are done."""
        if self._stream is not None:
            self._stream.synchronize()
