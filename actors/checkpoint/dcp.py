"""Arrays in PyTorch's distributed checkpoint format, written and read by one process."""

import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

# One process writes alone on purpose; torch would say so at every checkpoint.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


def write_arrays(arrays: Mapping[str, np.ndarray], folder: Path) -> None:
    """Write arrays of any shape to an empty folder.

    Raises:
        OSError: They could not be written.
    """
    tensors = {name: torch.from_numpy(_writable(array)) for name, array in arrays.items()}
    try:
        dcp_save(tensors, storage_writer=FileSystemWriter(folder, thread_count=1), no_dist=True)
    except (CheckpointException, RuntimeError) as error:
        # A full disk arrives as an opaque assertion of the archive writer.
        raise OSError(_cause(error)) from error


def read_arrays(folder: Path) -> dict[str, np.ndarray]:
    """Read all arrays of a folder; nothing checks its bytes here.

    Raises:
        ValueError: They do not load.
    """
    reader = FileSystemReader(folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, stored in reader.read_metadata().state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            tensors[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
    try:
        dcp_load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:  # a BaseException: `except Exception` misses it
        raise ValueError(_cause(error)) from error
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _cause(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def _writable(array: np.ndarray) -> np.ndarray:
    return array if array.flags.writeable else array.copy()
