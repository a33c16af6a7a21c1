"""A built dataset: two splits of token shards, a tokenizer, and a manifest that names it all.

Samples overlap by one token: sample i holds tokens [i*T, i*T + T], so that each position has a
target.
    T = seq_len, n = samples asked for.
Layout and manifest: docs/formats.md#dataset.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from eagleray.actors.data.shards import Shard, TokenArray
from eagleray.platform.errors import IntegrityError, NotFoundError, StorageError
from eagleray.platform.storage import Storage, digest_bytes, digest_file

FORMAT = 1
SPLITS = ("train", "eval")
Split = Literal["train", "eval"]
IntArray = npt.NDArray[np.int64]
SampleArray = npt.NDArray[np.int32]

_RESTORE = "restore the file from a copy, or remove the dataset's folder and build it again"


@dataclass(frozen=True)
class Damage:
    """One file, or one block of a shard, that is not as it was written."""

    file: str
    block: int | None
    reason: str


class TokenStream:
    """One split as one run of tokens over its shards; all shards but the last are equally long."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        header = shards[0].header
        self.tokens_per_shard, self.block_tokens = header.num_tokens, header.block_tokens
        self.blocks_per_shard, self.dtype = header.num_blocks, header.dtype
        self.num_tokens = sum(shard.header.num_tokens for shard in shards)

    def read(self, start: int, out: SampleArray) -> None:
        """Fill `out` with the tokens from `start` on."""
        done = 0
        while done < len(out):
            number, offset = divmod(start + done, self.tokens_per_shard)
            shard = self.shards[number]
            stop = min(offset + len(out) - done, shard.header.num_tokens)
            out[done : done + stop - offset] = shard.read(offset, stop)
            done += stop - offset

    def read_block(self, block: int) -> TokenArray:
        """One block of the split, counted over all shards; a read-only view."""
        number, local = divmod(block, self.blocks_per_shard)
        return self.shards[number].read_block(local)

    def block_crc(self, block: int) -> int:
        """The CRC-32 that the bytes of a block must have."""
        number, local = divmod(block, self.blocks_per_shard)
        return int(self.shards[number].crcs[local])


