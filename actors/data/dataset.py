"""A built dataset: shards by split and domain, and a manifest that names it all.

Each domain of a split is one stream, of tokens or of the values of rows. Samples of text overlap by
one token: sample i of a domain holds tokens [i*T, i*T + T], so that each position has a target.
Other samples are rows. Ids count through the domains in their order, and so do blocks.
    T = seq_len, n = samples asked for, D = domains, W = values of a row: the features, the label.
Layout and manifest: docs/formats.md#dataset.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from eagleray.actors.data.features import Features, RowLayout
from eagleray.actors.data.rows import RowShard
from eagleray.actors.data.shards import Shard, TokenArray
from eagleray.platform.errors import DataError, IntegrityError, NotFoundError, StorageError
from eagleray.platform.storage import Storage, digest_bytes, digest_file

FORMAT = 2
"""Of datasets of text."""
FEATURES_FORMAT = 3
_READABLE = (1, 2, 3)
ONE_DOMAIN = "main"
"""What the domain is called of sources that name none."""
Split = Literal["train", "eval"]
SPLITS: tuple[Split, ...] = ("train", "eval")
IntArray = npt.NDArray[np.int64]
SampleArray = npt.NDArray[np.int32 | np.float32]

_RESTORE = "restore the file from a copy, or remove the dataset's folder and build it again"


@dataclass(frozen=True)
class Damage:
    """One file, or one block of a shard, that is not as it was written."""

    file: str
    block: int | None
    reason: str


class SampleShape(NamedTuple):
    """Where samples lie in a stream: sample i at [i * stride, i * stride + length)."""

    stride: int
    length: int
    dtype: np.dtype[Any]


class TokenStream:
    """One domain of a split as one run of tokens, or of the values of rows.

    All shards but the last are equally long.
    """

    def __init__(self, shards: Sequence[Shard] | Sequence[RowShard]) -> None:
        self.shards = shards
        header = shards[0].header
        self.tokens_per_shard, self.block_tokens = header.num_items, header.block_items
        self.blocks_per_shard, self.dtype = header.num_blocks, header.dtype
        self.num_tokens = sum(shard.header.num_items for shard in shards)
        self.num_blocks = sum(shard.header.num_blocks for shard in shards)

    def read(self, start: int, out: SampleArray) -> None:
        """Fill `out` with the tokens from `start` on."""
        done = 0
        while done < len(out):
            number, offset = divmod(start + done, self.tokens_per_shard)
            shard = self.shards[number]
            stop = min(offset + len(out) - done, shard.header.num_items)
            out[done : done + stop - offset] = shard.read(offset, stop)
            done += stop - offset

    def gather(self, starts_N: IntArray, out: SampleArray) -> None:
        """Fill each row of `out` with the tokens from its start on."""
        length = out.shape[1]
        if len(self.shards) == 1 and length <= self.block_tokens:
            out[:] = self.shards[0].gather(starts_N, length)
            return
        number_N, offset_N = np.divmod(starts_N, self.tokens_per_shard)
        # The few that run into the next shard, or over more than two blocks, go the long way.
        fits_N = offset_N + length <= self.tokens_per_shard
        if length > self.block_tokens:
            fits_N[:] = False
        for row in np.flatnonzero(~fits_N):
            self.read(int(starts_N[row]), out[row])
        for number in np.unique(number_N[fits_N]).tolist():
            rows = np.flatnonzero(fits_N & (number_N == number))
            out[rows] = self.shards[number].gather(offset_N[rows], length)

    def read_block(self, block: int) -> TokenArray:
        """One block of the stream, counted over all its shards; a read-only view."""
        number, local = divmod(block, self.blocks_per_shard)
        return self.shards[number].read_block(local)

    def block_crc(self, block: int) -> int:
        """The CRC-32 that the bytes of a block must have."""
        number, local = divmod(block, self.blocks_per_shard)
        return int(self.shards[number].crcs[local])


class TokenSplit:
    """The domains of one split, behind one count of samples and one of blocks.

    Args:
        shape: Of the samples.
        sizes: Samples of each domain.
        streams: What they are cut from; None for a domain without any.
    """

    def __init__(
        self, shape: SampleShape, sizes: Sequence[int], streams: Sequence[TokenStream | None]
    ) -> None:
        self.shape, self.sizes = shape, tuple(sizes)
        self.streams = list(streams)
        self.num_samples = sum(self.sizes)
        self._sample_ends = list(accumulate(self.sizes))
        self._ends_D = np.array(self._sample_ends, dtype=np.int64)
        self._block_ends = list(accumulate(s.num_blocks if s else 0 for s in streams))

    def read(self, ids: IntArray) -> SampleArray:
        """Samples by id: int32 [n, T+1] or float32 [n, W], a new array."""
        out = self._empty(ids)
        if len(self.streams) == 1:
            self._stream(0).gather(ids * self.shape.stride, out)
            return out
        domain_N = np.searchsorted(self._ends_D, ids, side="right")
        for domain in np.unique(domain_N).tolist():
            rows = np.flatnonzero(domain_N == domain)
            first = self._sample_ends[domain] - self.sizes[domain]
            part = np.empty((len(rows), out.shape[1]), out.dtype)
            self._stream(domain).gather((ids[rows] - first) * self.shape.stride, part)
            out[rows] = part
        return out

    def blocks_of(self, ids: IntArray) -> list[int]:
        """The blocks that samples lie in, each once and in order."""
        domain_N = np.searchsorted(self._ends_D, ids, side="right")
        found: set[int] = set()
        for domain in np.unique(domain_N).tolist():
            first, size = self._sample_ends[domain] - self.sizes[domain], self._block_size(domain)
            start_N = (ids[domain_N == domain] - first) * self.shape.stride
            first_N, last_N = start_N // size, (start_N + self.shape.length - 1) // size
            base = self._first_block(domain)
            for more in range(int((last_N - first_N).max()) + 1):
                found.update((base + np.minimum(first_N + more, last_N)).tolist())
        return sorted(found)

    def read_through(
        self, ids: IntArray, fetch: Callable[[list[int]], list[TokenArray]]
    ) -> SampleArray:
        """The same as `read`, from blocks that `fetch` brings, each asked for once and in order."""
        out = self._empty(ids)
        order = self.blocks_of(ids)
        blocks = dict(zip(order, fetch(order), strict=True))
        for row, (domain, local) in zip(out, self._places(ids), strict=True):
            size, base = self._block_size(domain), self._first_block(domain)
            start, done = local * self.shape.stride, 0
            while done < len(row):
                block, offset = divmod(start + done, size)
                part = blocks[base + block][offset : offset + len(row) - done]
                row[done : done + len(part)] = part
                done += len(part)
        return out

    def read_block(self, block: int) -> TokenArray:
        """One block of the split, counted over all domains; a read-only view."""
        stream, local = self._block(block)
        return stream.read_block(local)

    def block_crc(self, block: int) -> int:
        """The CRC-32 that the bytes of a block must have."""
        stream, local = self._block(block)
        return stream.block_crc(local)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the ids on disk."""
        return next(stream.dtype for stream in self.streams if stream)

    def _places(self, ids: IntArray) -> Iterator[tuple[int, int]]:
        """(domain, number inside it) of each id."""
        for sample in ids.tolist():
            domain = bisect_right(self._sample_ends, sample)
            yield domain, sample - (self._sample_ends[domain] - self.sizes[domain])

    def _block(self, block: int) -> tuple[TokenStream, int]:
        domain = bisect_right(self._block_ends, block)
        return self._stream(domain), block - self._first_block(domain)

    def _block_size(self, domain: int) -> int:
        return self._stream(domain).block_tokens

    def _first_block(self, domain: int) -> int:
        return self._block_ends[domain - 1] if domain else 0

    def _stream(self, domain: int) -> TokenStream:
        stream = self.streams[domain]
        assert stream is not None, "a domain with samples or blocks has a stream"
        return stream

    def _empty(self, ids: IntArray) -> SampleArray:
        if ids.size and (ids.min() < 0 or ids.max() >= self.num_samples):
            raise ValueError(
                f"sample ids {ids.min()}..{ids.max()} must be in 0..{self.num_samples - 1}"
            )
        return np.empty((len(ids), self.shape.length), dtype=self.shape.dtype)


