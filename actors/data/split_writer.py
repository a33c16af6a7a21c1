"""Writes one domain of a split: the ids of its documents, to shards of equal length."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from eagleray.actors.data.shards import BLOCK_TOKENS, ShardWriter
from eagleray.actors.data.tokenizer import TextTokenizer
from eagleray.platform.storage import digest_file


class SplitWriter:
    """Ids in, `<domain>.<split>-00000.bin` and so on out; `describe` after it was closed.

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
        self._folder, self._domain, self._split = folder, domain, split
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        num_blocks = shard_bytes // tokenizer.dtype.itemsize // BLOCK_TOKENS
        self._tokens_per_shard = max(1, num_blocks) * BLOCK_TOKENS
        self._writer: ShardWriter | None = None
        self._files: list[dict[str, Any]] = []
        self._lengths: Counter[int] = Counter()
        self.num_documents = 0
        self.num_tokens = 0

    def count(self, documents: int, lengths: Mapping[int, int]) -> None:
        """Count documents; `lengths` by the bits of their number of tokens."""
        self.num_documents += documents
        self._lengths.update(lengths)

    def append(self, tokens: npt.NDArray[np.unsignedinteger[Any]]) -> None:
        """Add ids, those that end documents among them.

        Raises:
            DataError: An id does not fit the vocabulary.
        """
        while len(tokens):
            writer = self._writer or self._next_shard()
            room = self._tokens_per_shard - writer.num_tokens
            writer.append(tokens[:room])
            self.num_tokens += len(tokens[:room])
            tokens = tokens[room:]
            if writer.num_tokens == self._tokens_per_shard:
                self._close_shard(writer)

    def describe(self) -> dict[str, Any]:
        """The domain's part of the manifest."""
        samples = max(0, self.num_tokens - 1) // self._seq_len
        used = samples * self._seq_len + 1 if samples else 0
        return {
            "documents": self.num_documents,
            "tokens": self.num_tokens,
            "samples": samples,
            "dropped_tokens": self.num_tokens - used,
            "document_tokens": [[2**bits, self._lengths[bits]] for bits in sorted(self._lengths)],
            "shards": self._files,
        }

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

    def _next_shard(self) -> ShardWriter:
        self._writer = ShardWriter(
            self._folder / self._name(),
            vocab_size=self._tokenizer.vocab_size,
            tokenizer_sha256=bytes.fromhex(self._tokenizer.digest),
            first_token=self.num_tokens,
        )
        return self._writer

    def _close_shard(self, writer: ShardWriter) -> None:
        writer.close()
        name = self._name()
        self._files.append(
            {
                "file": name,
                "domain": self._domain,
                "tokens": writer.num_tokens,
                "first_token": self.num_tokens - writer.num_tokens,
                "sha256": digest_file(self._folder / name),
            }
        )
        self._writer = None

    def _name(self) -> str:
        return f"{self._domain}.{self._split}-{len(self._files):05d}.bin"


def joined(domains: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A split's part of the manifest, from what its domains' writers describe."""
    counts = ("documents", "tokens", "samples", "dropped_tokens")
    lengths: Counter[int] = Counter()
    for described in domains.values():
        lengths.update({upper: count for upper, count in described["document_tokens"]})
    return {
        **{name: sum(described[name] for described in domains.values()) for name in counts},
        "document_tokens": [[upper, lengths[upper]] for upper in sorted(lengths)],
        "domains": {
            domain: {name: value for name, value in described.items() if name != "shards"}
            for domain, described in domains.items()
        },
        "shards": [shard for described in domains.values() for shard in described["shards"]],
    }
