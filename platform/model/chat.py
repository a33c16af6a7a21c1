"""Chat templates: messages to one string in which the template's control tokens alone are real.

A template is Jinja that comes with the model, never from a caller. It builds a prompt out of
control tokens (`<|im_start|>`) and the messages' text, in one string; text that spells a control
token would become one. So text is *marked* before the template runs: where it spells a control
token, a character that occurs nowhere else stands for the first one; and at an edge that could
complete a control token together with what the template puts beside it, such a character stands
between them. Control tokens that are whole after rendering are the template's; then the text is
restored (`Rendered.restore`).

Unlike placeholders for the text, this leaves templates free to trim it, to test how it starts or
ends and to branch on it, and text and template are still cut into tokens as one string, as when the
model was trained. A template that itself deletes or replaces characters within the text could undo
it; trimming, splitting and joining do not.
"""

import datetime
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from eagleray.platform.errors import DataError, UsageError

_ROLE = re.compile(r"[a-z][a-z_]{0,31}")
_PRIVATE_USE = range(0xF0000, 0x10FFFE)
"""Unicode planes 15 and 16: no character there has a meaning of its own."""


@dataclass(frozen=True)
class Rendered:
    """A prompt whose whole control tokens are real; what lies between them is still marked."""

    text: str
    marks: Mapping[int, str]

    def restore(self, piece: str) -> str:
        """A piece of `text` as the caller and the template wrote it."""
        return piece.translate(self.marks)


class ChatTemplate:
    """A model's template, compiled once; safe to use from several threads.

    Args:
        source: Jinja, as in tokenizer_config.json.
        control_tokens: What a message must not be able to say.
        variables: Further names that templates use: bos_token, eos_token, ...

    Raises:
        DataError: The template does not compile.
    """

    def __init__(
        self, source: str, control_tokens: Iterable[str], variables: dict[str, str]
    ) -> None:
        self._control_tokens = sorted(control_tokens, key=len, reverse=True)
        # One character wide, so that control tokens that overlap are all found.
        spelled = "|".join(map(re.escape, self._control_tokens)) or "(?!)"
        self._spelled = re.compile(f"(?={spelled}).", re.DOTALL)
        self._firsts = sorted({token[0] for token in self._control_tokens})
        sizes = [(token, size) for token in self._control_tokens for size in range(1, len(token))]
        self._beginnings = frozenset(token[:size] for token, size in sizes)
        self._ends = frozenset(token[size:] for token, size in sizes)
        self._variables = variables
        self._source_characters = frozenset(source)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        # What transformers offers to templates, so that the same ones work.
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise DataError(
                f"the model's chat template does not compile: {error}",
                "fetch the model again, or mend chat_template in its tokenizer_config.json",
            ) from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> Rendered:
        """The prompt that asks for the assistant's next message.

        Raises:
            UsageError: Messages that are malformed, or that the template refuses.
        """
        turns = checked_turns(messages)
        edge, *marks = self._free_characters(turns, 1 + len(self._firsts))
        mark_of = dict(zip(self._firsts, marks, strict=True))
        marked = [
            {"role": role, "content": self._marked(text, edge, mark_of)} for role, text in turns
        ]
        try:
            text = self._template.render(
                **self._variables, messages=marked, add_generation_prompt=True
            )
        except Exception as error:  # A template is code: any exception may come out of it.
            raise UsageError(
                f"the model's chat template refuses these messages: {error}",
                "send the roles in the order that the model was trained on",
            ) from error
        return Rendered(text, {ord(edge): "", **{ord(m): c for c, m in mark_of.items()}})

    def _free_characters(self, turns: list[tuple[str, str]], count: int) -> list[str]:
        used = self._source_characters.union(*(text for _, text in turns))
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        found = list(itertools.islice(free, count))
        if len(found) < count:
            raise UsageError(
                "the messages use every private-use character of Unicode", "leave some out"
            )
        return found

    def _marked(self, content: str, edge: str, mark_of: Mapping[str, str]) -> str:
        core = content.strip()
        if not core or not self._control_tokens:
            return content
        longest = len(self._control_tokens[0])
        sizes = range(1, min(longest, len(core) + 1))
        completes = any(core[:size] in self._ends for size in sizes)
        is_inside = len(core) < longest and any(core in token for token in self._control_tokens)
        head = edge if completes or is_inside else ""
        tail = edge if any(core[-size:] in self._beginnings for size in sizes) else ""
        core = self._spelled.sub(lambda found: mark_of[found[0]], core)
        # Inside the white space at both ends, so that trimming still finds it.
        start = len(content) - len(content.lstrip())
        return content[:start] + head + core + tail + content[len(content.rstrip()) :]


def checked_turns(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Role and text of each message; other fields are left out.

    Raises:
        UsageError: There is none, or one has no plain role or no text.
    """
    if not messages:
        raise UsageError("there are no messages", "send at least one")
    turns: list[tuple[str, str]] = []
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise UsageError(
                f"messages[{index}].role is {role!r}", "name one such as system, user or assistant"
            )
        if not isinstance(content, str):
            raise UsageError(
                f"messages[{index}].content is a {type(content).__name__}", "send it as a string"
            )
        turns.append((role, content))
    return turns


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own escapes < and >, which models do not expect.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(reason: str) -> None:
    raise jinja2.TemplateError(reason)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)
