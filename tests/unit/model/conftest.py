"""Tiny models, tokenizers and folders for the tests of the model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from eagleray.platform.model import hf_layout
from eagleray.platform.model.config import DecoderConfig
from eagleray.platform.model.decoder import Decoder

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "Four score and seven years ago our fathers brought forth a new nation.",
    "The state of the union is strong, and the year was 1863.",
    "system user assistant im_start im_end endoftext",
] * 4


@pytest.fixture
def make_config() -> Callable[..., DecoderConfig]:
    def make(**changes: Any) -> DecoderConfig:
        shape: dict[str, Any] = {
            "vocab_size": 320, "dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
            "head_dim": 16, "ffn_dim": 96, "max_seq_len": 32,
        }  # fmt: skip
        return DecoderConfig(**{**shape, **changes})

    return make


@pytest.fixture
def make_model(make_config: Callable[..., DecoderConfig]) -> Callable[..., Decoder]:
    def make(**changes: Any) -> Decoder:
        model = Decoder(make_config(**changes))
        model.init_weights(torch.Generator().manual_seed(7))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # Ones would hide a norm that is not applied.
                    parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()))
                else:  # The usual small start leaves all attention uniform.
                    parameter.mul_(8)
        return model

    return make


@pytest.fixture(scope="session")
def tokenizer_json() -> bytes:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer.to_str().encode()


@pytest.fixture
def saved(
    tmp_path: Path, make_model: Callable[..., Decoder], tokenizer_json: bytes
) -> Callable[..., Path]:
    """Write a model folder; keyword arguments go to `hf_layout.save`, `shape` to the config."""

    def save(name: str = "model", shape: dict[str, Any] | None = None, **options: Any) -> Path:
        options.setdefault("eos_token", "<|endoftext|>")
        folder = tmp_path / name
        hf_layout.save(make_model(**(shape or {})), folder, tokenizer_json, **options)
        return folder

    return save
