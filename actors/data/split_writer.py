"""Writes one domain of a split, to shards of equal length."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from eagleray.actors.data.blocks import BlockWriter, ItemArray
from eagleray.actors.data.shards import BLOCK_TOKENS, ShardWriter
from eagleray.actors.data.tokenizer import TextTokenizer
from eagleray.platform.storage import digest_file


class SplitWriter(ABC):
    """Entries in, `<domain>.<split>-00000.bin` and so on out; `describe` after it was closed.

    Args:
        folder: Where the shards go.
        domain: First part of their names.
        split: Second part of their names.
        shard_entries: Tokens or rows of a shard: a multiple of those of a block.
    """

    def __init__(self, folder: Path, domain: str, split: str, shard_entries: int) -> None:
        self._folder, self._domain, self._split = folder, domain, split
        self._shard_entries = shard_entries
        self._writer: BlockWriter | None = None
        self._files: list[dict[str, Any]] = []
        self.num_entries = 0

    def append(self, entries: ItemArray) -> None:
        """Add entries.

        Raises:
            DataError: One does not fit what the shards were declared with.
        """
        while len(entries):
            writer = self._writer or self._next_shard()
            room = self._shard_entries - writer.num_entries
            writer.append(entries[:room])
            self.num_entries += len(entries[:room])
            entries = entries[room:]
            if writer.num_entries == self._shard_entries:
                self._close_shard(writer)

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The domain's part of the manifest."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._writer is None:
            return
        if error is None:
            self._close_shard(self._writer)
        else:
            self._writer.__exit__(kind, error, trace)

    @abstractmethod
    def _open(self, path: Path) -> BlockWriter:
        """A writer of the shard that begins with the next entry."""

    @abstractmethod
    def _counts(self, first: int, count: int) -> dict[str, int]:
        """How the manifest names a shard's first entry and their number."""

    def _next_shard(self) -> BlockWriter:
        self._writer = self._open(self._folder / self._name())
        return self._writer

    def _close_shard(self, writer: BlockWriter) -> None:
        writer.close()
        name, count = self._name(), writer.num_entries
        self._files.append(
            {
                "file": name,
                "domain": self._domain,
                **self._counts(self.num_entries - count, count),
                "sha256": digest_file(self._folder / name),
            }
        )
        self._writer = None

    def _name(self) -> str:
        return f"{self._domain}.{self._split}-{len(self._files):05d}.bin"


class TokenSplitWriter(SplitWriter):
    """The ids of documents, those that end them among them.

    Args:
        folder: Where the shards go.
        domain: First part of their names.
        split: Second part of their names.
        tokenizer: Gives vocabulary and digest.
        shard_bytes: Size of a shard, rounded down to whole blocks, at least one.
        seq_len: T; only for counting samples.
    """

    def __init__(
        self, folder: Path, domain: str, split: str, tokenizer: TextTokenizer, shard_bytes: int,
        seq_len: int,
    ) -> None:  # fmt: skip
        num_blocks = shard_bytes // tokenizer.dtype.itemsize // BLOCK_TOKENS
        super().__init__(folder, domain, split, max(1, num_blocks) * BLOCK_TOKENS)
        self._tokenizer, self._seq_len = tokenizer, seq_len
        self._lengths: Counter[int] = Counter()
        self._num_documents = 0

    def count(self, documents: int, lengths: Mapping[int, int]) -> None:
        """Count documents; `lengths` by the bits of their number of tokens."""
        self._num_documents += documents
        self._lengths.update(lengths)

    def describe(self) -> dict[str, Any]:
        """The domain's part of the manifest."""
        samples = max(0, self.num_entries - 1) // self._seq_len
        used = samples * self._seq_len + 1 if samples else 0
        return {
            "documents": self._num_documents,
            "tokens": self.num_entries,
            "samples": samples,
            "dropped_tokens": self.num_entries - used,
            "document_tokens": [[2**bits, self._lengths[bits]] for bits in sorted(self._lengths)],
            "shards": self._files,
        }

    def _open(self, path: Path) -> ShardWriter:
        return ShardWriter(
            path,
            vocab_size=self._tokenizer.vocab_size,
            tokenizer_sha256=bytes.fromhex(self._tokenizer.digest),
            first_token=self.num_entries,
        )

    def _counts(self, first: int, count: int) -> dict[str, int]:
        return {"tokens": count, "first_token": first}


def joined(domains: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A split's part of the manifest, from what its domains' writers describe."""
    first = next(iter(domains.values()))
    counts = [name for name, value in first.items() if isinstance(value, int)]
    whole: dict[str, Any] = {
        name: sum(described[name] for described in domains.values()) for name in counts
    }
    if "document_tokens" in first:
        lengths: Counter[int] = Counter()
        for described in domains.values():
            lengths.update({upper: count for upper, count in described["document_tokens"]})
        whole["document_tokens"] = [[upper, lengths[upper]] for upper in sorted(lengths)]
    return {
        **whole,
        "domains": {
            domain: {name: value for name, value in described.items() if name != "shards"}
            for domain, described in domains.items()
        },
        "shards": [shard for described in domains.values() for shard in described["shards"]],
    }
