"""Which samples trained the committed weights: a chain of segments, and the proof drawn from it.

Each checkpoint commits one segment with the ids that its workers really read since the checkpoint
before; a segment names its predecessor by content, so the chain that ends at the final weights is
exactly what trained them, whatever was redone after a fault. Segments outlive pruned checkpoints.

    runs/<run>/samples/<last step>-<digest>.npz    first_step, ids int64 [S, G], previous
    S = steps in the segment, G = global batch in sequences, n = samples of a domain.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eagleray.platform.errors import IntegrityError
from eagleray.platform.storage import Storage, digest_bytes

_DIGEST_CHARS = 32


@dataclass(frozen=True)
class Segment:
    """The ids of the steps `first_step .. first_step + S - 1`."""

    first_step: int
    ids_SG: np.ndarray
    previous: str
    """Name of the segment before; empty for the first."""


@dataclass(frozen=True)
class Audit:
    """Whether every sample was used exactly once per epoch."""

    steps: int
    samples: int
    missing: int
    doubled: int

    @property
    def is_exact(self) -> bool:
        """No sample missing, none doubled."""
        return self.missing == 0 and self.doubled == 0


class SampleLog:
    """The segments of one run."""

    def __init__(self, storage: Storage, run_id: str) -> None:
        self._storage, self._place = storage, ("runs", run_id, "samples")

    def append(self, segment: Segment) -> str:
        """Keep a segment.

        Returns:
            Its name, which holds its digest.
        """
        buffer = io.BytesIO()
        np.savez(
            buffer,
            first_step=np.int64(segment.first_step),
            ids=segment.ids_SG.astype(np.int64, copy=False),
            previous=np.frombuffer(segment.previous.encode(), np.uint8),
        )
        data = buffer.getvalue()
        last = segment.first_step + len(segment.ids_SG)
        name = f"{last:08d}-{digest_bytes(data)[:_DIGEST_CHARS]}.npz"
        self._storage.put(data, *self._place, name)
        return name

    def read(self, name: str) -> Segment:
        """A segment by name.

        Raises:
            NotFoundError: It is missing.
            IntegrityError: It was changed after it was written.
        """
        data = self._storage.read(*self._place, name)
        if digest_bytes(data)[:_DIGEST_CHARS] != name.removesuffix(".npz").partition("-")[2]:
            raise IntegrityError(
                f"sample log {'/'.join(self._place)}/{name} was changed after it was written",
                "restore it from a copy; without it the run cannot be audited",
            )
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            previous = file["previous"].tobytes().decode()
            return Segment(int(file["first_step"]), file["ids"], previous)

    def chain(self, last: str) -> list[Segment]:
        """The segments that lead to `last`, oldest first."""
        segments: list[Segment] = []
        while last:
            segments.append(self.read(last))
            last = segments[-1].previous
        return segments[::-1]


def audit(segments: list[Segment], sizes: Sequence[int]) -> Audit:
    """Count what a chain of segments misses or doubles.

    In a complete epoch of a domain each of its n ids must occur exactly once; in the last, partial
    one at most once. A gap between segments counts all of its samples as missing, an overlap as
    doubled.

    Args:
        segments: From the first step on.
        sizes: Samples of each domain; ids count through them in this order.
    """
    missing = doubled = 0
    next_step = 0
    batch = segments[0].ids_SG.shape[1] if segments else 0
    for segment in segments:
        gap = segment.first_step - next_step
        missing += max(gap, 0) * batch
        doubled += max(-gap, 0) * batch
        next_step = segment.first_step + len(segment.ids_SG)
    ids = np.concatenate([s.ids_SG.reshape(-1) for s in segments]) if segments else np.empty(0)
    base = 0
    for size in sizes:
        of_domain = ids[(ids >= base) & (ids < base + size)]
        base += size
        for start in range(0, len(of_domain), size):
            epoch = of_domain[start : start + size]
            distinct = len(np.unique(epoch))
            doubled += len(epoch) - distinct
            if len(epoch) == size:
                missing += size - distinct
    return Audit(next_step, len(ids), missing, doubled)
