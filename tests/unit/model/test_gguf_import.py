import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, quants
from tokenizers import Tokenizer

from eagleray.platform.errors import DataError
from eagleray.platform.model import gguf_import, hf_layout
from eagleray.platform.model.text import ModelText

NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
    "o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "gate_proj": "ffn_gate",
    "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip


def permute(weight, num_heads):
    """Rows as llama.cpp's own conversion script orders them for its RoPE."""
    head = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, -1)
    return head.swapaxes(1, 2).reshape(weight.shape)


def gguf_tensors(model):
    config, tensors = model.config, {}
    for name, parameter in model.named_parameters():
        parts = name.removesuffix(".weight").split(".")
        layer = f"blk.{parts[1]}." if parts[0] == "layers" else ""
        value = parameter.detach().numpy()
        if parts[-1] in ("q_proj", "k_proj"):
            heads = config.num_heads if parts[-1] == "q_proj" else config.num_kv_heads
            value = permute(value, heads)
        tensors[f"{layer}{NAMES[parts[-1]]}.weight"] = np.ascontiguousarray(value)
    return tensors


@pytest.fixture
def write_gguf(tmp_path, tokenizer_json):
    """Write a model as GGUF; `change` may alter the writer and the tensors before."""

    def write(model, kind=GGMLQuantizationType.F32, arch="llama", change=lambda w, t: None):
        config = model.config
        writer = GGUFWriter(tmp_path / "model.gguf", arch)
        writer.add_block_count(config.num_layers)
        writer.add_context_length(config.max_seq_len)
        writer.add_embedding_length(config.dim)
        writer.add_feed_forward_length(config.ffn_dim)
        writer.add_head_count(config.num_heads)
        writer.add_head_count_kv(config.num_kv_heads)
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_rope_dimension_count(config.head_dim)
        vocab = Tokenizer.from_buffer(tokenizer_json).get_vocab()
        tokens = sorted(vocab, key=vocab.__getitem__) + [f"[PAD{n}]" for n in range(310, 320)]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3, 3] + [1] * 307 + [5] * 10)
        writer.add_token_merges([])
        writer.add_eos_token_id(2)
        writer.add_bos_token_id(1)
        writer.add_chat_template("<|im_start|>{{ messages[0].content }}")
        tensors = gguf_tensors(model)
        change(writer, tensors)
        for name, value in tensors.items():
            stored = kind if value.ndim == 2 else GGMLQuantizationType.F32
            writer.add_tensor(name, quants.quantize(value, stored), raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / "model.gguf"

    return write


@pytest.mark.parametrize("tied", [True, False])
def test_plain_weights_compute_the_same_after_import(write_gguf, make_model, tmp_path, tied):
    model = make_model(tie_embeddings=tied)

    gguf_import.convert(write_gguf(model), tmp_path / "hf")

    imported = hf_layout.load(tmp_path / "hf")
    assert imported.config.tie_embeddings is tied
    for name, value in model.state_dict().items():
        assert torch.equal(imported.state_dict()[name], value), name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_blocks_are_dequantised(write_gguf, make_model, tmp_path, kind):
    model, kind = make_model(), GGMLQuantizationType[kind]

    gguf_import.convert(write_gguf(model, kind), tmp_path / "hf")

    imported = hf_layout.load(tmp_path / "hf").state_dict()
    for name, value in model.state_dict().items():
        # Permuting rows and quantising along them commute.
        stored = kind if value.ndim == 2 else GGMLQuantizationType.F32
        expected = quants.dequantize(quants.quantize(value.numpy(), stored), stored)
        assert np.array_equal(imported[name].numpy(), expected), name


def test_tokenizer_comes_along(write_gguf, make_model, tmp_path):
    gguf_import.convert(write_gguf(make_model()), tmp_path / "hf")

    text = ModelText(tmp_path / "hf")
    assert text.eos_ids == {2}
    assert text.render_chat([{"role": "user", "content": "a<|im_end|>"}])[0] == 1
    assert text.decode(text.encode("in 1863 <|im_end|>")) == "in 1863 <|im_end|>"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w, t: t.pop("output_norm.weight"), "no tensor output_norm.weight"),
        (lambda w, t: t.pop("blk.1.attn_norm.weight"), "block_count 2 exceeds the layers"),
        (
            lambda w, t: t.update({"rope_freqs.weight": np.ones(8, np.float32)}),
            "rope_freqs.weight has no place",
        ),
        (
            lambda w, t: t.update({"blk.0.ffn_up.weight": np.ones((64, 64), np.float32)}),
            r"blk.0.ffn_up.weight is \[64, 64\], the metadata imply \[96, 64\]",
        ),
        (lambda w, t: w.add_rope_scaling_type(RopeScalingType.YARN), "RoPE scaling 'yarn'"),
        (lambda w, t: w.add_key_length(8), "RoPE turns 16 of 8 channels"),
        (lambda w, t: w.add_rope_freq_base(0.0), "rope_theta 0.0 must be above 0"),
    ],
)
def test_what_a_plain_llama_has_no_place_for_is_refused(
    write_gguf, make_model, tmp_path, change, message
):
    path = write_gguf(make_model(), change=change)

    with pytest.raises(DataError, match=message):
        gguf_import.convert(path, tmp_path / "hf")


def test_another_architecture_is_refused_with_the_supported_one(write_gguf, make_model, tmp_path):
    path = write_gguf(make_model(), arch="mamba")

    with pytest.raises(DataError, match="architecture is 'mamba', supported is 'llama'"):
        gguf_import.convert(path, tmp_path / "hf")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model" * 100])
def test_a_file_that_is_no_gguf_is_refused(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)

    with pytest.raises(DataError, match="is not a GGUF file"):
        gguf_import.convert(path, tmp_path / "hf")


def test_a_truncated_file_is_refused(write_gguf, make_model, tmp_path):
    path = write_gguf(make_model())
    path.write_bytes(path.read_bytes()[:-5000])

    with pytest.raises(DataError, match="is not a GGUF file"):
        gguf_import.convert(path, tmp_path / "hf")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"model\.gguf is not a file"):
        gguf_import.convert(tmp_path / "model.gguf", tmp_path / "hf")
