"""GGUF files of Llama models, dequantised into the Hugging Face layout.

GGUF is llama.cpp's format: key/value metadata, then tensors in blocks of 32 weights with a scale
(Q4_0, Q4_1, Q8_0, ...) or plain floats. Two things differ from the layout besides the names:
    * llama.cpp rotates neighbouring channels (RoPE), so the rows of the query and key projections
      are interleaved there; they are put back here.
    * how text is cut before BPE is only named, see `gguf_tokenizer`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagleray.platform.errors import DataError, UsageError
from eagleray.platform.model.config import DecoderConfig
from eagleray.platform.model.gguf_tokenizer import rebuild
from eagleray.platform.model.hf_config import write_documents
from eagleray.platform.model.hf_layout import parameter_shapes, write_weights

try:
    from gguf import GGUFReader, quants
except ImportError as error:
    raise UsageError(
        "reading a GGUF file needs the package gguf, which is not installed",
        "pip install 'eagleray[gguf]'",
    ) from error

_ARCHITECTURE = "llama"
_BAD_FILE = "fetch the file again, or bring the model in the Hugging Face layout"

_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def convert(gguf_file: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file into a folder, weights in float32.

    Memory stays below a few GB for a model of any size: tensors are dequantised one at a time and
    written in shards.

    Raises:
        DataError: No GGUF file, an architecture, tokenizer or quantisation that is not supported,
            or tensors that do not fit the metadata.
    """
    reader = _opened(gguf_file)
    origin = str(gguf_file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(metadata, tensors, origin)
    tokenizer = rebuild(metadata, origin)
    shapes = parameter_shapes(config)
    names = {name: _gguf_name(name) for name in shapes}
    if missing := sorted(set(names.values()) - tensors.keys()):
        raise DataError(f"{origin}: no tensor {missing[0]} ({len(missing)} missing)", _BAD_FILE)
    if extra := sorted(tensors.keys() - set(names.values())):
        # For example rope_freqs.weight (scaled RoPE) or biases: leaving them out changes results.
        raise DataError(
            f"{origin}: tensor {extra[0]} has no place in a plain Llama ({len(extra)} such)",
            "bring a model without RoPE scaling, biases or experts",
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_documents(
        folder,
        config,
        "float32",
        tokenizer.tokenizer_json,
        eos_token=tokenizer.eos_token,
        bos_token=tokenizer.bos_token,
        chat_template=tokenizer.chat_template,
        more_eos_tokens=tokenizer.more_eos_tokens,
    )

    def dequantized() -> Iterator[tuple[str, Tensor]]:
        for name, gguf_name in names.items():
            weight = _dequantized(tensors[gguf_name], shapes[name], origin)
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weight = deinterleave(weight, config.head_dim)
            yield name, weight

    write_weights(folder, dequantized())


def deinterleave(weight_ED: Tensor, head_dim: int) -> Tensor:
    """Rows of a query or key projection from llama.cpp's order to ours, E = heads * head_dim.

    There channels 2i and 2i+1 of a head form a rotated pair, here i and i + head_dim/2.
    """
    num_rows, dim = weight_ED.shape
    pairs = weight_ED.view(num_rows // head_dim, head_dim // 2, 2, dim)
    return pairs.transpose(1, 2).reshape(num_rows, dim)


def _config(metadata: dict[str, Any], tensors: dict[str, Any], origin: str) -> DecoderConfig:
    architecture = metadata.get("general.architecture")
    if architecture != _ARCHITECTURE:
        raise DataError(
            f"{origin}: general.architecture is {architecture!r}, supported is {_ARCHITECTURE!r}",
            "bring a Llama model (Llama, SmolLM2, TinyLlama and others share it)",
        )

    def value(key: str, absent: Any = None) -> Any:
        found = metadata.get(f"{_ARCHITECTURE}.{key}", absent)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise DataError(
                f"{origin}: {_ARCHITECTURE}.{key} is {found!r}, not a number", _BAD_FILE
            )
        return found

    if (scaling := metadata.get(f"{_ARCHITECTURE}.rope.scaling.type", "none")) != "none":
        raise DataError(
            f"{origin}: RoPE scaling {scaling!r} is not supported, only plain RoPE is",
            "bring a model without RoPE scaling",
        )
    num_heads = value("attention.head_count")
    try:
        head_dim = value("attention.key_length", value("embedding_length") // num_heads)
        config = DecoderConfig(
            vocab_size=len(metadata.get("tokenizer.ggml.tokens") or []),
            dim=value("embedding_length"),
            num_layers=value("block_count"),
            num_heads=num_heads,
            num_kv_heads=value("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            ffn_dim=value("feed_forward_length"),
            max_seq_len=value("context_length"),
            rope_theta=value("rope.freq_base", 10_000.0),
            norm_eps=value("attention.layer_norm_rms_epsilon"),
            tie_embeddings="output.weight" not in tensors,
        )
    except (ValueError, ZeroDivisionError) as error:
        raise DataError(f"{origin}: {error}", _BAD_FILE) from error
    if (rotated := value("rope.dimension_count", config.head_dim)) != config.head_dim:
        raise DataError(
            f"{origin}: RoPE turns {rotated} of {config.head_dim} channels; supported is all",
            "bring a model that rotates whole heads",
        )
    if f"blk.{config.num_layers - 1}.attn_norm.weight" not in tensors:
        raise DataError(
            f"{origin}: block_count {config.num_layers} exceeds the layers that it holds", _BAD_FILE
        )
    return config


def _dequantized(tensor: Any, shape: tuple[int, ...], origin: str) -> Tensor:
    kind = tensor.tensor_type
    try:
        weight = quants.dequantize(tensor.data, kind)
    except (NotImplementedError, ValueError) as error:
        raise DataError(
            f"{origin}: tensor {tensor.name} of type {kind.name} cannot be dequantised: {error}",
            "convert the file to Q8_0, Q4_1, Q4_0, F16 or F32",
        ) from error
    if weight.shape != shape:
        raise DataError(
            f"{origin}: tensor {tensor.name} is {list(weight.shape)}, the metadata imply "
            f"{list(shape)}",
            _BAD_FILE,
        )
    # A copy: the plain types are still a read-only view of the mapped file.
    return torch.from_numpy(weight.astype("float32", copy=True))


def _gguf_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def _opened(gguf_file: Path) -> Any:
    if not gguf_file.is_file():
        raise DataError(f"{gguf_file} is not a file", "name a .gguf file")
    try:
        return GGUFReader(gguf_file)
    except Exception as error:  # On damaged bytes the reader raises whatever numpy meets.
        raise DataError(f"{gguf_file} is not a GGUF file: {error}", _BAD_FILE) from error
