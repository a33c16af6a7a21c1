import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from eagleray.serve.engine.detokenizer import OutputText, StopMatcher
from eagleray.serve.engine.sampled_token import TokenLogprob

SAMPLE = (
    "na\u00efve d\u00e9j\u00e0 \u6771\u4eac\u90fd "
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 e\u0301 "
    "\u043e\u043a \ud55c\uad6d\uc5b4 \U0001f1ef\U0001f1f5 end"
)
TEXTS = st.text(st.sampled_from(SAMPLE) | st.characters(exclude_categories=["Cs"]), max_size=40)


class Pieces:
    """A vocabulary made of the very pieces of one output."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]


def cut(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    borders = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(borders)]


def run(pieces: Sequence[bytes], stops: Sequence[str]) -> tuple[list[str], bool]:
    """The pieces that a client gets, and whether a stop string ended them."""
    output = OutputText(Pieces(pieces), stops)
    sent = []
    for token in range(len(pieces)):
        sent.append(output.push(token).text)
        if output.is_stopped:
            return [*sent, output.flush().text], True
    return [*sent, output.flush().text], False


def test_a_character_is_sent_whole_when_its_last_byte_has_come() -> None:
    pieces = [bytes([byte]) for byte in "a\U0001f44db".encode()]
    assert run(pieces, []) == (["a", "", "", "", "\U0001f44d", "b", ""], False)


def test_a_character_that_the_output_only_began_is_left_out() -> None:
    assert run([b"ok ", "\U0001f44d".encode()[:3]], []) == (["ok ", "", ""], False)


def test_bytes_that_are_no_text_are_shown_as_a_decode_of_the_whole_shows_them() -> None:
    data = b"a\xff\xe6\x9d b\x80\x80 \xf0\x9f"
    sent, _ = run([bytes([byte]) for byte in data], [])
    # The trailing two bytes have only begun a character.
    assert "".join(sent) == data[:-2].decode("utf-8", "replace")


@given(TEXTS, st.lists(st.integers(0, 400), max_size=60))
def test_pieces_join_to_the_text_whatever_the_token_borders(text: str, cuts: list[int]) -> None:
    sent, _ = run(cut(text.encode(), cuts), [])
    assert "".join(sent) == text


STOPS = st.lists(st.text(st.sampled_from("ab\u6771\U0001f44d"), min_size=1, max_size=4), max_size=4)


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the output ends: at the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return end - max(lengths)
    return None


@given(
    st.text(st.sampled_from("ab\u6771\U0001f44d"), max_size=16),
    STOPS,
    st.lists(st.integers(0, 64), max_size=40),
)
def test_nothing_of_a_stop_string_is_sent_whatever_the_token_borders(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    sent, is_stopped = run(cut(text.encode(), cuts), stops)
    end = first_stop(text, stops)
    assert is_stopped == (end is not None)
    assert "".join(sent) == text[:end]


def test_every_split_of_a_stop_string_over_tokens_is_found() -> None:
    text, stop = "the answer<END of \u6771>junk", "<END of \u6771>"
    data = text.encode()
    for first in range(len(data)):
        for second in range(first, len(data)):
            sent, is_stopped = run(cut(data, [first, second]), [stop])
            assert is_stopped
            assert "".join(sent) == "the answer"


def test_what_can_no_longer_become_a_stop_string_is_sent_at_once() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("Hello\n") == "Hello"
    assert matcher.push("\nUs") == ""
    assert matcher.push("a") == "\n\nUsa"
    assert matcher.flush() == ""


@pytest.mark.parametrize(
    ("pieces", "sent"),
    [(["aa", "b"], ""), (["aaa", "b"], "a"), (["xa", "a", "ab"], "xa"), (["aab"], "")],
)
def test_a_stop_string_that_begins_with_itself_is_found(pieces: list[str], sent: str) -> None:
    matcher = StopMatcher(["aab"])
    assert "".join(matcher.push(piece) for piece in pieces) == sent
    assert matcher.is_met


def test_text_held_back_for_a_stop_string_is_sent_when_the_output_ends_without_it() -> None:
    assert run([b"a ST", b"O"], ["STOP"]) == (["a ", "", "STO"], False)


def entries(output: OutputText, pieces: Sequence[bytes]) -> list[list[int]]:
    return [
        [entry.token_id for entry in output.push(token, TokenLogprob(token, -1.0, ())).logprobs]
        for token in range(len(pieces))
    ]


def test_logprobs_come_with_the_text_that_their_tokens_complete() -> None:
    pieces = [b"a", *(bytes([byte]) for byte in "\u6771".encode()), b"b"]
    output = OutputText(Pieces(pieces), [])
    assert entries(output, pieces) == [[0], [], [], [1, 2, 3], [4]]


def test_logprobs_of_a_stop_string_are_never_sent() -> None:
    pieces = [b"hi", b" ST", b"OP"]
    output = OutputText(Pieces(pieces), ["STOP"])
    assert entries(output, pieces) == [[0], [], []]
    assert output.is_stopped
    assert output.flush().logprobs == ()


def test_logprobs_that_were_held_back_come_at_the_end_of_an_output_without_stop() -> None:
    pieces = [b"hi", b" ST", "\u6771".encode()[:2]]
    output = OutputText(Pieces(pieces), ["STOP"])
    assert entries(output, pieces) == [[0], [], []]
    assert [entry.token_id for entry in output.flush().logprobs] == [1, 2]


@pytest.fixture(scope="module")
def byte_level() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([SAMPLE] * 5, trainer)
    return tokenizer


@given(st.lists(st.integers(0, 399), max_size=40))
def test_random_tokens_of_a_real_tokenizer_stream_as_it_decodes_them(
    byte_level: Any, ids: list[int]
) -> None:
    ids = [index for index in ids if index < byte_level.get_vocab_size()]
    alphabet = _alphabet()
    spelled = [bytes(alphabet[c] for c in byte_level.id_to_token(index)) for index in ids]
    whole = byte_level.decode(ids)
    sent = "".join(run(spelled, [])[0])
    # The decode of the whole shows a character that was only begun as one U+FFFD.
    assert whole in (sent, sent + "\ufffd")


def _alphabet() -> dict[str, int]:
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(0x100) if byte not in kept]
    return {chr(b): b for b in kept} | {chr(0x100 + i): b for i, b in enumerate(moved)}
