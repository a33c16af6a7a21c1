"""The yardstick of MFU: what a plain matrix product reaches on the same device and threads."""

import time
from collections.abc import Callable

import torch

_SIZE = 768
_ROUNDS = 12


def measure_peak_flops(device: str, clock: Callable[[], float] = time.perf_counter) -> float:
    """FLOP/s of a plain fp32 matrix product on the threads training uses."""
    a = torch.ones(_SIZE, _SIZE, device=device)
    best = float("inf")
    for _ in range(_ROUNDS):
        begun = clock()
        float((a @ a)[0, 0].item())  # item() waits for the device
        best = min(best, clock() - begun)
    return 2 * float(_SIZE) ** 3 / best