class Dataset:
    """An open dataset; use `Dataset.open`. Immutable, and safe for several threads."""

    def __init__(self, folder: Path, digest: str, manifest: dict[str, Any]) -> None:
        self.folder, self.digest, self.manifest = folder, digest, manifest
        described = manifest.get("features")
        self.features = Features.from_manifest(described) if described else None
        """What its rows mean; None of a dataset of text."""
        self.domains = tuple(str(name) for name in manifest.get("domains", [ONE_DOMAIN]))
        self._splits = {split: self._open_split(split) for split in SPLITS}

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
        if manifest["format"] not in _READABLE:
            raise StorageError(
                f"dataset {digest} has format {manifest['format']}, this program reads "
                f"{', '.join(map(str, _READABLE[:-1]))} and {_READABLE[-1]}",
                "use the program that wrote it, or build it again",
            )
        return cls(folder, digest, manifest)

    @property
    def seq_len(self) -> int:
        """T. Of a dataset of features, this and the next raise DataError."""
        return int(self._of_text("seq_len"))

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return int(self._of_text("vocab_size"))

    @property
    def eod_id(self) -> int:
        """The token that ends each document."""
        return int(self._of_text("tokenizer")["eod_id"])

    @property
    def layout(self) -> RowLayout | None:
        """How a row is parted; None of a dataset of text."""
        return self.features.layout if self.features else None

    @cached_property
    def tokenizer_json(self) -> bytes:
        """The bytes of tokenizer.json.

        Raises:
            IntegrityError: They are missing or not those that the manifest names.
            DataError: It is a dataset of features.
        """
        tokenizer = self._of_text("tokenizer")
        path = self.folder / "tokenizer.json"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise IntegrityError(f"{path} cannot be read: {error}", _RESTORE) from error
        if digest_bytes(content) != tokenizer["sha256"]:
            raise IntegrityError(f"{path} does not have the digest in the manifest", _RESTORE)
        return content

    def num_samples(self, split: Split) -> int:
        """Samples, over all domains."""
        return self.split(split).num_samples

    def sizes(self, split: Split) -> tuple[int, ...]:
        """Samples of each domain."""
        return self.split(split).sizes

    def read(self, split: Split, ids: IntArray) -> SampleArray:
        """Samples by id, a new array: int32 [n, T+1], or rows float32 [n, W], the label last.

        Raises:
            ValueError: An id is out of range.
            IntegrityError: A block is damaged; names shard and block.
        """
        return self.split(split).read(ids)

    def split(self, split: Split) -> TokenSplit:
        """The split's samples and blocks."""
        if split not in SPLITS:
            raise ValueError(f"split {split!r} must be one of {', '.join(SPLITS)}")
        return self._splits[split]

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
        if self.features is None:
            try:
                self.__dict__.pop("tokenizer_json", None)
                self.tokenizer_json  # noqa: B018 - reading it is the check
            except IntegrityError as error:
                found.append(Damage("tokenizer.json", None, error.what))
        return found

    def _of_text(self, name: str) -> Any:
        if self.features is not None:
            raise DataError(
                f"dataset {self.digest} holds rows of numbers, not tokens: it has no {name}",
                "read its rows by eagleray.actors.data.BatchStream, or name a dataset of text",
            )
        return self.manifest[name]

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

    def _open_shard(self, entry: dict[str, Any]) -> Shard | RowShard:
        path = self.folder / str(entry["file"])
        shard: Shard | RowShard
        if self.features is None:
            shard = Shard(path)
            of_text = shard.header
            is_named = (of_text.num_tokens, of_text.first_token, of_text.vocab_size) == (
                entry["tokens"], entry["first_token"], self.vocab_size,
            )  # fmt: skip
        else:
            shard = RowShard(path)
            of_rows = shard.header
            is_named = (of_rows.num_rows, of_rows.first_row, of_rows.meaning_sha256) == (
                entry["rows"], entry["first_row"], self.features.digest,
            )  # fmt: skip
        if not is_named:
            raise IntegrityError(
                f"shard {path.name} is not the one that the manifest names ({path})", _RESTORE
            )
        return shard

    def _open_split(self, split: Split) -> TokenSplit:
        described = self.manifest["splits"][split]
        shards: dict[str, list[Any]] = {name: [] for name in self.domains}
        for entry in described["shards"]:
            shards[entry.get("domain", ONE_DOMAIN)].append(self._open_shard(entry))
        samples = described.get("domains", {ONE_DOMAIN: described})
        if self.features is None:
            shape = SampleShape(self.seq_len, self.seq_len + 1, np.dtype(np.int32))
        else:
            width = self.features.row_values
            shape = SampleShape(width, width, np.dtype(np.float32))
        return TokenSplit(
            shape,
            [int(samples[name]["samples"]) for name in self.domains],
            [TokenStream(shards[name]) if shards[name] else None for name in self.domains],
        )