class Dataset:
    """An open dataset; use `Dataset.open`. Immutable, and safe for several threads."""

    def __init__(self, folder: Path, digest: str, manifest: dict[str, Any]) -> None:
        self.folder, self.digest, self.manifest = folder, digest, manifest
        self.seq_len = int(manifest["seq_len"])
        self.vocab_size = int(manifest["vocab_size"])
        self.eod_id = int(manifest["tokenizer"]["eod_id"])
        self._streams = {
            split: TokenStream(
                [self._open_shard(entry) for entry in manifest["splits"][split]["shards"]]
            )
            for split in SPLITS
        }

    @classmethod
    def open(cls, storage: Storage, digest: str) -> "Dataset":
        """Open a dataset by its digest; headers are checked now, blocks when they are read.

        Raises:
            NotFoundError: There is none.
            IntegrityError: A file is missing, cut short or damaged.
        """
        folder = storage.path("datasets", digest)
        try:
            content = storage.read("datasets", digest, "manifest.json")
        except NotFoundError:
            raise NotFoundError(
                f"there is no dataset {digest} in {storage.root}", "build one: eagleray data build"
            ) from None
        if digest_bytes(content) != digest:
            raise IntegrityError(
                f"{folder / 'manifest.json'} does not have its own digest", _RESTORE
            )
        manifest = storage.read_json("datasets", digest, "manifest.json")
        if manifest["format"] != FORMAT:
            raise StorageError(
                f"dataset {digest} has format {manifest['format']}, this program reads {FORMAT}",
                "use the program that wrote it, or build it again",
            )
        return cls(folder, digest, manifest)

    @cached_property
    def tokenizer_json(self) -> bytes:
        """The bytes of tokenizer.json.

        Raises:
            IntegrityError: They are missing or not those that the manifest names.
        """
        path = self.folder / "tokenizer.json"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise IntegrityError(f"{path} cannot be read: {error}", _RESTORE) from error
        if digest_bytes(content) != self.manifest["tokenizer"]["sha256"]:
            raise IntegrityError(f"{path} does not have the digest in the manifest", _RESTORE)
        return content

    def num_samples(self, split: Split) -> int:
        """Samples of seq_len + 1 tokens."""
        return int(self._split(split)["samples"])

    def read(self, split: Split, ids: IntArray) -> SampleArray:
        """Samples by id: int32 [n, T+1], a new array.

        Raises:
            ValueError: An id is out of range.
            IntegrityError: A block is damaged; names shard and block.
        """
        out = self._empty(split, ids)
        stream = self._streams[split]
        for row, sample in zip(out, ids.tolist(), strict=True):
            stream.read(sample * self.seq_len, row)
        return out

    def read_through(
        self, split: Split, ids: IntArray, fetch: Callable[[list[int]], list[TokenArray]]
    ) -> SampleArray:
        """The same as `read`, from blocks that `fetch` brings, each asked for once and in order."""
        out = self._empty(split, ids)
        size = self._streams[split].block_tokens
        starts = (ids * self.seq_len).tolist()
        wanted = sorted(
            {b for s in starts for b in range(s // size, (s + self.seq_len) // size + 1)}
        )
        blocks = dict(zip(wanted, fetch(wanted), strict=True))
        for row, start in zip(out, starts, strict=True):
            done = 0
            while done < len(row):
                block, offset = divmod(start + done, size)
                part = blocks[block][offset : offset + len(row) - done]
                row[done : done + len(part)] = part
                done += len(part)
        return out

    def stream(self, split: Split) -> TokenStream:
        """The split's tokens and blocks."""
        self._split(split)
        return self._streams[split]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files but the manifest, as they lie there now."""
        return sum(p.stat().st_size for p in self.folder.iterdir() if p.name != "manifest.json")

    def verify(self) -> list[Damage]:
        """Check every byte of every file; nothing found means that nothing is damaged."""
        found: list[Damage] = []
        for split in SPLITS:
            for entry in self.manifest["splits"][split]["shards"]:
                found += self._verify_shard(entry)
        try:
            self.__dict__.pop("tokenizer_json", None)
            self.tokenizer_json  # noqa: B018 - reading it is the check
        except IntegrityError as error:
            found.append(Damage("tokenizer.json", None, error.what))
        return found

    def _verify_shard(self, entry: dict[str, Any]) -> list[Damage]:
        name = str(entry["file"])
        try:
            shard = self._open_shard(entry)
        except IntegrityError as error:
            return [Damage(name, None, error.what)]
        found = [Damage(name, block, "fails its checksum") for block in shard.damaged_blocks()]
        if not found and digest_file(self.folder / name) != entry["sha256"]:
            found.append(Damage(name, None, "does not have the digest in the manifest"))
        return found

    def _open_shard(self, entry: dict[str, Any]) -> Shard:
        shard = Shard(self.folder / str(entry["file"]))
        header = shard.header
        promised = (entry["tokens"], entry["first_token"], self.vocab_size)
        if (header.num_tokens, header.first_token, header.vocab_size) != promised:
            raise IntegrityError(
                f"shard {shard.path.name} is not the one that the manifest names ({shard.path})",
                _RESTORE,
            )
        return shard

    def _split(self, split: Split) -> dict[str, Any]:
        if split not in SPLITS:
            raise ValueError(f"split {split!r} must be one of {', '.join(SPLITS)}")
        found: dict[str, Any] = self.manifest["splits"][split]
        return found

    def _empty(self, split: Split, ids: IntArray) -> SampleArray:
        limit = self.num_samples(split)
        if ids.size and (ids.min() < 0 or ids.max() >= limit):
            raise ValueError(
                f"sample ids {ids.min()}..{ids.max()} must be in 0..{limit - 1} of split {split}"
            )
        return np.empty((len(ids), self.seq_len + 1), dtype=np.int32)
