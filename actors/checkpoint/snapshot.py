"""Between a model with its optimizer and the arrays of a snapshot.

Names of arrays: `model.<parameter>`, `optimizer.<slot>.<parameter>`, `rng.<rank>.cpu`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

_MODEL, _OPTIMIZER = "model.", "optimizer."


def take_arrays(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    """Copies of every parameter and optimizer slot on the CPU, owned by the caller."""
    arrays = {_MODEL + name: _copied(parameter) for name, parameter in model.named_parameters()}
    for name, slots in _slots(model, optimizer):
        for slot, value in slots.items():
            arrays[f"{_OPTIMIZER}{slot}.{name}"] = _copied(torch.as_tensor(value))
    return arrays


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


def _slots(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, dict[str, Any]]]:
    return [
        (name, optimizer.state[parameter])
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    ]


def _copied(value: torch.Tensor) -> np.ndarray:
    copy: np.ndarray = value.detach().cpu().numpy().copy()
    return copy


def _tensor(array: np.ndarray) -> torch.Tensor:
    # Arrays that came through Ray are read-only views; torch wants to own what it wraps.
    return torch.from_numpy(np.array(array, copy=True))
