"""The shared buffers of one store: who may write to which, and when one is used again.

    free -> lent to a worker -> held, while it is a state that somebody needs -> free

Laws:
    * At most `count` buffers are in use; they are used again and again, as long as their size fits.
    * One that was lent in an attempt that is over is never lent again: its worker may live yet and
      go on writing. Memory of it is free when that worker is gone.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from eagleray.actors.checkpoint.snapshot_buffer import (
    BufferName,
    Placed,
    SnapshotBuffer,
    available_bytes,
)
from eagleray.platform.errors import ServiceError


@dataclass
class _Slot:
    buffer: SnapshotBuffer
    is_lent: bool = False
    step: int | None = None
    """Of the state that it holds."""
    placed: Placed | None = None


class BufferPool:
    """Lends buffers, and keeps those that hold a state. Not for several threads at once.

    Args:
        count: Buffers in use at once.
        available: Bytes of memory that are free.
    """

    def __init__(self, count: int, available: Callable[[], int] = available_bytes) -> None:
        self._count, self._available = count, available
        self._slots: list[_Slot] = []

    @property
    def num_bytes(self) -> int:
        """What all buffers take."""
        return sum(slot.buffer.name.num_bytes for slot in self._slots)

    def lend(self, num_bytes: int) -> BufferName | None:
        """A buffer of this size to be filled; None while all are in use.

        Raises:
            NoRoomError: Memory has no room for it.
        """
        free = [slot for slot in self._slots if not slot.is_lent and slot.step is None]
        slot = next((slot for slot in free if slot.buffer.name.num_bytes == num_bytes), None)
        if slot is None:
            self._drop(free)
            if len(self._slots) == self._count:
                return None
            slot = _Slot(SnapshotBuffer.create(num_bytes, self._available()))
            self._slots.append(slot)
        slot.is_lent = True
        return slot.buffer.name

    def take(self, placed: Placed, attempt: int, step: int) -> dict[str, np.ndarray]:
        """Hold the state that a worker has copied into a buffer: its arrays.

        Raises:
            ServiceError: It was not lent, or does not hold all of this state.
        """
        slot = self._lent(placed.buffer)
        if slot is None or not slot.buffer.holds(attempt, step):
            raise ServiceError(
                f"the snapshot of step {step} in attempt {attempt} is not whole in shared memory",
                "the next attempt goes on from the newest complete one",
            )
        slot.is_lent, slot.step, slot.placed = False, step, placed
        return slot.buffer.arrays(placed.places)

    def hold_only(self, steps: Collection[int]) -> None:
        """Free the buffers that hold states of other steps."""
        for slot in self._slots:
            if slot.step not in steps:
                slot.step = slot.placed = None

    def placed(self, step: int) -> Placed | None:
        """Where the state of a step is held; None: in no buffer."""
        return next((slot.placed for slot in self._slots if slot.step == step), None)

    def drop_lent(self) -> None:
        """An attempt is over: what was lent in it is not lent again."""
        self._drop([slot for slot in self._slots if slot.is_lent])

    def close(self) -> None:
        """Let go of all; arrays that were taken stay."""
        self._drop(self._slots[:])

    def _lent(self, name: BufferName) -> _Slot | None:
        lent = (slot for slot in self._slots if slot.is_lent)
        return next((slot for slot in lent if slot.buffer.name == name), None)

    def _drop(self, slots: list[_Slot]) -> None:
        for slot in slots:
            self._slots.remove(slot)
            slot.buffer.close()
