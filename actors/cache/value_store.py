"""The seam between the feature cache and what keeps its values."""

from collections.abc import Sequence
from typing import Protocol


class ValueStore(Protocol):
    """Where values are kept. Answers in bounded time; a fault is a miss and raises nothing."""

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The payload under each 16-byte key digest; None where there is none."""
        ...

    def put_many(self, items: Sequence[tuple[bytes, bytes]]) -> int:
        """Store payloads where there is room; how many were stored."""
        ...

    def close(self) -> None:
        """Let go of connections and memory."""
        ...
