"""How far to read ahead, and by how many threads: tuned from how long reads and steps take.

    r = time of a read, s = time between two calls without the waiting, both smoothed

Reading ahead saves min(r, s) of a step at most, and a hand-over between threads costs HANDOVER_S of
it; below that batches are read where they are asked for. Otherwise r/s reads must be under way on
average (Little's law, doi:10.1287/opre.9.3.383), with half as many again for their spread. Behind
them lies a slack, doubled whenever a caller had to wait, and let go of while none has to.
"""

import math

HANDOVER_S = 0.2e-3
"""Measured on two cores: a batch of 32 samples from the page cache took a caller who did nothing
else 0.17 ms to read, and 0.4 ms to be given by a thread."""
MAX_FETCHERS = 8
MAX_DEPTH = 64
MAX_BYTES = 256_000_000
"""Of all batches that are held ahead."""

_SMOOTHING = 0.2
_SPREAD = 1.5
_LEAST_SLACK = 2
_CALM_CALLS = 64
# A caller that waits less than this share of a step was not held up.
_NO_WAIT_SHARE = 0.1


class Pace:
    """The tuning of one reader; plain arithmetic, without clock or threads.

    Args:
        depth: Batches to read ahead; None: tuned.
        fetchers: Threads that read; None: tuned.
    """

    def __init__(self, depth: int | None = None, fetchers: int | None = None) -> None:
        self._depth, self._fetchers = depth, fetchers
        self._read_s: float | None = None
        self._step_s: float | None = None
        self._batch_bytes = 1
        self._slack, self._calm, self._is_inline = _LEAST_SLACK, 0, False

    @property
    def depth(self) -> int:
        """Batches to hold ahead; 0: none."""
        if self._depth is not None:
            return self._depth
        if self._is_inline:
            return 0
        return self._within_bytes(2 * self.fetchers + self._slack)

    @property
    def fetchers(self) -> int:
        """Threads that should read."""
        if self._fetchers is not None:
            return self._fetchers
        if self._read_s is None or self._step_s is None:
            return 1
        busy = self._read_s / max(self._step_s, 1e-9)
        return max(1, min(math.ceil(_SPREAD * busy), MAX_FETCHERS))

    @property
    def most(self) -> int:
        """Batches that may be held ahead: more than `depth` if that was larger before."""
        return self._depth if self._depth is not None else self._within_bytes(MAX_DEPTH)

    def read(self, seconds: float, num_bytes: int) -> None:
        """A batch of so many bytes was read."""
        self._read_s = _smoothed(self._read_s, seconds)
        self._batch_bytes = max(1, num_bytes)
        self._weigh()

    def asked(self, step_s: float, wait_s: float, *, was_ready: bool) -> None:
        """The next batch was asked for, so long after the last one was given, and waited for."""
        self._step_s = _smoothed(self._step_s, step_s)
        self._weigh()
        if self._is_inline:
            return
        if not was_ready and wait_s > _NO_WAIT_SHARE * self._step_s:
            self._slack, self._calm = min(2 * self._slack, MAX_DEPTH), 0
            return
        self._calm += 1
        if self._calm == _CALM_CALLS:
            self._slack, self._calm = max(self._slack * 3 // 4, _LEAST_SLACK), 0

    def _within_bytes(self, depth: int) -> int:
        return max(1, min(depth, MAX_DEPTH, MAX_BYTES // self._batch_bytes))

    def _weigh(self) -> None:
        """Choose between threads and none; not back again for a little."""
        if self._read_s is None or self._step_s is None:
            return
        saved_s = min(self._read_s, self._step_s)
        self._is_inline = saved_s < HANDOVER_S * (1.5 if self._is_inline else 0.75)


def _smoothed(before: float | None, value: float) -> float:
    return value if before is None else before + _SMOOTHING * (value - before)
