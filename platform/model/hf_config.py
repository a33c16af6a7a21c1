"""config.json and the tokenizer files of a model folder in the Hugging Face layout, without torch.

config.json             LlamaForCausalLM's shape; RoPE as transformers 5 reads it
generation_config.json  the ids that end a generation
tokenizer.json          the `tokenizers` library's own format
tokenizer_config.json   names of the special tokens, chat template
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from eagleray.platform.errors import DataError
from eagleray.platform.model.config import DecoderConfig

CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"
TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"

_SIZES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
}
"""Our name -> theirs, where both always state it."""

_FIXED = {
    "model_type": ("llama", None),
    "hidden_act": ("silu", "silu"),
    "attention_bias": (False, False),
    "mlp_bias": (False, False),
    "quantization_config": (None, None),
}
"""Their key -> the only value that our decoder computes, and what its absence means."""


def write_documents(
    folder: Path,
    config: DecoderConfig,
    dtype: str,
    tokenizer_json: bytes,
    *,
    eos_token: str,
    bos_token: str | None = None,
    chat_template: str | None = None,
    more_eos_tokens: tuple[str, ...] = (),
) -> None:
    """Write every file of the layout but the weights.

    Args:
        folder: Must exist.
        config: The decoder's shape.
        dtype: The weights' dtype as transformers spells it: "float32", "bfloat16", "float16".
        tokenizer_json: Kept byte for byte.
        eos_token: Ends a generation.
        bos_token: Named for the chat template; whether text starts with it is the tokenizer's say.
        chat_template: Jinja; None for a base model.
        more_eos_tokens: End a generation too.

    Raises:
        DataError: It is no tokenizer, lacks a token named here, or has more tokens than the model.
    """
    tokenizer = parse_tokenizer(tokenizer_json, "the given tokenizer")
    if num_ids(tokenizer) > config.vocab_size:
        raise DataError(
            f"the tokenizer has ids up to {num_ids(tokenizer) - 1}, the model embeds only "
            f"{config.vocab_size}",
            "write the model with the tokenizer that it was trained with",
        )
    eos_ids = [
        _token_id(tokenizer, token) for token in dict.fromkeys((eos_token, *more_eos_tokens))
    ]
    bos_id = None if bos_token is None else _token_id(tokenizer, bos_token)
    ends = {"bos_token_id": bos_id, "eos_token_id": eos_ids if eos_ids[1:] else eos_ids[0]}
    shape: dict[str, Any] = {theirs: getattr(config, ours) for ours, theirs in _SIZES.items()}
    document = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shape,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        # Read by transformers 4 and by servers that have not moved on.
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
        **ends,
    }
    special = {"eos_token": eos_token, "bos_token": bos_token, "chat_template": chat_template}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_seq_len,
        "clean_up_tokenization_spaces": False,
        **{name: value for name, value in special.items() if value is not None},
    }
    (folder / TOKENIZER_NAME).write_bytes(tokenizer_json)
    _write_json(folder / TOKENIZER_CONFIG_NAME, tokenizer_config)
    _write_json(folder / GENERATION_NAME, ends)
    _write_json(folder / CONFIG_NAME, document)


def read_config(folder: Path) -> DecoderConfig:
    """The shape that a folder's config.json describes.

    Raises:
        DataError: It is missing, damaged, not a Llama, or asks for what our decoder does not
            compute (biases, another activation, scaled RoPE, quantised weights).
    """
    path = folder / CONFIG_NAME
    document = read_json(path)
    for key, (supported, absent) in _FIXED.items():
        if (found := document.get(key, absent)) != supported:
            raise DataError(
                f"{path}: {key} is {found!r}, supported is {supported!r}",
                "bring a model of the Llama architecture with plain float weights",
            )
    num_heads = _number(document, "num_attention_heads", path)
    try:
        return DecoderConfig(
            **{ours: _number(document, theirs, path) for ours, theirs in _SIZES.items()},
            num_kv_heads=_number(document, "num_key_value_heads", path, num_heads),
            head_dim=_number(
                document, "head_dim", path, _number(document, "hidden_size", path) // num_heads
            ),
            rope_theta=_rope_theta(document, path),
            norm_eps=float(_number(document, "rms_norm_eps", path, 1e-6, whole=False)),
            tie_embeddings=bool(document.get("tie_word_embeddings", False)),
        )
    except (ValueError, ZeroDivisionError) as error:
        raise DataError(f"{path}: {error}", "the file is damaged: fetch the model again") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the layout.

    Raises:
        DataError: The file is missing or holds something else.
    """
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{path} is missing", "name a folder in the Hugging Face layout, as `save` writes it"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", "fetch the model again") from error
    if not isinstance(document, dict):
        raise DataError(f"{path} holds a {type(document).__name__}, not a JSON object")
    return document


def parse_tokenizer(tokenizer_json: bytes, origin: str) -> Tokenizer:
    """The tokenizer that a tokenizer.json describes.

    Raises:
        DataError: The bytes are not one; `origin` says whose they are.
    """
    try:
        return Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # The library raises bare Exception, whatever is wrong.
        raise DataError(
            f"{origin} is not a tokenizer.json: {error}", "fetch it again, or train one"
        ) from error


def num_ids(tokenizer: Tokenizer) -> int:
    """One more than the highest id that a text can get."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def _rope_theta(document: dict[str, Any], path: Path) -> float:
    rope = document.get("rope_parameters") or document.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise DataError(f"{path}: rope_parameters is {rope!r}, must be an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise DataError(
            f"{path}: RoPE {rope} is not supported, only plain RoPE (rope_type default) is",
            "bring a model without RoPE scaling",
        )
    theta = rope.get("rope_theta", document.get("rope_theta", 10_000.0))
    return float(_number({"rope_theta": theta}, "rope_theta", path, whole=False))


def _number(
    document: dict[str, Any], key: str, path: Path, absent: Any = None, *, whole: bool = True
) -> Any:
    value = document.get(key)
    value = absent if value is None else value
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise DataError(
            f"{path}: {key} is {value!r}, must be a {'whole ' if whole else ''}number",
            "the file is damaged, or not a Llama's: fetch the model again",
        )
    return value


def _token_id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    if found is None:
        raise DataError(
            f"the tokenizer has no token {token!r}", "name one of its tokens, or add it first"
        )
    return found


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
