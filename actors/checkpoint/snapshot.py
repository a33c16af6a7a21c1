"""Between a model with its optimizer and the arrays of a snapshot.

Names of arrays: `model.<parameter>`, `optimizer.<slot>.<parameter>`, `rng.<rank>.cpu`.

A snapshot does not hold up training. Parameters and optimizer slots change in the update alone, so
a thread copies them while the next step computes forward and backward (as CheckFreq: Mohan et al.,
FAST 2021), and the step waits for it just before its update.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from eagleray.actors.checkpoint.device_copy import DeviceCopy
from eagleray.actors.checkpoint.snapshot_buffer import Placed, SnapshotBuffer, lay_out
from eagleray.actors.checkpoint.state import Snapshot

_MODEL, _OPTIMIZER = "model.", "optimizer."
_PIECE_BYTES = 16 << 20
"""What a thread copies at once: the one that waits takes over the rest."""

Copy = Callable[[np.ndarray, np.ndarray], None]


class PartSink(Protocol):
    """Takes this rank's parts of snapshots."""

    def submit(self, snapshot: Snapshot) -> int:
        """Take a part, and own its arrays; the newest step that is known to be on storage."""


@runtime_checkable
class BufferLender(Protocol):
    """A sink that has memory for the arrays: they need not be handed over."""

    def lend(self, num_bytes: int) -> SnapshotBuffer | None:
        """Room to copy the next part's arrays into; None: there is none."""


class Snapshotter:
    """Takes the snapshots of one rank, one after the other. Not for several threads.

    Args:
        model: Its parameters are copied.
        optimizer: Its slots are copied.
        sink: Takes the parts; called by a thread of this class, never by two at once. If it is a
            `BufferLender`, arrays are copied to where it says.
        has_state: Whether this rank hands in model and optimizer, or only what `begin` is given.
        copy: Copies an array into another one; releases the GIL.
        clock: Seconds.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sink: PartSink,
        *,
        has_state: bool = True,
        copy: Copy = np.copyto,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model, self._optimizer, self._sink = model, optimizer, sink
        self._has_state, self._copy, self._clock = has_state, copy, clock
        self._device = DeviceCopy()
        self._pieces: _Pieces | None = None
        self._is_done = threading.Event()
        self._error: BaseException | None = None
        self.blocked_s = 0.0
        """How long the newest snapshot has held up its caller."""
        self.cost_s = 0.0
        """The same, and how long its copy took; of the newest complete one, 0 before the first."""
        self._copy_s = 0.0
        self.written = 0
        """The newest step on storage, as far as the sink has told."""

    def begin(self, part: Snapshot) -> None:
        """Start to take a snapshot: `part` with parameters and slots as they are now.

        They must not change until `join` returned. Raises as `join` for the snapshot before.
        """
        self.join()
        begun = self._clock()
        tensors = _tensors(self._model, self._optimizer) if self._has_state else {}
        self._device.follow(tensors.values())
        self._pieces = _Pieces(self._copy)
        self._is_done.clear()
        threading.Thread(
            target=self._take, args=(part, tensors, self._pieces), name="snapshot", daemon=True
        ).start()
        self.blocked_s = self._clock() - begun

    def join(self) -> None:
        """Return when the snapshot under way, if any, is copied and handed in.

        Raises:
            DeadlineExceededError: Storage is so slow that the ones before are still waiting.
            ServiceError: The sink is gone.
        """
        if self._pieces is None:
            return
        begun = self._clock()
        self._pieces.help()
        self._is_done.wait()
        self._pieces = None
        self.blocked_s += self._clock() - begun
        self.cost_s = self.blocked_s + self._copy_s
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _take(self, part: Snapshot, tensors: Mapping[str, torch.Tensor], pieces: "_Pieces") -> None:
        try:
            if tensors:
                part = self._copied(part, tensors, pieces)
            self.written = self._sink.submit(part)
        except BaseException as error:  # noqa: BLE001 - for the thread that joins
            self._error = error
        finally:
            pieces.give(())
            self._is_done.set()

    def _copied(
        self, part: Snapshot, tensors: Mapping[str, torch.Tensor], pieces: "_Pieces"
    ) -> Snapshot:
        places, num_bytes = lay_out(
            (name, _dtype(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()
        )
        lender = self._sink if isinstance(self._sink, BufferLender) else None
        buffer = lender.lend(num_bytes) if lender else None
        begun = self._clock()
        if buffer is None:
            arrays = {place.name: np.empty(place.shape, place.dtype) for place in places}
        else:
            buffer.fill(part.attempt, part.step)
            arrays = buffer.arrays(places)
        self._device.start(tensors, arrays, buffer)
        pieces.give(
            (arrays[name], tensor.numpy())
            for name, tensor in tensors.items()
            if tensor.device.type == "cpu"
        )
        pieces.help()
        pieces.wait()
        self._device.wait()
        self._copy_s = self._clock() - begun
        if buffer is None:
            return replace(part, arrays={**arrays, **part.arrays})
        buffer.complete(part.attempt, part.step)
        return replace(part, placed=Placed(buffer.name, places))


class _Pieces:
    """What is still to be copied, by any thread that has time; given once."""

    def __init__(self, copy: Copy) -> None:
        self._copy = copy
        self._changed = threading.Condition()
        self._waiting: deque[tuple[np.ndarray, np.ndarray]] | None = None
        self._missing = 0

    def give(self, pairs: "Iterator[tuple[np.ndarray, np.ndarray]] | tuple[()]") -> None:
        """Say what is to be copied where to; only the first time."""
        with self._changed:
            if self._waiting is None:
                self._waiting = deque(piece for pair in pairs for piece in _cut(*pair))
                self._missing = len(self._waiting)
                self._changed.notify_all()

    def help(self) -> None:
        """Copy what no other thread copies; waits until it is known."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None)
        waiting = self._waiting
        assert waiting is not None, "given before"
        while True:
            try:
                target, source = waiting.popleft()
            except IndexError:
                return
            try:
                self._copy(target, source)
            except BaseException:  # Ctrl-C: another thread may be waiting for this piece.
                waiting.append((target, source))
                raise
            with self._changed:
                self._missing -= 1
                self._changed.notify_all()

    def wait(self) -> None:
        """Return when all pieces are copied."""
        with self._changed:
            self._changed.wait_for(lambda: not self._missing)


