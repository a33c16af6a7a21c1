"""What one rank alone knows, step by step, in memory that outlives its process.

Model and optimizer are alike on all data-parallel ranks, so any survivor can give them to whoever
takes a dead rank's place. The rest it leaves here: its random state, the ids of the samples that it
read, its share of sums that are not yet shared. It writes the entry of a step before any rank can
finish that step; so if a survivor has applied a step, the dead rank's entry of it is here.

The memory is an anonymous file. It is reached as /proc/<pid>/fd/<n> of any process that holds it
open, and goes with the last of them: nothing is left behind, whatever is killed.
    G = sequences of this rank in a global batch; an entry `done` belongs to the state after `done`
    steps.

    header   int64 [4]: layout, slots, rows, G
    slots    entry `done` in slot done % slots: int64 done, length, CRC-32; then a JSON document
             and, behind a zero byte, the random state
    rows     ids of step s in row s % rows: int64 s, then int64 [G]
"""

import json
import mmap
import os
import zlib
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

_LAYOUT = 1
_SLOTS = 4
"""A rank is never two steps ahead of another: its peers' gradients would be missing."""
_SLOT_BYTES = 65_536
_HEADER_BYTES = 4096
_SLOT_HEADER_BYTES = 24


@dataclass(frozen=True)
class Entry:
    """What a rank alone knows of the state after `done` steps."""

    done: int
    rng: bytes
    """Of torch's generator on the CPU."""
    window: dict[str, Any] = field(default_factory=dict)
    """Its sums since the last row of figures, without `gain`."""
    decisions: int = 0
    """What its mixture had decided before this step."""
    sums: list[list[int]] | None = None
    """Its losses by domain since then, without `gain`, if the mixture follows them."""
    gain: dict[str, Any] | None = None
    """What its newest step adds to both. Whether its update was skipped, the other ranks know."""


class StepJournal:
    """One rank's journal; written by one process, read by the one that takes its place.

    Args:
        descriptor: Of the memory; the journal closes it.
        num_rows: Steps whose ids are kept.
        ids_per_step: G.
    """

    def __init__(self, descriptor: int, num_rows: int, ids_per_step: int) -> None:
        self._descriptor, self._num_rows, self._ids_per_step = descriptor, num_rows, ids_per_step
        row_bytes = 8 * (1 + ids_per_step)
        start = _HEADER_BYTES + _SLOTS * _SLOT_BYTES
        self._memory = mmap.mmap(descriptor, start + num_rows * row_bytes)
        whole = np.frombuffer(self._memory, dtype=np.int64, offset=start)
        self._rows = whole.reshape(num_rows, 1 + ids_per_step)

    @classmethod
    def create(cls, num_rows: int, ids_per_step: int) -> "StepJournal":
        """An empty journal.

        Raises:
            OSError: There is no memory for it.
        """
        descriptor = os.memfd_create("eagleray-journal")
        size = _HEADER_BYTES + _SLOTS * _SLOT_BYTES + num_rows * 8 * (1 + ids_per_step)
        os.ftruncate(descriptor, size)
        journal = cls(descriptor, num_rows, ids_per_step)
        journal._rows[:, 0] = -1
        header = np.array([_LAYOUT, _SLOTS, num_rows, ids_per_step], dtype=np.int64)
        journal._memory[: header.nbytes] = header.tobytes()
        return journal

    @classmethod
    def open(cls, path: str) -> "StepJournal | None":
        """A journal that some process holds open; None if there is no such one any more."""
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError:
            return None
        header = os.pread(descriptor, 32, 0)
        layout, slots, num_rows, ids_per_step = np.frombuffer(header, dtype=np.int64).tolist()
        if (layout, slots) != (_LAYOUT, _SLOTS):
            os.close(descriptor)
            return None
        return cls(descriptor, num_rows, ids_per_step)

    def fits(self, num_rows: int, ids_per_step: int) -> bool:
        """Whether it was made for this many ids."""
        return self._num_rows >= num_rows and self._ids_per_step == ids_per_step

    def newest(self) -> int:
        """The newest state of which there is an entry; 0 if there is none."""
        slots = (_HEADER_BYTES + slot * _SLOT_BYTES for slot in range(_SLOTS))
        return max(int.from_bytes(self._memory[at : at + 8], "little") for at in slots)

    @property
    def path(self) -> str:
        """Where other processes of this machine find it, as long as this one holds it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def write(self, entry: Entry, ids: np.ndarray | None = None) -> None:
        """Keep what is known of the state after `entry.done` steps.

        Args:
            entry: Replaces the one of four steps before.
            ids: int64 [G], the samples of step `entry.done - 1`.

        Raises:
            ValueError: The entry is larger than a slot.
        """
        if ids is not None:
            self.keep_ids(entry.done - 1, ids)
        known = {name: value for name, value in asdict(entry).items() if name != "rng"}
        data = json.dumps(known).encode() + b"\0" + entry.rng
        if len(data) > _SLOT_BYTES - _SLOT_HEADER_BYTES:
            raise ValueError(f"an entry of {len(data)} bytes does not fit in {_SLOT_BYTES}")
        start = self._slot(entry.done)
        header = np.array([entry.done, len(data), zlib.crc32(data)], dtype=np.int64)
        self._memory[start : start + _SLOT_HEADER_BYTES] = bytes(_SLOT_HEADER_BYTES)
        body = start + _SLOT_HEADER_BYTES
        self._memory[body : body + len(data)] = data
        self._memory[start : start + _SLOT_HEADER_BYTES] = header.tobytes()

    def keep_ids(self, step: int, ids: np.ndarray) -> None:
        """Keep the ids of a step, int64 [G]."""
        row = self._rows[step % self._num_rows]
        row[0] = -1
        row[1:] = ids
        row[0] = step

    def entry(self, done: int) -> Entry | None:
        """The entry of a state; None if it is not there whole."""
        start = self._slot(done)
        body = start + _SLOT_HEADER_BYTES
        header = np.frombuffer(self._memory[start:body], dtype=np.int64)
        length = int(header[1])
        if header[0] != done or not 0 < length <= _SLOT_BYTES - _SLOT_HEADER_BYTES:
            return None
        data = self._memory[body : body + length]
        if zlib.crc32(data) != header[2]:
            return None
        known, _, rng = data.partition(b"\0")
        return Entry(rng=rng, **json.loads(known))

    def ids(self, first: int, end: int) -> dict[int, np.ndarray] | None:
        """Ids of the steps `first .. end - 1`; None if one of them is not there."""
        found = {}
        for step in range(first, end):
            row = self._rows[step % self._num_rows]
            if row[0] != step:
                return None
            found[step] = row[1:].copy()
        return found

    def clear(self) -> None:
        """Forget every entry: the state is an earlier one than theirs."""
        for slot in range(_SLOTS):
            start = self._slot(slot)
            self._memory[start : start + _SLOT_HEADER_BYTES] = bytes(_SLOT_HEADER_BYTES)

    def close(self) -> None:
        """Let go of the memory; it stays while another process holds it."""
        self._rows = np.empty((0, 0), dtype=np.int64)
        self._memory.close()
        os.close(self._descriptor)

    def _slot(self, done: int) -> int:
        return _HEADER_BYTES + done % _SLOTS * _SLOT_BYTES
