"""The tokenizer inside a GGUF file, rebuilt for the `tokenizers` library.

GGUF keeps the vocabulary, the merges and the kind of each token, but only a *name* for how text is
cut up before the merges apply (`tokenizer.ggml.pre`). The names below stand for what llama.cpp does
(`src/llama-vocab.cpp`); any other name is refused, since a wrong guess gives a tokenizer that is
right on most text and silently wrong on the rest.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from eagleray.platform.errors import DataError

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Values of `tokenizer.ggml.token_type` that matter here (gguf.constants.TokenType)."""

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class GgufTokenizer:
    """A rebuilt tokenizer and the tokens that the model gives a role."""

    tokenizer_json: bytes
    eos_token: str
    more_eos_tokens: tuple[str, ...]
    bos_token: str | None
    chat_template: str | None


@dataclass(frozen=True)
class _PreTokenizer:
    make: Callable[[], Any]
    ignores_merges: bool = False
    """Take a word that is in the vocabulary whole, even if no merges lead there."""
    adds_bos: bool = False
    """Unless the file says otherwise."""


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _llama3() -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer(_gpt2),
    "smollm": _PreTokenizer(_smollm),
    "llama-bpe": _PreTokenizer(_llama3, ignores_merges=True, adds_bos=True),
}


def rebuild(metadata: Mapping[str, Any], origin: str) -> GgufTokenizer:
    """The tokenizer that the metadata of a GGUF file describes.

    Args:
        metadata: Key -> value of the whole file.
        origin: Whose they are, for messages.

    Raises:
        DataError: A kind of tokenizer or pre-tokenizer that is not supported, or damaged values.
    """
    _supported(metadata, "tokenizer.ggml.model", ("gpt2",), origin)
    name = _supported(metadata, "tokenizer.ggml.pre", tuple(_PRE_TOKENIZERS), origin)
    pre_tokenizer = _PRE_TOKENIZERS[name]
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens") or []
    tokenizer = _bpe(metadata, tokens, pre_tokenizer.ignores_merges, origin)
    # The stubs of `tokenizers` declare these read-only.
    tokenizer.pre_tokenizer = pre_tokenizer.make()
    tokenizer.decoder = decoders.ByteLevel()

    kinds = metadata.get("tokenizer.ggml.token_type") or []
    for token, kind in zip(tokens, kinds, strict=False):
        if kind in (_UNKNOWN, _CONTROL):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])

    eos = _role(metadata, "eos", tokens, origin)
    if eos is None:
        raise DataError(f"{origin}: tokenizer.ggml.eos_token_id is missing: nothing ends an answer")
    more = (_role(metadata, "eot", tokens, origin), _role(metadata, "eom", tokens, origin))
    bos = _role(metadata, "bos", tokens, origin)
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", pre_tokenizer.adds_bos):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return GgufTokenizer(
        tokenizer_json=tokenizer.to_str().encode(),
        eos_token=eos,
        more_eos_tokens=tuple(token for token in more if token is not None),
        bos_token=bos,
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _bpe(
    metadata: Mapping[str, Any], tokens: list[str], ignores_merges: bool, origin: str
) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if not tokens or len(vocabulary) != len(tokens):
        raise DataError(
            f"{origin}: tokenizer.ggml.tokens has {len(tokens)} tokens, {len(vocabulary)} of them "
            "different; must be as many",
            "fetch the file again",
        )
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges") or []]
    try:
        return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignores_merges))
    except Exception as error:  # The library raises bare Exception for an impossible merge.
        raise DataError(
            f"{origin}: tokenizer.ggml.merges do not fit the tokens: {error}", "fetch it again"
        ) from error


def _role(metadata: Mapping[str, Any], role: str, tokens: list[str], origin: str) -> str | None:
    key = f"tokenizer.ggml.{role}_token_id"
    index = metadata.get(key)
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise DataError(
            f"{origin}: {key} is {index!r}, must be below {len(tokens)}", "fetch the file again"
        )
    return tokens[index]


def _supported(
    metadata: Mapping[str, Any], key: str, supported: tuple[str, ...], origin: str
) -> str:
    value = metadata.get(key)
    if value not in supported:
        raise DataError(
            f"{origin}: {key} is {value!r}, supported are {', '.join(supported)}",
            "bring the model in the Hugging Face layout, with its tokenizer.json",
        )
    return str(value)
