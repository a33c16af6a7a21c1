"""The figures that a run reports, as plain values."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepRow:
    """Figures of the steps since the row before, over all ranks.

    Losses are means in nats per token; times are sums of rank 0 in seconds; `mfu` is the share of
    the peak that a plain matrix product reached on the same devices just before. A step whose
    update was skipped counts in no loss and no throughput.
    """

    attempt: int
    step: int
    loss: float | None
    """None: the updates of all these steps were skipped."""
    grad_norm: float
    lr: float
    tokens_per_s: float
    mfu: float
    data_s: float
    compute_s: float
    communication_s: float
    checkpoint_s: float
    eval_s: float
    eval_loss: float | None = None
    weights: dict[str, float] | None = None
    """Weight of each domain, if a mixture that follows the losses decided since the row before."""
    domain_losses: dict[str, float | None] | None = None
    """The losses that it decided by."""
    skipped_steps: int = 0
    """Steps since the beginning whose update was skipped, as something was not finite."""
