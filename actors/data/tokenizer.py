"""Byte-level BPE: learnt from the data or loaded, and fast on text that repeats its words.

A byte-level pre-tokenizer (Radford et al. 2019, GPT-2) never joins what lies on two sides of a
whitespace character that is followed by another character. Text may therefore be cut before each
such character and its pieces encoded apart, with the very ids of the whole text. Pieces repeat, so
each is encoded once and then looked up; new ones are encoded many at a time, with the token that
ends documents between them, at which the library cuts too. Tokenizers for which this does not hold
are given whole documents.
"""

import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from eagleray.platform.errors import DataError
from eagleray.platform.storage import digest_bytes

logger = logging.getLogger(__name__)

EOD_TOKEN = "<|endoftext|>"
"""Ends each document; id 0 in the tokenizers that we train."""

_EOD_TOKENS = (EOD_TOKEN, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>")
# White space as Unicode and the library have it; Python's \s takes four control characters more.
_W = r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
_N = _W.replace("[", "[^", 1)
# The second alternative keeps leading whitespace of a text; the lookahead leaves the last character
# of a run of whitespace to the piece that follows, as GPT-2's pattern does.
_PIECE = re.compile(rf"{_W}?{_N}+(?:{_W}+(?={_W}{_N})|{_W}+\Z)?|{_W}+(?={_W}{_N})|{_W}+\Z")
_CUT = re.compile(rf"{_W}(?={_N})")
_LINE_CUT = re.compile(rf"\n(?={_N})")
_SEGMENT_CHARS = 1_000_000
_CHUNK_CHARS = 4096
_MAX_PIECES = 200_000
_MAX_PIECE_CHARS = 64
_GROUP_PIECES = 512

TokenArray = npt.NDArray[np.unsignedinteger[Any]]


class TextTokenizer:
    """A `tokenizer.json` in use: text to ids of `dtype` and back.

    Special tokens written out in a text are encoded as plain text: a document cannot end itself.

    Raises:
        DataError: The bytes are no tokenizer, or it has no end-of-document token that we know.
    """

    def __init__(self, tokenizer_json: bytes, origin: str = "tokenizer.json") -> None:
        try:
            self._tokenizer = Tokenizer.from_buffer(tokenizer_json)
            layout = json.loads(tokenizer_json)
        # tokenizers raises a bare Exception for whatever it cannot parse.
        except Exception as error:
            raise DataError(
                f"{origin} is not a tokenizer of the `tokenizers` library: {error}",
                "give data.tokenizer.path a tokenizer.json as Hugging Face models carry it",
            ) from error
        if layout["model"].get("dropout"):
            raise DataError(
                f"{origin} drops merges at random (dropout={layout['model']['dropout']}): "
                "the same text would give other tokens each time",
                "set model.dropout to null in it",
            )
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.json = tokenizer_json
        self.digest = digest_bytes(tokenizer_json)
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        known = [token for token in _EOD_TOKENS if token in vocab]
        if not known:
            raise DataError(
                f"{origin} has no end-of-document token: none of {', '.join(_EOD_TOKENS)}",
                f"add {EOD_TOKEN} to it as a special token",
            )
        self.eod_token, self.eod_id = known[0], vocab[known[0]]
        self.dtype = np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")
        self._cuts_anywhere = _cuts_anywhere(layout, self.eod_token)
        self._pieces: dict[str, bytes] = {}
        # Does parse special tokens, so it may only be given texts that hold none but ours.
        self._joined = Tokenizer.from_buffer(tokenizer_json)
        special = (re.escape(token["content"]) for token in layout.get("added_tokens", []))
        self._special = re.compile("|".join(special))

    def encode(self, text: str) -> TokenArray:
        """The ids of one text, without an end-of-document token."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        """The ids of each text, without end-of-document tokens; not for use by several threads."""
        if self._cuts_anywhere:
            encoded = [b"".join(map(self._encode_segment, segments(text))) for text in texts]
        else:
            encoded = self._encode_whole(texts)
        return [np.frombuffer(ids, dtype=self.dtype) for ids in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids, special tokens included."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))

    def _encode_segment(self, segment: str) -> bytes:
        pieces = _PIECE.findall(segment)
        missing = list(set(pieces).difference(self._pieces))
        if len(self._pieces) + len(missing) > _MAX_PIECES:
            self._pieces.clear()
            missing = list(set(pieces))
        fresh = self._encode_pieces(missing)
        kept = {piece: ids for piece, ids in fresh.items() if len(piece) <= _MAX_PIECE_CHARS}
        if len(kept) <= _MAX_PIECES:
            self._pieces.update(kept)
        known = self._pieces if len(kept) == len(fresh) else {**self._pieces, **fresh}
        return b"".join(map(known.__getitem__, pieces))

    def _encode_pieces(self, pieces: Sequence[str]) -> dict[str, bytes]:
        plain = [piece for piece in pieces if not self._special.search(piece)]
        rest = [piece for piece in pieces if self._special.search(piece)]
        encoded = dict(zip(rest, self._encode_whole(rest), strict=True))
        groups = [plain[i : i + _GROUP_PIECES] for i in range(0, len(plain), _GROUP_PIECES)]
        joined = [self.eod_token.join(group) for group in groups]
        found = self._joined.encode_batch_fast(joined, add_special_tokens=False)
        for group, encoding in zip(groups, found, strict=True):
            ids = np.array(encoding.ids, dtype=self.dtype)
            cuts = np.flatnonzero(ids == self.eod_id).tolist()
            starts, ends = [0, *(cut + 1 for cut in cuts)], [*cuts, len(ids)]
            for piece, start, end in zip(group, starts, ends, strict=True):
                encoded[piece] = ids[start:end].tobytes()
        return encoded

    def _encode_whole(self, texts: Sequence[str]) -> list[bytes]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.dtype).tobytes() for encoding in encodings]


def train_bpe(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Learn a byte-level BPE; the same texts in the same order give the same bytes.

    The vocabulary is smaller than asked when the texts have no more pairs to merge.

    Raises:
        DataError: There is no text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    num_chunks = 0

    def batches() -> Iterator[list[str]]:
        nonlocal num_chunks
        # Long strings are slow to pre-tokenize, and lists are what the library spreads over cores.
        batch: list[str] = []
        for text in texts:
            for chunk in paragraphs(text):
                batch.append(chunk)
                if len(batch) == 256:
                    num_chunks += len(batch)
                    yield batch
                    batch = []
        num_chunks += len(batch)
        yield batch

    tokenizer.train_from_iterator(batches(), trainer)
    if not num_chunks:
        raise DataError("there is no text to learn a tokenizer from", "raise tokenizer.train_bytes")
    trained = TextTokenizer(tokenizer.to_str().encode())
    if trained.vocab_size < vocab_size:
        logger.info("vocabulary ended early asked=%d got=%d", vocab_size, trained.vocab_size)
    return trained


def load_tokenizer(path: Path) -> TextTokenizer:
    """Use a tokenizer.json as it is.

    Raises:
        DataError: It cannot be read or used.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"data.tokenizer: {path} cannot be read: {error.strerror or error}",
            "correct data.tokenizer.path",
        ) from error
    return TextTokenizer(content, str(path))


