import pytest
from tokenizers import Tokenizer, pre_tokenizers

from eagleray.platform.errors import DataError
from eagleray.platform.model.gguf_tokenizer import rebuild


@pytest.fixture
def metadata():
    """A vocabulary of bytes, two merges, and a token of each kind."""
    tokens = [
        "<eos>",
        "<bos>",
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        "12",
        "123",
        "<think>",
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, *[1] * 258, 4],
        "tokenizer.ggml.merges": ["1 2", "12 3"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
    }


def tokens_of(metadata, text):
    rebuilt = rebuild(metadata, "model.gguf")
    return Tokenizer.from_buffer(rebuilt.tokenizer_json).encode(text).tokens


def test_gpt2_keeps_numbers_together(metadata):
    assert tokens_of(metadata, "1234") == ["123", "4"]


def test_smollm_cuts_every_digit_apart(metadata):
    metadata["tokenizer.ggml.pre"] = "smollm"

    assert tokens_of(metadata, "1234 1") == ["1", "2", "3", "4", "\u0120", "1"]


def test_llama3_cuts_numbers_by_three_and_begins_with_bos(metadata):
    metadata["tokenizer.ggml.pre"] = "llama-bpe"

    assert tokens_of(metadata, "12312") == ["<bos>", "123", "12"]


def test_llama3_takes_words_of_the_vocabulary_whole(metadata):
    metadata["tokenizer.ggml.pre"] = "llama-bpe"
    metadata["tokenizer.ggml.merges"] = []

    assert tokens_of(metadata, "123") == ["<bos>", "123"]


def test_the_file_decides_whether_texts_begin_with_bos(metadata):
    metadata["tokenizer.ggml.add_bos_token"] = True
    assert tokens_of(metadata, "4") == ["<bos>", "4"]

    metadata["tokenizer.ggml.pre"] = "llama-bpe"
    metadata["tokenizer.ggml.add_bos_token"] = False
    assert tokens_of(metadata, "4") == ["4"]


def test_kinds_of_tokens_are_kept(metadata):
    tokenizer = Tokenizer.from_buffer(rebuild(metadata, "model.gguf").tokenizer_json)

    added = {
        token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()
    }
    assert added == {"<eos>": True, "<bos>": True, "<think>": False}
    assert tokenizer.encode("a<think><eos>").ids[1:] == [260, 0]


def test_roles_are_given_by_name(metadata):
    metadata |= {"tokenizer.ggml.eot_token_id": 260, "tokenizer.chat_template": "{{ 1 }}"}

    rebuilt = rebuild(metadata, "model.gguf")

    assert (rebuilt.eos_token, rebuilt.bos_token) == ("<eos>", "<bos>")
    assert (rebuilt.more_eos_tokens, rebuilt.chat_template) == (("<think>",), "{{ 1 }}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "model is 'llama', supported are gpt2"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre is 'tekken', supported are gpt-2, smollm, llama-"),
        ({"tokenizer.ggml.pre": None}, "pre is None"),
        ({"tokenizer.ggml.tokens": []}, "has 0 tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "has 2 tokens, 1 of them different"),
        ({"tokenizer.ggml.merges": ["1 \u00ff\u00ff"]}, "merges do not fit the tokens"),
        ({"tokenizer.ggml.merges": ["12"]}, "merges do not fit the tokens"),
        ({"tokenizer.ggml.eos_token_id": None}, "eos_token_id is missing"),
        ({"tokenizer.ggml.eos_token_id": 999}, "eos_token_id is 999, must be below 261"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_by_key_and_value(metadata, changes, message):
    with pytest.raises(DataError, match=message):
        rebuild(metadata | changes, "model.gguf")
