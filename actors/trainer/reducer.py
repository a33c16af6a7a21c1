"""Gradient averaging over data-parallel ranks, overlapped with the backward pass.

What torch's DistributedDataParallel does, with one difference: the buckets never change. DDP
rebuilds its buckets after the first iteration, so a run resumed at step k sums step k's gradients
in another layout than the undisturbed run did, and with three or more ranks the sums differ in the
last bit. Fixed buckets keep "same inputs, same weights" through any restart, and a restarted worker
does not wait for the compiler stack that DDP imports.
"""

import contextlib
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from eagleray.actors.trainer.collectives import Collectives, Pending
from eagleray.actors.trainer.seams import Seat

_NUM_VALUES = 2
_BUCKET_BYTES = 25 * 2**20  # as in DDP: large enough for bandwidth, small enough to overlap


class _Bucket:
    """Parameters whose gradients travel as one flat buffer."""

    def __init__(self, parameters: list[nn.Parameter], num_values: int = 0) -> None:
        self.parameters = parameters
        first = parameters[0]
        # Behind the gradients, numbers that are averaged with them.
        size = sum(parameter.numel() for parameter in parameters) + num_values
        self.flat = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.views: list[torch.Tensor] = []
        offset = 0
        for parameter in parameters:
            self.views.append(self.flat[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()
        self.waiting = len(parameters)
        self.work: Pending | None = None


class GradientReducer:
    """Averages gradients over the default process group.

    Use per optimizer step: `arm()` before the last micro-batch's backward, then `wait()`; the
    earlier micro-batches accumulate locally, so there is exactly one reduction per step. The last
    bucket is sent by `wait()`: before it, no other rank can finish the step. It carries one more
    number, by which all ranks learn in the same step that one of them wishes something.

    Args:
        parameters: All trained parameters, in an order that is the same on every rank.
        world_size: Ranks; with one, nothing is sent.
        peers: The ranks.
        bucket_bytes: Most bytes that travel together.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        world_size: int,
        peers: Collectives | None = None,
        bucket_bytes: int = _BUCKET_BYTES,
    ) -> None:
        self._world_size = world_size
        self._peers = peers or Collectives(Seat(0, world_size))
        self._armed = False
        self._num_sent = 0
        self._buckets: list[_Bucket] = []
        self._hooks: list[Any] = []
        if world_size == 1:
            return
        # Backward reaches the last layers first: their bucket is complete, and on its way, first.
        groups = _grouped(list(parameters)[::-1], bucket_bytes)
        for group in groups:
            bucket = _Bucket(group, num_values=_NUM_VALUES if group is groups[-1] else 0)
            self._buckets.append(bucket)
            for parameter in group:
                hook = self._hook(bucket)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._hooks.append(handle)

    def arm(self) -> None:
        """The next backward is the step's last: send buckets as soon as they are complete."""
        self._armed = True
        self._num_sent = 0
        for bucket in self._buckets:
            bucket.waiting = len(bucket.parameters)
            bucket.work = None

    def close(self) -> None:
        """Leave the parameters alone."""
        self.drop()
        for hook in self._hooks:
            hook.remove()

    def drop(self) -> None:
        """Forget a step that a lost peer has interrupted; its group must have been aborted."""
        self._armed = False
        for bucket in self._buckets:
            if bucket.work is not None:
                # It may still write to the bucket until it has failed.
                with contextlib.suppress(RuntimeError):
                    bucket.work.wait()
                bucket.work = None

    def wait(self, loss: float = 0.0, *, vote: bool = False) -> tuple[float, bool]:
        """Block until all gradients hold the average over the ranks.

        Args:
            loss: Of this rank.
            vote: What this rank wishes.

        Returns:
            The average of the losses, to the precision of a gradient, and whether any rank gave its
            vote; the same on all of them.

        Raises:
            PeerLostError: A peer is gone.
        """
        self._armed = False
        if not self._buckets:
            return loss, vote
        values = self._buckets[-1].flat[-_NUM_VALUES:]
        values[0], values[1] = loss, float(vote)
        # The last one, and what a parameter without gradient held up.
        while self._num_sent < len(self._buckets):
            self._send_next()
        for bucket in self._buckets:
            assert bucket.work is not None, "a bucket was not sent"
            bucket.work.wait()
            bucket.flat /= self._world_size
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view
        mean, votes = values.tolist()
        return float(mean), votes > 0

    def _hook(self, bucket: _Bucket):  # type: ignore[no-untyped-def]  # torch's own hook type
        def ready(_: nn.Parameter) -> None:
            if self._armed:
                bucket.waiting -= 1
                self._send_complete()

        return ready

    def _send_complete(self) -> None:
        # Collectives match by their order, so every rank sends the buckets in one order, as DDP
        # does, whichever of them is complete first.
        unsent = self._buckets[self._num_sent : -1]
        for _ in itertools.takewhile(lambda bucket: not bucket.waiting, unsent):
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[self._num_sent]
        self._num_sent += 1
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
        bucket.work = self._peers.begin_sum(bucket.flat)


def _grouped(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    groups: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        grows = groups and groups[-1][0].dtype == parameter.dtype
        if not grows or size + parameter.nbytes > bucket_bytes:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += parameter.nbytes
    return groups
