import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagleray.platform.errors import DataError
from eagleray.platform.model import hf_layout

TOKENS = torch.arange(20)[None]


def edit(folder, **changes):
    """Change keys of config.json; None removes one."""
    path = folder / "config.json"
    document = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in document.items() if v is not None}))


def change_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("tied", [True, False])
def test_what_was_saved_is_loaded(saved, make_model, tied):
    folder = saved(shape={"tie_embeddings": tied})

    loaded = hf_layout.load(folder)

    original = make_model(tie_embeddings=tied)
    assert loaded.config == original.config
    assert torch.equal(loaded(TOKENS), original(TOKENS))
    assert all(parameter.requires_grad for parameter in loaded.parameters())


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_another_precision_are_cast_to_what_is_asked(saved, stored):
    folder = saved()
    change_weights(folder, lambda t: t.update({k: v.to(stored) for k, v in t.items()}))

    for asked in (torch.float32, torch.bfloat16):
        loaded = hf_layout.load(folder, dtype=asked)
        assert {parameter.dtype for parameter in loaded.parameters()} == {asked}
        assert loaded.cos_MC.dtype is torch.float32


def test_a_half_precision_model_is_saved_as_such(tmp_path, make_model, tokenizer_json):
    model = make_model().to(torch.bfloat16)
    hf_layout.save(model, tmp_path / "m", tokenizer_json, eos_token="<|endoftext|>")

    assert json.loads((tmp_path / "m/config.json").read_text())["dtype"] == "bfloat16"
    assert torch.equal(
        hf_layout.load(tmp_path / "m", dtype=torch.bfloat16).norm.weight, model.norm.weight
    )


def test_shards_are_bounded_indexed_and_load_the_same(saved):
    folder = saved()
    whole = hf_layout.load(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()

    hf_layout.write_weights(folder, tensors.items(), shard_bytes=100_000)

    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 110_000 for file in files)
    assert torch.equal(hf_layout.load(folder)(TOKENS), whole(TOKENS))


def test_loaded_weights_outlive_their_file(saved):
    folder = saved()
    loaded = hf_layout.load(folder)
    before = loaded(TOKENS)

    path = folder / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))

    assert torch.equal(loaded(TOKENS), before)


def test_weights_may_be_read_by_whoever_may_read_the_config(saved):
    folder = saved()

    modes = {(folder / name).stat().st_mode for name in ("model.safetensors", "config.json")}

    assert len(modes) == 1


def test_the_older_form_of_config_is_read(saved):
    folder = saved(shape={"num_kv_heads": 4})
    edit(
        folder, rope_parameters=None, rope_theta=500.0, rope_scaling=None, head_dim=None,
        num_key_value_heads=None, dtype=None,
    )  # fmt: skip

    config = hf_layout.read_config(folder)

    assert (config.rope_theta, config.head_dim, config.num_kv_heads) == (500.0, 16, 4)


def test_a_tied_head_that_is_stored_again_is_ignored(saved):
    folder = saved()
    change_weights(folder, lambda t: t.update({"lm_head.weight": torch.zeros(320, 64)}))

    assert hf_layout.load(folder).lm_head is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba', supported is 'llama'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, "RoPE .*yarn"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "RoPE .*linear"),
        ({"rope_parameters": 3}, "rope_parameters is 3"),
        ({"hidden_size": None}, "hidden_size is None, must be a whole number"),
        ({"hidden_size": "big"}, "hidden_size is 'big', must be a whole number"),
        ({"rms_norm_eps": True}, "rms_norm_eps is True, must be a number"),
        ({"num_attention_heads": 0}, "config.json"),
        ({"num_attention_heads": 3}, "must be a multiple"),
        ({"hidden_size": 128}, r"embed_tokens.weight is \[320, 64\], config.json implies"),
        ({"num_hidden_layers": 10**9}, "no tensor model.layers.999999999"),
        ({"num_hidden_layers": 1}, r"tensor model.layers.1\S+ has no place"),
        ({"tie_word_embeddings": False}, r"no tensor lm_head.weight \(1 missing\)"),
    ],
)
def test_config_that_we_do_not_compute_is_refused_by_key_and_value(saved, changes, message):
    folder = saved()
    edit(folder, **changes)

    with pytest.raises(DataError, match=message):
        hf_layout.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "no tensor model.norm.weight"),
        (lambda t: t.update({"model.norm.bias": torch.ones(64)}), "model.norm.bias has no place"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            "model.norm.weight is torch.int8",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(saved, change, message):
    folder = saved()
    change_weights(folder, change)

    with pytest.raises(DataError, match=message):
        hf_layout.load(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, r"config.json is missing"),
        ("config.json", b"{", "config.json cannot be read"),
        ("config.json", b"[]", "config.json holds a list"),
        ("model.safetensors", None, "model.safetensors is missing"),
        ("model.safetensors", b"\xff" * 64, "model.safetensors is not a safetensors file"),
        ("model.safetensors.index.json", b'{"weight_map": {}}', "has no weight_map"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"model.norm.weight": "../elsewhere"}}',
            "is not a plain file name",
        ),
    ],
)
def test_missing_or_damaged_files_are_named(saved, name, content, message):
    folder = saved()
    path = folder / name
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(DataError, match=message):
        hf_layout.load(folder)


def test_truncated_weights_are_refused(saved):
    folder = saved()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(DataError, match="not a safetensors file"):
        hf_layout.load(folder)


def test_a_tokenizer_larger_than_the_model_is_refused(saved):
    with pytest.raises(DataError, match="embeds only 256"):
        saved(shape={"vocab_size": 256})


def test_an_end_token_that_the_tokenizer_lacks_is_refused(saved):
    with pytest.raises(DataError, match="no token '</s>'"):
        saved(eos_token="</s>")


def test_bytes_that_are_no_tokenizer_are_refused(tmp_path, make_model):
    with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
        hf_layout.save(make_model(), tmp_path / "m", b"{}", eos_token="x")


def test_nothing_but_the_layout_is_needed_to_move_a_model(saved, tmp_path):
    folder = saved(bos_token="<|im_start|>", chat_template="{{ messages }}")
    names = {path.name for path in folder.iterdir()}

    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert torch.equal(hf_layout.load(moved)(TOKENS), hf_layout.load(folder)(TOKENS))
