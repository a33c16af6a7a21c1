"""One optimizer step: forward, backward, averaging, clipping, update; the same on every rank.

B = sequences of this rank in the global batch, T = tokens per sequence, V = vocabulary.
"""

import contextlib
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from eagleray.actors.trainer.collectives import Collectives
from eagleray.actors.trainer.device_feed import DeviceFeed
from eagleray.actors.trainer.non_finite import poison_of, stopped_by
from eagleray.actors.trainer.reducer import GradientReducer
from eagleray.actors.trainer.schedule import learning_rate
from eagleray.platform.config import AdamWConfig, TrainConfig


@dataclass(frozen=True)
class StepResult:
    """Figures of one step; `loss_sum` and `tokens` are this rank's share."""

    loss_sum: float
    tokens: int
    grad_norm: float
    is_applied: bool
    """The update; if not, weights and optimizer are as before the step."""
    compute_s: float
    communication_s: float
    before_update_s: float
    is_pause: bool = False
    """Whether a rank wants all to pause after this step; the same on all of them."""


@dataclass(frozen=True)
class Losses:
    """What this rank's forward and backward gave, before anything is shared with other ranks."""

    loss_sum: float
    tokens: int
    loss_B: np.ndarray | None = None
    """Mean loss of each sequence, float64, if it was asked for."""


Admits = Callable[[int, float, float], bool]
"""Whether a step's update is to be applied, by its number, loss and gradient norm over all ranks;
alike on every rank."""


def if_finite(step: int, loss: float, grad_norm: float) -> bool:
    """Admit each step whose figures are finite.

    Raises:
        NonFiniteLossError: One of them is not.
    """
    poison = poison_of(step, loss, grad_norm)
    if poison is not None:
        raise stopped_by(poison)
    return True


class Stepper:
    """Holds model and optimizer of one rank, and takes steps.

    Args:
        model: Maps tokens [B, T] to logits [B, T, V].
        config: Hyper-parameters.
        world_size: Data-parallel ranks; the loss is the mean over the global batch.
        clock: Seconds.

    `before_update` is called in each step when parameters and optimizer are about to change,
    `wants_pause` just before the ranks exchange their last gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        world_size: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model, self.config = model, config
        self.optimizer = make_optimizer(model, config.optimizer)
        self._reducer = GradientReducer(model.parameters(), world_size)
        self._device = torch.device(config.device)
        self._feed = DeviceFeed(self._device)
        self._clock = clock
        self.before_update: Callable[[], None] = lambda: None
        self.wants_pause: Callable[[], bool] = lambda: False

    def step(
        self,
        step: int,
        tokens_BT1: np.ndarray,
        note: Callable[[Losses], None] = lambda _: None,
        *,
        wants_losses: bool = False,
        admits: Admits = if_finite,
    ) -> StepResult:
        """Train on this rank's part of the global batch.

        Args:
            step: Number of the step, from 0.
            tokens_BT1: int32 [B, T + 1]: inputs and, shifted by one, targets.
            note: Called before any rank can finish the step.
            wants_losses: Give `note` the loss of each sequence as well.
            admits: Decides about the update; what it raises ends the step without one.
        """
        started = self._clock()
        tokens = self._feed.put(tokens_BT1)
        chunks = torch.split(tokens, self.config.micro_batch_size)
        self.optimizer.zero_grad(set_to_none=True)
        loss_sum, losses = 0.0, []
        for index, chunk in enumerate(chunks):
            if index == len(chunks) - 1:
                self._reducer.arm()
            loss_b = self._losses(chunk)
            loss = loss_b.mean() * (len(chunk) / len(tokens))
            losses.append(loss_b.detach())
            loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.item() * tokens.shape[0] * (tokens.shape[1] - 1)
        count = tokens.shape[0] * (tokens.shape[1] - 1)
        by_sequence = torch.cat(losses).double().cpu().numpy() if wants_losses else None
        note(Losses(loss_sum, count, by_sequence))
        computed = self._clock()
        mean_loss, is_pause = self._reducer.wait(loss_sum / count, vote=self.wants_pause())
        reduced = self._clock()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_grad_norm).item()
        joining = self._clock()
        # Also where the loss is no number: the state that is being copied is from before it.
        self.before_update()
        joined = self._clock()
        is_applied = admits(step, mean_loss, norm)
        if is_applied:
            self._update(step)
        ended = self._clock()
        compute_s = (computed - started) + (joining - reduced) + (ended - joined)
        return StepResult(
            loss_sum, count, norm, is_applied, compute_s, reduced - computed, joined - joining,
            is_pause,
        )  # fmt: skip

    def _update(self, step: int) -> None:
        lr = learning_rate(step, self.config.steps, self.config.optimizer.lr, self.config.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def drop(self) -> None:
        """Forget a step that a lost peer has interrupted; model and optimizer are as before it."""
        self._reducer.drop()
        self.optimizer.zero_grad(set_to_none=True)

    def reset(self) -> None:
        """Forget all that the optimizer has seen."""
        self.drop()
        self.optimizer.state.clear()

    def span(self, world_size: int, peers: Collectives) -> None:
        """Average over these ranks from now on."""
        self._reducer.close()
        self._reducer = GradientReducer(self.model.parameters(), world_size, peers)

    @torch.no_grad()
    def evaluate(self, tokens_BT1: np.ndarray) -> tuple[float, int]:
        """Sum of the loss in nats over held-out tokens, and their number."""
        total = 0.0
        tokens = self._feed.put(tokens_BT1)
        for chunk in torch.split(tokens, self.config.micro_batch_size):
            total += self._losses(chunk).sum().item() * (chunk.shape[1] - 1)
        return total, tokens.shape[0] * (tokens.shape[1] - 1)

    def _losses(self, tokens_BT1: torch.Tensor) -> torch.Tensor:
        """Mean loss of each sequence, float32 [B]."""
        precision = (
            torch.autocast(self._device.type, dtype=torch.bfloat16)
            if self.config.precision == "bf16"
            else contextlib.nullcontext()
        )
        with precision:
            logits_BTV = self.model(tokens_BT1[:, :-1])
        targets_BT = tokens_BT1[:, 1:]
        losses = F.cross_entropy(
            logits_BTV.float().flatten(0, 1), targets_BT.flatten(), reduction="none"
        )
        return losses.view_as(targets_BT).mean(dim=1)


class EagerAdamW(torch.optim.AdamW):
    """torch's AdamW without the hooks of its compiler.

    They import `torch._dynamo`, more than a second of a core, at each start of a worker.
    """

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        inspect.unwrap(torch.optim.AdamW.step)(self, closure)


def make_optimizer(model: nn.Module, config: AdamWConfig) -> EagerAdamW:
    """AdamW; matrices decay, vectors (norms) do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return EagerAdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)
