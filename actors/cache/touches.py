"""References to cached values, gathered and handed on in batches, away from the read path.

Losing some is harmless: the order of eviction becomes a little worse.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from eagleray.actors.cache.frame import KEY_BYTES

MAX_TOUCHES = 256
MAX_AGE_S = 0.1


@dataclass(frozen=True)
class TouchBatch:
    """Key digests, one after the other in `keys`, and the bytes that each value takes."""

    keys: bytes
    sizes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.sizes)

    def pairs(self) -> list[tuple[bytes, int]]:
        """(key digest, bytes) in the order of the references."""
        starts = range(0, len(self.keys), KEY_BYTES)
        return [(self.keys[i : i + KEY_BYTES], n) for i, n in zip(starts, self.sizes, strict=True)]


@dataclass(frozen=True)
class Schedule:
    """What a reader at step `now` will look up: `counts` of the key digests in `keys` per step.

    It repeats nothing of what it said before, unless it begins anew at another step.
    """

    now: int
    steps: tuple[int, ...]
    counts: tuple[int, ...]
    keys: bytes

    def by_step(self) -> Iterator[tuple[int, list[bytes]]]:
        """(step, key digests)."""
        start = 0
        for step, count in zip(self.steps, self.counts, strict=True):
            end = start + count * KEY_BYTES
            yield step, [self.keys[i : i + KEY_BYTES] for i in range(start, end, KEY_BYTES)]
            start = end


class TouchSink(Protocol):
    """Takes batches. Returns at once and does not raise; it may drop what it cannot take."""

    def expect(self, schedule: Schedule) -> None:
        """Note what will be referenced."""
        ...

    def touch(self, batch: TouchBatch) -> None:
        """Note the references of a batch."""
        ...


class TouchBuffer:
    """Hands touches to a sink when there are 256, or the first is 100 ms old and another comes."""

    def __init__(self, sink: TouchSink, clock: Callable[[], float]) -> None:
        self._sink, self._clock = sink, clock
        self._keys: list[bytes] = []
        self._sizes: list[int] = []
        self._since = 0.0

    def add(self, key_digest: bytes, size: int) -> None:
        """Note one reference."""
        if not self._keys:
            self._since = self._clock()
        self._keys.append(key_digest)
        self._sizes.append(size)
        if len(self._keys) >= MAX_TOUCHES or self._clock() - self._since >= MAX_AGE_S:
            self.flush()

    def flush(self) -> None:
        """Hand over what there is."""
        if self._keys:
            batch = TouchBatch(b"".join(self._keys), tuple(self._sizes))
            self._keys, self._sizes = [], []
            self._sink.touch(batch)
