"""The loss on held-out tokens, over all ranks."""

import math

import numpy as np

from eagleray.actors.trainer.collectives import Collectives
from eagleray.actors.trainer.non_finite import NonFiniteLossError
from eagleray.actors.trainer.seams import BatchSource, Seat
from eagleray.actors.trainer.stepper import Stepper


def held_out_loss(
    stepper: Stepper,
    source: BatchSource,
    peers: Collectives,
    seat: Seat,
    num_batches: int,
    step: int,
) -> float:
    """Nats per token; the ranks share the batches, and all are given the same.

    Args:
        stepper: Evaluates.
        source: Of the held-out batches.
        peers: The ranks.
        seat: Of this one.
        num_batches: Of all ranks together.
        step: The newest one, for an error.

    Raises:
        NonFiniteLossError: It is no number, which can neither be recorded nor compared.
    """
    total, count = 0.0, 0
    for index in range(seat.rank, num_batches, seat.world_size):
        loss_sum, tokens = stepper.evaluate(source.eval_batch(index))
        total, count = total + loss_sum, count + tokens
    total, tokens_seen = peers.sums(np.array([total, float(count)])).tolist()
    loss = float(total / tokens_seen)
    if not math.isfinite(loss):
        what = f"training stopped: the held-out loss is {loss} at step {step}"
        fix = "look at the held-out data and at the losses before; lower train.optimizer.lr"
        raise NonFiniteLossError(what, fix, step)
    return loss