def paragraphs(text: str) -> Iterator[str]:
    """A text in parts of some 4 KB that end at line breaks, where byte-level BPE may be cut."""
    return _parts(text, _CHUNK_CHARS, _LINE_CUT)


def segments(text: str) -> Iterator[str]:
    """A text in parts of about a million characters, cut where byte-level BPE may be cut."""
    return _parts(text, _SEGMENT_CHARS, _CUT)


def _parts(text: str, num_chars: int, cut: re.Pattern[str]) -> Iterator[str]:
    start = 0
    while len(text) - start > num_chars:
        match = cut.search(text, start + num_chars)
        if match is None:
            break
        yield text[start : match.start()]
        start = match.start()
    if start < len(text):
        yield text[start:]


def _cuts_anywhere(layout: dict[str, Any], eod_token: str) -> bool:
    """Whether the pre-tokenizer is plain GPT-2 and nothing else looks across its words."""
    pre_tokenizer = layout.get("pre_tokenizer") or {}
    added = layout.get("added_tokens", [])
    flags = ("lstrip", "rstrip", "single_word", "normalized")
    return bool(
        layout.get("normalizer") is None
        and pre_tokenizer.get("type") == "ByteLevel"
        and not pre_tokenizer.get("add_prefix_space")
        and pre_tokenizer.get("use_regex", True)
        and all(token["special"] and not any(token[flag] for flag in flags) for token in added)
        and eod_token in {token["content"] for token in added}
    )
