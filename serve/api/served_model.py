"""What an API needs to know of the model behind it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from eagleray.serve.api.allowance import KeyLimits
from eagleray.serve.engine.engine import Engine


class ServedText(Protocol):
    """The text side of a model; see `platform.model.text.ModelText`."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a chat."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text."""
        ...


@dataclass(frozen=True)
class ServedModel:
    """What one application serves.

    Attributes:
        name, version: `model` of a request is `name` or `name@version`.
        digest: Of the model's record; sent with every answer.
        created_s: When the model was registered.
        engine: Generates; running.
        text: Its tokenizer and chat template.
        timeout_s: Longest life of a request.
        max_body_bytes: Largest body that is read.
        key_limits: What a key may use that has no limits of its own.
    """

    name: str
    version: int
    digest: str
    created_s: float
    engine: Engine
    text: ServedText
    timeout_s: float
    max_body_bytes: int
    key_limits: KeyLimits = field(default_factory=KeyLimits)

    @property
    def names(self) -> tuple[str, str]:
        """What a request may call it."""
        return self.name, f"{self.name}@{self.version}"
