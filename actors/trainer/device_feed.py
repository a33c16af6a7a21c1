"""A rank's batches on its device; to a GPU from pinned memory, by a stream of its own.

B = sequences of this rank, T = tokens per sequence.
"""

import numpy as np
import torch

_NUM_BUFFERS = 2


class DeviceFeed:
    """Copies batches of token ids to a device, where they are int64.

    On a GPU a copy runs beside what was launched before. There are two pinned buffers, used in
    turn; one is written again only when the copy out of it has ended.

    Args:
        device: Where to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._turn = 0
        self._buffers: list[torch.Tensor] = []
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._copied = [torch.cuda.Event() for _ in range(_NUM_BUFFERS)]  # type: ignore[no-untyped-call]
            self._buffers = [_pinned(0) for _ in range(_NUM_BUFFERS)]

    def put(self, tokens_BT1: np.ndarray) -> torch.Tensor:
        """The batch on the device, int64 [B, T + 1]; the array may be read-only or reused at once.

        Args:
            tokens_BT1: int32 [B, T + 1].
        """
        if not self._buffers:
            return torch.from_numpy(tokens_BT1.astype(np.int64)).to(self._device)
        turn, self._turn = self._turn, (self._turn + 1) % _NUM_BUFFERS
        self._copied[turn].synchronize()
        if self._buffers[turn].numel() < tokens_BT1.size:
            self._buffers[turn] = _pinned(tokens_BT1.size)
        host = self._buffers[turn][: tokens_BT1.size].view(tokens_BT1.shape)
        np.copyto(host.numpy(), tokens_BT1)
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            tokens = host.to(self._device, non_blocking=True)
            self._copied[turn].record(self._stream)
        current.wait_stream(self._stream)
        # Its memory must not be given to others while the current stream may read it.
        tokens.record_stream(current)
        return tokens.long()


def _pinned(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int32, pin_memory=True)