def take_arrays(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    """Copies of every parameter and optimizer slot on the CPU, owned by the caller."""
    return {name: _copied(tensor) for name, tensor in _tensors(model, optimizer).items()}


def load_arrays(
    arrays: Mapping[str, np.ndarray], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Put a snapshot's arrays back, bit for bit.

    Raises:
        KeyError: The snapshot lacks a parameter of the model.
        RuntimeError: A shape differs.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_tensor(arrays[_MODEL + name]))
    for name, parameter in model.named_parameters():
        state = {}
        for slot in ("step", "exp_avg", "exp_avg_sq"):
            key = f"{_OPTIMIZER}{slot}.{name}"
            if key in arrays:
                value = _tensor(arrays[key]).clone()
                # AdamW keeps its step counter on the CPU whatever the device of the parameter.
                state[slot] = value if slot == "step" else value.to(parameter.device)
        if state:
            optimizer.state[parameter] = state


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters and AdamW's slots, in an order that is the same on every rank.

    Slots that are not there yet are made, to be filled with another rank's.
    """
    tensors: list[torch.Tensor] = []
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        tensors += [parameter.detach(), state["step"], state["exp_avg"], state["exp_avg_sq"]]
    return tensors


def model_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """The model's part of a snapshot as a state_dict."""
    return {
        name.removeprefix(_MODEL): _tensor(array)
        for name, array in arrays.items()
        if name.startswith(_MODEL)
    }


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What a snapshot holds, where it is."""
    tensors: dict[str, torch.Tensor] = {
        _MODEL + name: parameter for name, parameter in model.named_parameters()
    }
    for name, slots in _slots(model, optimizer):
        for slot, value in slots.items():
            tensors[f"{_OPTIMIZER}{slot}.{name}"] = torch.as_tensor(value)
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _slots(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, dict[str, Any]]]:
    return [
        (name, optimizer.state[parameter])
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    ]


def _cut(target: np.ndarray, source: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    if source.nbytes <= _PIECE_BYTES or not source.flags.c_contiguous:
        yield target, source
        return
    length = _PIECE_BYTES // source.itemsize
    target, source = target.reshape(-1), source.reshape(-1)
    for start in range(0, source.size, length):
        yield target[start : start + length], source[start : start + length]


def _dtype(tensor: torch.Tensor) -> np.dtype:
    dtype: np.dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
    return dtype


def _copied(value: torch.Tensor) -> np.ndarray:
    copy: np.ndarray = value.cpu().numpy().copy()
    return copy


def _tensor(array: np.ndarray) -> torch.Tensor:
    # Arrays that came through Ray are read-only views; torch wants to own what it wraps.
    return torch.from_numpy(np.array(array, copy=True))
