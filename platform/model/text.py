"""Text and chat messages to token ids and back, for the model in a folder.

Law: no text from a caller becomes a control token. `encode` reads the spelling of one as ordinary
characters; `render_chat` recognises only those that the model's own template wrote.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Encoding

from eagleray.platform.errors import DataError, UsageError
from eagleray.platform.model.chat import ChatTemplate, checked_turns
from eagleray.platform.model.hf_config import (
    CONFIG_NAME,
    GENERATION_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    num_ids,
    parse_tokenizer,
    read_config,
    read_json,
)

_CHAT_TEMPLATE_NAME = "chat_template.jinja"
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class ModelText:
    """The text side of a model folder in the Hugging Face layout; safe to share between threads.

    Without a chat template (a base model), `render_chat` joins the messages' contents with line
    breaks, leaving the roles out, and the model continues the last one.

    After a control token inside a chat, a tokenizer that begins each text with a space (as
    SentencePiece's do, byte-level ones do not) puts one there too.

    Raises:
        DataError: A file is missing or damaged, or the tokenizer is larger than the model.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / TOKENIZER_NAME
        if not path.is_file():
            raise DataError(f"{path} is missing", "bring the model with its tokenizer.json")
        self._tokenizer = parse_tokenizer(path.read_bytes(), str(path))
        # From here on the spelling of a control token in a text is just text.
        self._tokenizer.encode_special_tokens = True
        self.vocab_size = num_ids(self._tokenizer)
        """Ids of texts are below it; the model may have unused ones above."""
        model_vocab_size = read_config(folder).vocab_size
        if self.vocab_size > model_vocab_size:
            raise DataError(
                f"{path} has ids up to {self.vocab_size - 1}, the model embeds only "
                f"{model_vocab_size}",
                "bring the tokenizer that the model was trained with",
            )
        self._added = self._tokenizer.get_added_tokens_decoder()
        self._control = {t.content: index for index, t in self._added.items() if t.special}
        longest_first = sorted(self._control, key=len, reverse=True)
        self._control_pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._control_ids = frozenset(self._control.values())
        settings = _settings(folder)
        named = {name: _content(settings.get(name)) for name in _SPECIAL_NAMES}
        variables = {name: content for name, content in named.items() if content is not None}
        self.eos_ids = self._find_eos_ids(folder, variables.get("eos_token"))
        """Ids that end a generation."""
        template = _template(folder, settings)
        self._template = template and ChatTemplate(template, self._control, variables)
        self._bytes = self._token_bytes()

    @property
    def has_chat_template(self) -> bool:
        """Whether the model was given one, and so presumably trained to chat."""
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; begins with the model's bos token if its tokenizer says so.

        Raises:
            UsageError: The text is not valid Unicode (a lone surrogate).
        """
        return self._plain(text, add_special_tokens=True)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of the prompt that asks for the assistant's next message.

        Args:
            messages: Each with `role` and `content`, both strings; other fields are left out.

        Raises:
            UsageError: Messages that are malformed, or that the model's template refuses.
        """
        if not self._template:
            return self.encode("\n".join(text for _, text in checked_turns(messages)))
        rendered = self._template.render(messages)
        # The pattern's one group makes `split` alternate between text and control token.
        pieces = self._control_pattern.split(rendered.text)
        pieces[::2] = [rendered.restore(piece) for piece in pieces[::2]]
        for number in range(1, len(pieces), 2):
            # Some control tokens swallow the white space beside them.
            token = self._added[self._control[pieces[number]]]
            if token.lstrip:
                pieces[number - 1] = pieces[number - 1].rstrip()
            if token.rstrip:
                pieces[number + 1] = pieces[number + 1].lstrip()
        ids: list[int] = []
        for number, piece in enumerate(pieces):
            if number % 2:
                ids.append(self._control[piece])
            elif piece:
                ids.extend(self._plain(piece, add_special_tokens=False))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; control tokens give none, broken UTF-8 gives U+FFFD."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token adds to a text; none for control tokens and unused ids.

        A character may be spread over several tokens: join the bytes before decoding them. For a
        byte-level tokenizer, joined and decoded they are what `decode` gives.
        """
        return self._bytes.get(token_id, b"")

    def _plain(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise UsageError(
                "the text is not valid Unicode", "send it without lone surrogates"
            ) from error
        if not self._control_ids.isdisjoint(encoding.ids):
            self._refuse_spelled_control(encoding)
        return encoding.ids

    def _refuse_spelled_control(self, encoding: Encoding) -> None:
        """For tokenizers that find a control token among whole words, not by its own rule."""
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        # The mask is set where the tokenizer itself added a token, such as bos.
        for token, index, is_added in zip(
            encoding.tokens, encoding.ids, encoding.special_tokens_mask, strict=True
        ):
            if index in self._control_ids and not is_added and token != unknown:
                raise UsageError(
                    f"the text spells the control token {token!r}, which this model's tokenizer "
                    "cannot take as text",
                    "leave it out",
                )

    def _find_eos_ids(self, folder: Path, eos_token: str | None) -> frozenset[int]:
        found: list[Any] = [eos_token and self._tokenizer.token_to_id(eos_token)]
        for name in (GENERATION_NAME, CONFIG_NAME):
            if (folder / name).is_file():
                listed = read_json(folder / name).get("eos_token_id")
                found += listed if isinstance(listed, list) else [listed]
        return frozenset(index for index in found if isinstance(index, int))

    def _token_bytes(self) -> dict[int, bytes]:
        byte_of = _byte_level_alphabet()
        is_byte_level = "ByteLevel" in str(self._tokenizer.decoder)
        table: dict[int, bytes] = {}
        for token, index in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if index in self._added:
                table[index] = b"" if self._added[index].special else token.encode()
            elif is_byte_level and byte_of.keys() >= set(token):
                table[index] = bytes(byte_of[character] for character in token)
            elif match := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
                table[index] = bytes.fromhex(match[1])
            else:
                table[index] = token.replace("\u2581", " ").encode()
        return table


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (GPT-2): printable bytes stand for themselves."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(0x100) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {
        chr(0x100 + number): byte for number, byte in enumerate(moved)
    }


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / TOKENIZER_CONFIG_NAME
    return read_json(path) if path.is_file() else {}


def _content(token: Any) -> str | None:
    """A token as tokenizer_config.json names it: a string, or an object with its content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    if (folder / _CHAT_TEMPLATE_NAME).is_file():
        return (folder / _CHAT_TEMPLATE_NAME).read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        template = next((e.get("template") for e in entries if e.get("name") == "default"), None)
    return template if template and isinstance(template, str) else None
