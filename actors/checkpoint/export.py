"""A checkpoint's weights as a model folder in the Hugging Face layout, tensor by tensor."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from eagleray.actors.checkpoint.dcp import StoredArrays
from eagleray.actors.checkpoint.manifest import CheckpointFolder
from eagleray.platform.errors import (
    DataError,
    IntegrityError,
    NotFoundError,
    StorageError,
    UsageError,
)
from eagleray.platform.model import hf_layout
from eagleray.platform.model.config import DecoderConfig
from eagleray.platform.model.hf_config import write_documents
from eagleray.platform.model.weight_stream import stream_weights
from eagleray.platform.storage import sync_folder, sync_tree

_MODEL = "model."
"""Before the names of the model's arrays in a checkpoint: see snapshot.py."""


def export_checkpoint(
    folder: CheckpointFolder,
    step: int,
    target: Path,
    config: DecoderConfig,
    tokenizer_json: bytes,
    eos_token: str,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Verify a checkpoint and write its weights and tokenizer to a new folder, which appears whole.

    Memory holds one tensor at a time, whatever the size of the model.

    Args:
        folder: The run's checkpoints.
        step: Which one.
        target: Must not exist.
        config: The model's shape.
        tokenizer_json: Kept byte for byte.
        eos_token: Ends a generation.
        on_bytes: Told how many more bytes of the checkpoint were verified.

    Raises:
        NotFoundError: There is no complete checkpoint of this step.
        IntegrityError: It is damaged.
        UsageError: The target is already there.
        DataError: The checkpoint does not hold the model that `config` describes.
        StorageError: The target cannot be written.
    """
    if target.exists():
        raise UsageError(f"{target} is already there", "name a new folder")
    for found in folder.damage(step, on_bytes):
        raise IntegrityError(str(found), "export another one: eagleray checkpoints verify RUN")
    source = folder.path(step)
    try:
        stored = StoredArrays(source)
    except FileNotFoundError:
        raise NotFoundError(f"checkpoint {source} was removed meanwhile") from None
    shapes = {}
    for name, shape in hf_layout.parameter_shapes(config).items():
        array = _array(name)
        if array not in stored.shapes or stored.shapes[array][1] != shape:
            has = list(stored.shapes[array][1]) if array in stored.shapes else "no such array"
            raise DataError(
                f"checkpoint {source} does not hold the run's model: {array} should be "
                f"{list(shape)}, it has {has}",
                "export it with the eagleray that wrote it",
            )
        shapes[name] = stored.shapes[array]

    def read(name: str) -> torch.Tensor:
        array = _array(name)
        try:
            return stored.read([array])[array]
        except ValueError as error:
            raise IntegrityError(
                f"{array} of checkpoint {source} does not load: {error}",
                "it may have been removed meanwhile: eagleray checkpoints list RUN",
            ) from error

    staged = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        dtype = str(next(iter(shapes.values()))[0]).removeprefix("torch.")
        write_documents(staged, config, dtype, tokenizer_json, eos_token=eos_token)
        stream_weights(staged, shapes, read)
        sync_tree(staged)
        staged.rename(target)
        sync_folder(target.parent)
    except OSError as error:
        raise StorageError(
            f"{target} cannot be written: {error.strerror or error}",
            "name a folder on a disk that is writable and has room",
        ) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _array(name: str) -> str:
    return _MODEL + hf_layout.our_name(name)
