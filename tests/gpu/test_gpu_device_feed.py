"""Batches reach the device whole, however fast they follow each other."""

import numpy as np
import pytest
import torch

from eagleray.actors.trainer.device_feed import DeviceFeed

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
)
def test_batches_that_follow_each_other_arrive_as_they_were(device: str) -> None:
    feed, draw = DeviceFeed(torch.device(device)), np.random.default_rng(0)
    sent, got = [], []
    scratch = np.empty((64, 1025), np.int32)
    for number in range(50):
        rows = 1 + number % 64
        batch = scratch[:rows]
        batch[:] = draw.integers(0, 2**31 - 1, batch.shape, dtype=np.int32)
        sent.append(batch.copy())
        batch.flags.writeable = False
        got.append(feed.put(batch))
        # The array is the caller's again.
        scratch[:] = -1
    for want, tokens in zip(sent, got, strict=True):
        assert tokens.device.type == device
        assert tokens.dtype == torch.int64
        assert np.array_equal(tokens.cpu().numpy(), want)
