"""A model folder in the layout of Hugging Face's LlamaForCausalLM: what transformers and vLLM load.

Weights are safetensors only: nothing in such a folder can run code. The folder should be published
whole by the caller (`Storage.publish_folder`); these functions only fill and read it.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagleray.platform.errors import DataError
from eagleray.platform.model.config import DecoderConfig
from eagleray.platform.model.decoder import Decoder
from eagleray.platform.model.hf_config import read_config, read_json, write_documents

__all__ = [
    "hf_name", "load", "our_name", "parameter_shapes", "read_config", "save", "write_index",
    "write_weights",
]  # fmt: skip

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHARD_BYTES = 2_000_000_000
_DOWNLOAD_AGAIN = "the file is damaged, or not a Llama's: fetch the model again"


def save(
    model: Decoder,
    folder: Path,
    tokenizer_json: bytes,
    *,
    eos_token: str,
    bos_token: str | None = None,
    chat_template: str | None = None,
) -> None:
    """Write a decoder and its tokenizer; weights keep their dtype.

    Raises:
        DataError: The tokenizer does not fit the model, or lacks a token named here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parameters = {hf_name(name): value.detach() for name, value in model.named_parameters()}
    dtype = str(next(iter(parameters.values())).dtype).removeprefix("torch.")
    write_documents(
        folder,
        model.config,
        dtype,
        tokenizer_json,
        eos_token=eos_token,
        bos_token=bos_token,
        chat_template=chat_template,
    )
    write_weights(folder, parameters.items())


def load(
    folder: Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Decoder:
    """The decoder of a folder, its weights cast to `dtype` on `device`.

    Files are mapped and copied one tensor at a time, so the peak is the model in `dtype` and one
    tensor. The result does not depend on the files any more.

    Raises:
        DataError: A file or tensor is missing, damaged, superfluous or of another shape than
            config.json says; shapes are checked before a tensor is read.
    """
    config = read_config(folder)
    files = _weight_files(folder)
    found = {name: path for path, names in files.items() for name in names}
    last_layer = f"model.layers.{config.num_layers - 1}.input_layernorm.weight"
    if last_layer not in found:
        raise DataError(
            f"{folder}: no tensor {last_layer}, though config.json has num_hidden_layers "
            f"{config.num_layers}",
            _DOWNLOAD_AGAIN,
        )
    wanted = parameter_shapes(config)
    if missing := sorted(wanted.keys() - found.keys()):
        raise DataError(
            f"{folder}: no tensor {missing[0]} ({len(missing)} missing)", _DOWNLOAD_AGAIN
        )
    for name in sorted(found.keys() - wanted.keys()):
        # A tied head is sometimes stored again, and old exports hold the constants of RoPE.
        if name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
            raise DataError(
                f"{found[name]}: tensor {name} has no place in a plain Llama", _DOWNLOAD_AGAIN
            )
    with torch.device("meta"):
        model = Decoder(config)
    state: dict[str, Tensor] = {}
    for path in files:
        state.update(_read_tensors(path, wanted, device, dtype))
    model.load_state_dict({our_name(name): value for name, value in state.items()}, assign=True)
    return model.to(device)


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name in the layout -> shape of every tensor of such a decoder."""
    with torch.device("meta"):
        model = Decoder(config)
    return {hf_name(name): tuple(value.shape) for name, value in model.named_parameters()}


def write_weights(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES
) -> None:
    """Write tensors as they come: one file, or indexed shards of about `shard_bytes` each.

    Memory is bounded by a shard, so `tensors` may be a generator over a larger model.
    """
    shards: list[dict[str, int]] = []
    waiting: dict[str, Tensor] = {}

    def flush() -> None:
        path = folder / f"model-{len(shards) + 1:05d}.safetensors"
        # The library writes 0600 whatever the umask; other nodes' users may have to read it.
        path.touch()
        mode = path.stat().st_mode
        save_file(waiting, path, metadata={"format": "pt"})
        path.chmod(mode)
        shards.append({name: tensor.nbytes for name, tensor in waiting.items()})
        waiting.clear()

    for name, tensor in tensors:
        if waiting and sum(held.nbytes for held in waiting.values()) + tensor.nbytes > shard_bytes:
            flush()
        waiting[name] = tensor.cpu().contiguous()
    flush()
    write_index(folder, shards)


def write_index(folder: Path, shards: list[dict[str, int]]) -> None:
    """Name the finished files `model-00001.safetensors`, ... as the layout does.

    Args:
        folder: Where they are.
        shards: The bytes of each tensor of each file.
    """
    if len(shards) == 1:
        (folder / "model-00001.safetensors").rename(folder / WEIGHTS_NAME)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"model-{number:05d}.safetensors").rename(folder / name)
        weight_map |= dict.fromkeys(shard, name)
    total = sum(size for shard in shards for size in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _weight_files(folder: Path) -> dict[Path, list[str]]:
    """Each weight file -> the tensors that it holds."""
    if (folder / INDEX_NAME).is_file():
        index = read_json(folder / INDEX_NAME).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise DataError(f"{folder / INDEX_NAME} has no weight_map", _DOWNLOAD_AGAIN)
        names = sorted({str(name) for name in index.values()})
    else:
        names = [WEIGHTS_NAME]
    for name in names:
        # The index is data from outside: it must not lead out of its folder.
        if Path(name).name != name:
            raise DataError(f"{folder / INDEX_NAME}: {name!r} is not a plain file name")
        if not (folder / name).is_file():
            raise DataError(f"{folder / name} is missing", "fetch the model again")
    return {folder / name: _tensor_names(folder / name) for name in names}


def _tensor_names(path: Path) -> list[str]:
    with _opened(path) as file:
        return list(file.keys())


def _read_tensors(
    path: Path, wanted: dict[str, tuple[int, ...]], device: str | torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    read: dict[str, Tensor] = {}
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            if name not in wanted:
                continue
            shape = tuple(file.get_slice(name).get_shape())
            if shape != wanted[name]:
                raise DataError(
                    f"{path}: tensor {name} is {list(shape)}, config.json implies "
                    f"{list(wanted[name])}",
                    _DOWNLOAD_AGAIN,
                )
            tensor: Tensor = file.get_tensor(name)
            if tensor.dtype not in _FLOATS:
                raise DataError(
                    f"{path}: tensor {name} is {tensor.dtype}, supported are "
                    f"{', '.join(str(kind) for kind in _FLOATS)}",
                    "bring the model with plain float weights",
                )
            # A copy even where nothing is cast: a mapped weight would change with its file.
            read[name] = tensor.to(device, dtype, copy=True)
    return read


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is not a safetensors file: {error}", _DOWNLOAD_AGAIN) from error


def hf_name(name: str) -> str:
    """The layout's name of a parameter of ours."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def our_name(name: str) -> str:
    """Our name of one of the layout's parameters."""
    return name.removeprefix("model.")
