"""Weights written to safetensors one tensor at a time: a model of any size, memory for one tensor.

The library itself writes what it holds, whole files. The format (version 0.x, since 2022) is eight
bytes with the length of a JSON header, the header, and the tensors' bytes one after the other;
what is written here is byte for byte what the library would write.
https://github.com/huggingface/safetensors#format
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from eagleray.platform.errors import DataError
from eagleray.platform.model.hf_layout import SHARD_BYTES, write_index

Described = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape of a tensor."""

_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
}  # fmt: skip
_ALIGNMENT = 8


def stream_weights(
    folder: Path,
    tensors: Mapping[str, Described],
    read: Callable[[str], torch.Tensor],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write tensors in the Hugging Face layout: one file, or indexed shards of about `shard_bytes`.

    Args:
        folder: Must exist.
        tensors: In the order in which they fill the shards.
        read: Gives a tensor by name; each is asked for once.
        shard_bytes: Most bytes of a file, but for one larger tensor.

    Raises:
        DataError: A tensor is of a type that the layout's models do not have.
    """
    shards: list[dict[str, int]] = [{}]
    for name, (dtype, shape) in tensors.items():
        if dtype not in _CODES:
            raise DataError(f"tensor {name} is {dtype}, not a plain float", "export its weights")
        num_bytes = dtype.itemsize * torch.Size(shape).numel()
        if shards[-1] and sum(shards[-1].values()) + num_bytes > shard_bytes:
            shards.append({})
        shards[-1][name] = num_bytes
    for number, shard in enumerate(shards, start=1):
        _write_file(folder / f"model-{number:05d}.safetensors", shard, tensors, read)
    write_index(folder, shards)


def _write_file(
    path: Path,
    num_bytes: Mapping[str, int],
    tensors: Mapping[str, Described],
    read: Callable[[str], torch.Tensor],
) -> None:
    # As the library orders them: the widest types first, so that all are aligned.
    names = sorted(num_bytes, key=lambda name: (-tensors[name][0].itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        dtype, shape = tensors[name]
        begin, end = end, end + num_bytes[name]
        header[name] = {
            "dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]
        }  # fmt: skip
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in names:
            tensor = read(name).contiguous()
            assert tensor.nbytes == num_bytes[name], f"{name} has {tensor.nbytes} bytes"
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
