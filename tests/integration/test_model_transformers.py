"""Our decoder against transformers' LlamaForCausalLM, each reading what the other wrote."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from eagleray.platform.model import hf_layout
from eagleray.platform.model.config import DecoderConfig
from eagleray.platform.model.decoder import Decoder, rope_tables, rotate
from eagleray.platform.model.text import ModelText

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5
SHAPES = [
    {"tie_embeddings": True, "num_kv_heads": 2},
    {"tie_embeddings": False, "num_kv_heads": 4},
    {"tie_embeddings": False, "num_kv_heads": 1, "head_dim": 8, "rope_theta": 500.0},
]


def make_config(**changes):
    return DecoderConfig(
        **{
            "vocab_size": 260, "dim": 64, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2,
            "head_dim": 16, "ffn_dim": 96, "max_seq_len": 64, "norm_eps": 1e-6, **changes,
        }
    )  # fmt: skip


def spread(model):
    """Weights large enough that every part shows in the logits."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            mean = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_(torch.empty(parameter.shape).normal_(mean, 0.15, generator=generator))
    return model


@pytest.fixture
def tokenizer_json():
    alphabet = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet += sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(alphabet[:3])
    return tokenizer.to_str().encode()


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_computes_the_same_from_our_export(tmp_path, tokenizer_json, shape):
    ours = spread(Decoder(make_config(**shape)))
    tokens_BT = torch.randint(0, 260, (2, 40), generator=torch.Generator().manual_seed(1))

    hf_layout.save(ours, tmp_path / "m", tokenizer_json, eos_token="<|endoftext|>")

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    assert type(theirs).__name__ == "LlamaForCausalLM"
    with torch.no_grad():
        difference = (ours(tokens_BT) - theirs(tokens_BT).logits).abs().max()
    assert difference < TOLERANCE


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("max_shard_size", ["50GB", "60KB"])
def test_we_compute_the_same_from_their_export(tmp_path, shape, max_shard_size):
    config = make_config(**shape)
    theirs = spread(
        transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.dim,
                intermediate_size=config.ffn_dim,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_seq_len,
                rms_norm_eps=config.norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
                tie_word_embeddings=config.tie_embeddings,
            )
        )
    ).eval()
    tokens_BT = torch.randint(0, 260, (2, 40), generator=torch.Generator().manual_seed(2))

    theirs.save_pretrained(tmp_path, max_shard_size=max_shard_size)

    ours = hf_layout.load(tmp_path)
    assert ours.config == config
    with torch.no_grad():
        difference = (ours(tokens_BT) - theirs(tokens_BT).logits).abs().max()
    assert difference < TOLERANCE


def test_rotation_is_that_of_transformers():
    from transformers.models.llama import modeling_llama

    config = make_config()
    rotary = modeling_llama.LlamaRotaryEmbedding(
        transformers.LlamaConfig(
            hidden_size=64, num_attention_heads=4, max_position_embeddings=64,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        )
    )  # fmt: skip
    q, k = torch.randn(2, 1, 64, 4, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = rotary(q, torch.arange(64)[None])
    expected = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)

    cos_MC, sin_MC = rope_tables(config)
    for x, want in zip((q, k), expected, strict=True):
        assert torch.allclose(rotate(x, cos_MC[:, None], sin_MC[:, None]), want, atol=1e-6)


def test_chat_prompts_equal_those_of_transformers(tmp_path, tokenizer_json):
    template = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
        "+ message['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    folder = tmp_path / "m"
    model = Decoder(make_config())
    hf_layout.save(model, folder, tokenizer_json, eos_token="<|im_end|>", chat_template=template)
    messages = [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": " What is \u00e9 in 1863?\n\n"},
    ]

    theirs = transformers.AutoTokenizer.from_pretrained(folder)

    prompt = theirs.apply_chat_template(messages, add_generation_prompt=True)
    assert ModelText(folder).render_chat(messages) == prompt["input_ids"]
    assert ModelText(folder).encode("A <b> 12") == theirs.encode("A <b> 12")


def test_their_generation_ends_where_ours_is_told_to(tmp_path, tokenizer_json):
    hf_layout.save(
        Decoder(make_config()), tmp_path, tokenizer_json, eos_token="<|im_end|>",
        bos_token="<|im_start|>",
    )  # fmt: skip

    config = transformers.GenerationConfig.from_pretrained(tmp_path)

    assert (config.bos_token_id, config.eos_token_id) == (1, 2)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 2
