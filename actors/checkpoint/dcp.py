"""Arrays in PyTorch's distributed checkpoint format, written and read by one process."""

import contextlib
import ctypes
import io
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.serialization import get_crc32_options, set_crc32_options

from eagleray.actors.checkpoint.shard_file import Pacer, ShardFile, WrittenFile

_BYTES_PER_FILE = 64_000_000
_MAX_FILES = 4
_BUFFER_BYTES = 1 << 18

# One process writes alone on purpose; torch would say so at every checkpoint.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


def write_arrays(
    arrays: Mapping[str, np.ndarray], folder: Path, pacer: Pacer | None = None
) -> dict[str, WrittenFile]:
    """Write arrays of any shape to an empty folder: large ones to several files, by threads.

    Returns:
        Size and SHA-256 of each file.

    Raises:
        OSError: They could not be written.
    """
    tensors = {name: _shared(array) for name, array in arrays.items()}
    files = _Files(pacer or Pacer())
    writer = FileSystemWriter(folder, thread_count=_num_files(arrays), sync_files=False)
    writer.fs = files
    try:
        with _without_crc32():
            dcp_save(tensors, storage_writer=writer, no_dist=True)
    except (CheckpointException, RuntimeError) as error:
        # A full disk arrives as an opaque assertion of the archive writer.
        raise OSError(_cause(files.errors[0] if files.errors else error)) from error
    if files.errors:
        raise OSError(_cause(files.errors[0])) from files.errors[0]
    return files.written


class StoredArrays:
    """The arrays of a folder; nothing checks its bytes here. Not for several threads at once."""

    def __init__(self, folder: Path) -> None:
        self._reader = _Reader(folder)
        described = self._reader.read_metadata().state_dict_metadata
        self.shapes = {
            name: (stored.properties.dtype, tuple(stored.size))
            for name, stored in described.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        """Type and shape of each."""

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read some of them.

        Raises:
            ValueError: They do not load.
        """
        shapes = {name: self.shapes[name] for name in names}
        tensors: dict[str, Any] = {
            name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in shapes.items()
        }
        try:
            dcp_load(tensors, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:  # a BaseException: `except Exception` misses it
            raise ValueError(_cause(error)) from error
        return tensors


def read_arrays(folder: Path) -> dict[str, np.ndarray]:
    """Read all arrays of a folder; nothing checks its bytes here.

    Raises:
        ValueError: They do not load.
    """
    stored = StoredArrays(folder)
    return {name: tensor.numpy() for name, tensor in stored.read(stored.shapes).items()}


class _Reader(FileSystemReader):
    """Reads the metadata, of all arrays, once for all reads."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata


class _Files(FileSystem):
    """Where DCP writes. Its threads lose what is raised in them, so it is kept here."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self.written: dict[str, WrittenFile] = {}
        self.errors: list[BaseException] = []

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        file = ShardFile(Path(path), self._pacer)
        try:
            with io.BufferedWriter(file, _BUFFER_BYTES) as stream:
                yield stream
        except Exception as error:  # noqa: BLE001 - raised again by `write_arrays`
            self.errors.append(file.error or error)
        self.written[Path(path).name] = file.written()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


@contextlib.contextmanager
def _without_crc32() -> Iterator[None]:
    """No CRC-32 in the archives of arrays: as much work as all else, and the SHA-256 sees more."""
    before = get_crc32_options()
    set_crc32_options(compute_crc32=False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _num_files(arrays: Mapping[str, np.ndarray]) -> int:
    total = sum(array.nbytes for array in arrays.values())
    most = min(_MAX_FILES, len(os.sched_getaffinity(0)), len(arrays))
    return max(1, min(most, total // _BYTES_PER_FILE))


def _shared(array: np.ndarray) -> torch.Tensor:
    """The array as a tensor that is only read; torch warns of arrays that must not be written."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    if not array.nbytes or not array.flags.c_contiguous:
        return torch.from_numpy(array.copy())
    memory = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    return torch.from_numpy(np.frombuffer(memoryview(memory), array.dtype).reshape(array.shape))


def _cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        error, _ = next(iter(error.failures.values()))  # the one of the one rank
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
