"""Byte-level BPE: deterministic, exact in pieces, deaf to special tokens in text."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from eagleray.actors.data import tokenizer as module
from eagleray.actors.data.tokenizer import (
    EOD_TOKEN,
    TextTokenizer,
    load_tokenizer,
    paragraphs,
    segments,
    train_bpe,
)
from eagleray.platform.errors import DataError

TEXTS = [
    "Fellow-Citizens of the Senate:\n\nI embrace with great satisfaction the opportunity.\n" * 20,
    "It's the people's house, isn't it?  Yes:   1,234 times over.\n\n\nNext paragraph\there.",
]


@pytest.fixture(scope="module")
def trained() -> TextTokenizer:
    return train_bpe(TEXTS, 400)


def whole(tokenizer: TextTokenizer, text: str) -> list[int]:
    plain = Tokenizer.from_buffer(tokenizer.json)
    plain.encode_special_tokens = True
    ids: list[int] = plain.encode(text, add_special_tokens=False).ids
    return ids


def test_training_twice_gives_the_same_bytes(trained: TextTokenizer) -> None:
    again = train_bpe(iter(TEXTS), 400)
    assert again.json == trained.json
    assert again.digest == trained.digest


def test_the_end_of_documents_is_id_zero(trained: TextTokenizer) -> None:
    assert (trained.eod_token, trained.eod_id) == (EOD_TOKEN, 0)
    assert 257 < trained.vocab_size <= 400


# Whitespace of every kind, where GPT-2's pattern is at its most subtle, and the token itself.
PARTS = st.sampled_from(
    [" ", "  ", "\n", "\r\n", "\t", "\x1c", "\x85", "\xa0", "\u3000", "\u2028", "\u200b", "a", "it",
     "'s", "'", "1", "!", "\u00e9", "\u4e2d", "\U0001f600", EOD_TOKEN, "<|", "endoftext", "|>"]
)  # fmt: skip


@given(text=st.lists(PARTS, max_size=30).map("".join) | st.text(max_size=60))
@example(text="  \x1c\u200b")
def test_encoding_in_pieces_equals_encoding_the_whole(trained: TextTokenizer, text: str) -> None:
    assert trained.encode(text).tolist() == whole(trained, text)
    assert trained.decode(trained.encode(text)) == text


def test_a_text_cannot_end_itself(trained: TextTokenizer) -> None:
    text = f"before {EOD_TOKEN} after"
    assert trained.eod_id not in trained.encode(text)
    assert trained.decode(trained.encode(text)) == text


@given(text=st.lists(PARTS, max_size=60).map("".join))
def test_parts_of_a_long_text_join_to_the_whole(text: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "_SEGMENT_CHARS", 7)
        patched.setattr(module, "_CHUNK_CHARS", 7)
        assert "".join(segments(text)) == text
        assert "".join(paragraphs(text)) == text


def test_long_texts_and_a_full_piece_cache_do_not_change_ids(trained: TextTokenizer) -> None:
    text = " ".join(f"word{number}\n" for number in range(300)) + "x" * 500
    expected = whole(trained, text)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "_MAX_PIECES", 20)
        patched.setattr(module, "_SEGMENT_CHARS", 100)
        fresh = TextTokenizer(trained.json)
        assert fresh.encode(text).tolist() == expected
        assert len(fresh._pieces) <= 20


def test_batches_come_back_in_order(trained: TextTokenizer) -> None:
    texts = ["one two", "", "three", "one two"]
    assert [ids.tolist() for ids in trained.encode_batch(texts)] == [
        whole(trained, text) for text in texts
    ]


def test_training_without_text_is_refused() -> None:
    with pytest.raises(DataError, match="no text to learn"):
        train_bpe([], 400)


def test_ids_take_two_bytes_until_the_vocabulary_needs_four(trained: TextTokenizer) -> None:
    assert trained.dtype == np.dtype("<u2")
    layout = json.loads(trained.json)
    layout["model"]["vocab"]["far"] = 70_000
    wide = TextTokenizer(json.dumps(layout).encode())
    assert (wide.vocab_size, wide.dtype) == (70_001, np.dtype("<u4"))


def test_another_tokenizer_is_used_on_whole_texts_with_its_own_end(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "</s>": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens([AddedToken("</s>")])
    words.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.encode("a b\n\na").tolist() == [1, 2, 1]
    assert (loaded.eod_token, loaded.eod_id) == ("</s>", 3)


def test_files_that_are_no_tokenizer_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.json cannot be read"):
        load_tokenizer(tmp_path / "gone.json")
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(DataError, match=r"a\.json is not a tokenizer"):
        load_tokenizer(tmp_path / "a.json")


def test_a_tokenizer_without_an_end_of_documents_is_refused() -> None:
    bare = Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str().encode()
    with pytest.raises(DataError, match="no end-of-document token"):
        TextTokenizer(bare)


def test_a_tokenizer_that_draws_lots_is_refused(trained: TextTokenizer) -> None:
    layout = json.loads(trained.json)
    layout["model"]["dropout"] = 0.1
    with pytest.raises(DataError, match=r"dropout=0\.1"):
        TextTokenizer(json.dumps(layout).encode())
