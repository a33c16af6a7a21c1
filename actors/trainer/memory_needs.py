"""What training takes of a process's memory, and an error that says so when there is not enough.

B = sequences of a micro-batch, T = tokens per sequence, D = model dim, V = vocabulary, F = ffn_dim.
"""

import re
from dataclasses import dataclass

from eagleray.actors.trainer.seams import LoopSpec
from eagleray.platform.errors import RunFailedError

_FLOAT_BYTES = 4
_ASKED = re.compile(
    r"(?:tried to allocate|Unable to allocate|failed to allocate) ([\d.]+) ?(bytes|[KMGTPE]i?B)",
    re.I,
)
_ALLOCATOR = re.compile(
    r"can't allocate memory|not enough memory|out of memory|ALLOC_FAILED|bad_alloc", re.I
)


class TrainingMemoryError(RunFailedError):
    """A training process has run out of memory."""


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes that one rank's training holds at its peak, beside the libraries it loads."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @classmethod
    def of(cls, spec: LoopSpec) -> "MemoryNeeds":
        """Estimate them; fp32 throughout, which bf16 stays below."""
        model, train = spec.model, spec.train
        weights = model.num_parameters * _FLOAT_BYTES
        # Those of a step beside the buckets in which they travel.
        fewest, most = train.worker_range
        copies = 2 if most > 1 else 1
        tokens = min(train.micro_batch_size, train.batch_size // fewest) * spec.seq_len
        queries, keys = (n * model.head_dim for n in (model.num_heads, model.num_kv_heads))
        # Per layer: its input, two norms and the state between; queries, keys, values and what they
        # gather; four of the feed-forward. At the end the logits, their logarithm, its gradient.
        layer = 4 * model.dim + 2 * queries + 2 * keys + 4 * model.ffn_dim
        floats = model.num_layers * layer + 2 * model.dim + 3 * model.vocab_size
        return cls(weights, copies * weights, 2 * weights, tokens * floats * _FLOAT_BYTES)

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: Python's, NumPy's, or torch's on any device."""
    if isinstance(error, MemoryError):
        return True
    # By name: torch's own type would load torch.
    named = type(error).__name__ == "OutOfMemoryError"
    return isinstance(error, RuntimeError) and (named or bool(_ALLOCATOR.search(str(error))))


def asked_for(text: str) -> str:
    """How much an allocator's message says was asked for; empty if it does not say."""
    found = _ASKED.search(text)
    if found is None:
        return ""
    return size(int(found[1])) if found[2].lower() == "bytes" else f"{found[1]} {found[2]}"


def out_of_memory(cause: str, spec: LoopSpec) -> TrainingMemoryError:
    """The error of a training process that ran out of memory.

    Args:
        cause: How, as a clause: what failed or who ended it.
        spec: What it trains.
    """
    needs, train = MemoryNeeds.of(spec), spec.train
    what = (
        f"a training process ran out of memory: {cause}; training takes about {size(needs.total)} "
        f"per process: weights {size(needs.weights)}, gradients {size(needs.gradients)}, AdamW "
        f"{size(needs.optimizer)}, activations {size(needs.activations)} at "
        f"train.micro_batch_size {train.micro_batch_size}"
    )
    steps = ["run fewer workers on each node"]
    if train.micro_batch_size > 1:
        steps.insert(0, f"lower train.micro_batch_size (now {train.micro_batch_size})")
    if train.spares:
        steps.append("set train.spares: 0")
    return TrainingMemoryError(what, f"{', or '.join(steps)}; or make the model smaller")


def size(num_bytes: int) -> str:
    """`3.2 GB`."""
    value = float(num_bytes)
    for unit in ("bytes", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"
