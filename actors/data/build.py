"""Raw files to a published dataset, in streaming passes: hash, count, learn, encode, join.

Laws:
    * The same files and settings give the same digest, on any machine and in any folder, however
      often the build was killed and by however many processes it was done.
    * A dataset is visible whole or not at all. A killed build leaves a hidden folder with what it
      finished, which the next build of the same goes on from and a build of anything else removes.
    * Memory is bounded by one document and one batch of text, not by the corpus.
    * A document's split depends on its text alone: adding data never moves a held-out document into
      training, and the tokenizer never sees held-out text.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tokenizers

from eagleray.actors.data.build_folder import building, named_failure
from eagleray.actors.data.dataset import FORMAT, SPLITS, Dataset
from eagleray.actors.data.records import MAX_RECORD_BYTES, SourceFile
from eagleray.actors.data.shards import BLOCK_TOKENS
from eagleray.actors.data.sources import (
    NUM_EXAMPLES,
    DocumentReader,
    Part,
    Tally,
    described,
    find_files,
    parts_of,
)
from eagleray.actors.data.split_writer import SplitWriter, joined
from eagleray.actors.data.tokenizer import TextTokenizer, load_tokenizer, paragraphs, train_bpe
from eagleray.actors.data.units import (
    TOKENIZER,
    Encoder,
    Unit,
    UnitResult,
    changed,
    split_of,
    total,
)
from eagleray.platform.config import BpeConfig, DataConfig
from eagleray.platform.errors import DataError, NotFoundError
from eagleray.platform.storage import Storage, canonical_json, digest_bytes, digest_file

logger = logging.getLogger(__name__)

UNIT_BYTES = 16_000_000
"""Of raw text: what a kill costs, and what a process takes at a time."""
PARALLEL_BYTES = 256_000_000
"""Below, a cluster's start would take longer than it saves."""
_REPORT_BYTES = 1_000_000
_LAST = ("datasets", "last.json")

Phase = Literal["hash", "wait", "count", "tokenizer", "cluster", "encode", "found"]


@dataclass(frozen=True)
class BuildProgress:
    """How far a phase is: `fraction` of its bytes, with what has been read and written in it."""

    phase: Phase
    fraction: float
    documents: int = 0
    bytes: int = 0
    tokens: int = 0


OnProgress = Callable[[BuildProgress], None]
OpenCluster = Callable[[], AbstractContextManager[object]]


def build_dataset(
    data: DataConfig,
    resolve: Callable[[str], Path],
    storage: Storage,
    on_progress: OnProgress | None = None,
    open_cluster: OpenCluster | None = None,
) -> Dataset:
    """Build the dataset that `data` describes, or find it if it was built before.

    Args:
        data: Sources, tokenizer, sample length and split.
        resolve: Turns a path of the configuration into an absolute one.
        storage: Gets `datasets/<digest>/`.
        on_progress: Called a few times a second, from this thread.
        open_cluster: Connects to Ray, for a corpus that is large enough to be encoded by many
            processes; its nodes must see the files and the storage. None: this process alone.

    Raises:
        DataError: The sources cannot be used, or give no sample for a split.
        StorageError: Storage cannot be written.
    """
    return _Build(data, resolve, storage, on_progress or (lambda progress: None)).run(open_cluster)


def last_digest(storage: Storage) -> str:
    """The digest of the dataset that was built or found last.

    Raises:
        NotFoundError: None was built here.
    """
    try:
        return str(storage.read_json(*_LAST)["digest"])
    except NotFoundError:
        raise NotFoundError(
            f"no dataset has been built in {storage.root}", "build one: eagleray data build"
        ) from None


class _Build:
    def __init__(
        self,
        data: DataConfig,
        resolve: Callable[[str], Path],
        storage: Storage,
        on_progress: OnProgress,
    ) -> None:
        self._data, self._resolve, self._storage = data, resolve, storage
        self._report = on_progress
        self._files = find_files(data.sources, resolve)
        self._reader = DocumentReader(self._files, data.on_bad_record)
        self._total_bytes = sum(file.path.stat().st_size for file in self._files)

    def run(self, open_cluster: OpenCluster | None) -> Dataset:
        digests, parts = self._plan()
        key = self._key(digests)
        dataset = self._found(key)
        if dataset is None:
            # How the corpus is cut belongs to the name: unit 7 must be unit 7 of the build before.
            with building(self._storage, f"{key}-{UNIT_BYTES}", self._waits) as folder:
                # Perhaps another process has built it meanwhile.
                dataset = self._found(key) or self._fill(folder, key, digests, parts, open_cluster)
        self._storage.put_json({"digest": dataset.digest}, *_LAST)
        return dataset

    def _plan(self) -> tuple[list[str], list[list[Part]]]:
        """SHA-256 and parts of each file."""
        done, told = 0, -_REPORT_BYTES

        def advance(num_bytes: int) -> None:
            nonlocal done, told
            done += num_bytes
            if done - told >= _REPORT_BYTES:
                told = done
                self._report(BuildProgress("hash", self._share(done), bytes=done))

        advance(0)
        # Several domains may read one file.
        plans = {
            (file.path, file.kind): parts_of(file, UNIT_BYTES, advance)
            for file in {(file.path, file.kind): file for file in self._files}.values()
        }
        found = [plans[file.path, file.kind] for file in self._files]
        return [digest for digest, _ in found], [parts for _, parts in found]

    def _key(self, digests: Sequence[str]) -> str:
        """Names everything that the bytes of the dataset follow from."""
        tokenizer: dict[str, Any] = self._data.tokenizer.model_dump()
        if not isinstance(self._data.tokenizer, BpeConfig):
            path = self._resolve(self._data.tokenizer.path)
            tokenizer = {"sha256": load_tokenizer(path).digest}
        return digest_bytes(
            canonical_json(
                {
                    "format": FORMAT,
                    "tokenizers": tokenizers.__version__,
                    "limits": [BLOCK_TOKENS, MAX_RECORD_BYTES],
                    "sources": [
                        [
                            file.name,
                            digest,
                            file.kind,
                            file.text_field,
                            described(file.where),
                            file.domain,
                        ]
                        for file, digest in zip(self._files, digests, strict=True)
                    ],
                    "tokenizer": tokenizer,
                    "data": self._data.model_dump(
                        include={"seq_len", "eval_fraction", "shard_bytes", "on_bad_record"}
                    ),
                }
            )
        )

    def _found(self, key: str) -> Dataset | None:
        try:
            digest = self._storage.read_json("datasets", "builds", f"{key}.json")["digest"]
            dataset = Dataset.open(self._storage, digest)
        except NotFoundError:
            return None
        self._report(BuildProgress("found", 1.0, bytes=self._total_bytes))
        return dataset

    def _fill(
        self,
        folder: Path,
        key: str,
        digests: Sequence[str],
        parts: Sequence[Sequence[Part]],
        open_cluster: OpenCluster | None,
    ) -> Dataset:
        with named_failure(folder):
            tokenizer = self._kept_tokenizer(folder, digests)
            units = [
                Unit(index, file_index, self._files[file_index], part)
                for index, (file_index, part) in enumerate(
                    (i, part) for i, of_file in enumerate(parts) for part in of_file
                )
            ]
            encoder = Encoder(folder, self._data.eval_fraction, self._data.on_bad_record)
            results = self._encode(encoder, units, tokenizer, open_cluster)
            tallies = self._tallies(units, results, digests)
            files = folder / "dataset"
            shutil.rmtree(files, ignore_errors=True)
            files.mkdir()
            (files / TOKENIZER).write_bytes(tokenizer.json)
            splits = self._join(files, encoder, units, results, tokenizer)
            self._check(tallies, splits)
            manifest = canonical_json(self._manifest(tokenizer, tallies, splits))
            (files / "manifest.json").write_bytes(manifest)
        digest = digest_bytes(manifest)
        with self._storage.publish_folder("datasets", digest) as published:
            for path in files.iterdir():
                path.rename(published / path.name)
        self._storage.put_json({"digest": digest}, "datasets", "builds", f"{key}.json")
        dataset = Dataset.open(self._storage, digest)
        logger.info("dataset built digest=%s", digest)
        return dataset

    def _kept_tokenizer(self, folder: Path, digests: Sequence[str]) -> TextTokenizer:
        """The build's tokenizer; learnt once, whatever is killed."""
        kept = folder / TOKENIZER
        if kept.exists():
            return TextTokenizer(kept.read_bytes())
        tokenizer = self._tokenizer(digests)
        staging = folder / f".tmp-{TOKENIZER}"
        with staging.open("wb") as file:
            file.write(tokenizer.json)
            file.flush()
            os.fsync(file.fileno())
        staging.rename(kept)
        return tokenizer

    def _tokenizer(self, digests: Sequence[str]) -> TextTokenizer:
        config = self._data.tokenizer
        if not isinstance(config, BpeConfig):
            return load_tokenizer(self._resolve(config.path))
        num_bytes = sum(len(text.encode()) for text in self._training_texts("count"))
        self._check_documents(self._reader.tallies)
        if not num_bytes:
            raise self._no_sample(self._reader.tallies, "train", 0, 0)
        share = config.train_bytes / num_bytes
        texts = self._training_texts("tokenizer")
        tokenizer = train_bpe(_sampled(texts, share), config.vocab_size)
        for file, digest, tally in zip(self._files, digests, self._reader.tallies, strict=True):
            if tally.sha256 != digest:
                raise changed(file)
        return tokenizer

    def _training_texts(self, phase: Phase) -> Iterator[str]:
        """The text that a tokenizer may see; reports reading as progress."""
        reported = -_REPORT_BYTES
        for count, document in enumerate(self._reader.documents(), start=1):
            if split_of(document.text, self._data.eval_fraction) == "train":
                yield document.text
            read = self._reader.bytes_read
            if read - reported >= _REPORT_BYTES:
                reported = read
                self._report(BuildProgress(phase, self._share(read), count, read))

    def _encode(
        self,
        encoder: Encoder,
        units: Sequence[Unit],
        tokenizer: TextTokenizer,
        open_cluster: OpenCluster | None,
    ) -> list[UnitResult]:
        """Encode the units that no earlier process has finished."""
        results = {unit.index: encoder.found(unit) for unit in units}
        documents = num_bytes = tokens = 0

        def advance(more_documents: int, more_bytes: int, more_tokens: int) -> None:
            nonlocal documents, num_bytes, tokens
            documents, num_bytes = documents + more_documents, num_bytes + more_bytes
            tokens += more_tokens
            self._report(
                BuildProgress("encode", self._share(num_bytes), documents, num_bytes, tokens)
            )

        def finished(unit: Unit, result: UnitResult) -> None:
            advance(
                result.tally.documents,
                unit.part.num_bytes,
                sum(part.tokens for part in result.splits.values()),
            )

        missing = []
        for unit in units:
            kept = results[unit.index]
            if kept is None:
                missing.append(unit)
            else:
                finished(unit, kept)
        if len(missing) < len(units):
            logger.info(
                "build goes on from an earlier one units=%d of=%d",
                len(units) - len(missing),
                len(units),
            )
        is_large = sum(unit.part.num_bytes for unit in missing) >= PARALLEL_BYTES
        if open_cluster is not None and is_large and len(missing) > 1:
            self._report(BuildProgress("cluster", 0.0))
            with open_cluster():
                # Ray Data takes a second to import: not for a small corpus.
                from eagleray.actors.data.parallel import encode_all  # noqa: PLC0415

                for index in encode_all(encoder, missing):
                    result = results[index] = encoder.found(units[index])
                    assert result is not None, f"unit {index} was said to be finished"
                    finished(units[index], result)
        else:
            for unit in missing:
                results[unit.index] = encoder.encode(unit, tokenizer, advance)
        return [result for result in results.values() if result is not None]

    def _join(
        self,
        folder: Path,
        encoder: Encoder,
        units: Sequence[Unit],
        results: Sequence[UnitResult],
        tokenizer: TextTokenizer,
    ) -> dict[str, Any]:
        """Cut what the units hold into shards, in the order of the units."""
        shape = (tokenizer, self._data.shard_bytes, self._data.seq_len)
        described_splits: dict[str, dict[str, dict[str, Any]]] = {split: {} for split in SPLITS}
        for domain in self._data.domains:
            for split in SPLITS:
                with SplitWriter(folder, domain, split, *shape) as writer:
                    for unit, result in zip(units, results, strict=True):
                        if unit.file.domain != domain:
                            continue
                        part = result.splits[split]
                        writer.count(part.documents, part.lengths)
                        for ids in encoder.ids(unit, split, part, tokenizer.dtype):
                            writer.append(ids)
                described_splits[split][domain] = writer.describe()
        return {split: joined(domains) for split, domains in described_splits.items()}

    def _tallies(
        self, units: Sequence[Unit], results: Sequence[UnitResult], digests: Sequence[str]
    ) -> list[Tally]:
        """What was found in each file, which must still be the one that was hashed."""
        tallies = []
        for index, (file, digest) in enumerate(zip(self._files, digests, strict=True)):
            of_file = [
                result.tally
                for unit, result in zip(units, results, strict=True)
                if unit.file_index == index
            ]
            tally = total(of_file, digest, NUM_EXAMPLES)
            try:
                size = file.path.stat().st_size
                # A Parquet file's parts have no digests, and their sizes are those of columns.
                is_parquet = file.kind == "parquet"
                is_same = digest_file(file.path) == digest if is_parquet else tally.bytes == size
            except OSError as error:
                raise changed(file) from error
            if not is_same:
                raise changed(file)
            tally.bytes = size
            tallies.append(tally)
        return tallies

    def _waits(self) -> None:
        self._report(BuildProgress("wait", 0.0))

    def _share(self, num_bytes: int) -> float:
        return min(1.0, num_bytes / max(1, self._total_bytes))

    def _check(self, tallies: Sequence[Tally], splits: dict[str, Any]) -> None:
        self._check_documents(tallies)
        for domain, found in splits["train"]["domains"].items():
            if not found["samples"]:
                raise self._no_sample(tallies, "train", found["documents"], found["tokens"], domain)
        held_out = splits["eval"]
        if not held_out["samples"]:
            raise self._no_sample(tallies, "eval", held_out["documents"], held_out["tokens"])

    def _no_sample(
        self,
        tallies: Sequence[Tally],
        split: str,
        num_documents: int,
        num_tokens: int,
        domain: str = "",
    ) -> DataError:
        of_all = sum(tally.documents for tally in tallies)
        of_domain = f" of domain {domain}" if len(self._data.domains) > 1 and domain else ""
        return DataError(
            f"the {split} split{of_domain} has no sample: {num_documents} of {of_all} documents "
            f"with {num_tokens} tokens, and one sample needs seq_len + 1 = "
            f"{self._data.seq_len + 1} (data.eval_fraction={self._data.eval_fraction:g})",
            f"add text{of_domain}, lower data.seq_len, or "
            f"{'raise' if split == 'eval' else 'lower'} data.eval_fraction",
        )

    def _check_documents(self, tallies: Sequence[Tally]) -> None:
        if not any(tally.documents for tally in tallies):
            paths = ", ".join(source.path for source in self._data.sources)
            raise DataError(
                f"data.sources: no document with text in {len(self._files)} files of {paths}: "
                f"{sum(t.empty for t in tallies)} empty, "
                f"{sum(t.filtered for t in tallies)} filtered out, "
                f"{sum(t.skipped for t in tallies)} skipped as bad",
                "check text_field and `where`, or name other files",
            )

    def _manifest(
        self, tokenizer: TextTokenizer, tallies: Sequence[Tally], splits: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "seq_len": self._data.seq_len,
            "vocab_size": tokenizer.vocab_size,
            "block_tokens": BLOCK_TOKENS,
            "eval_fraction": self._data.eval_fraction,
            "tokenizer": {
                "sha256": tokenizer.digest,
                "eod_id": tokenizer.eod_id,
                "eod_token": tokenizer.eod_token,
            },
            "sources": [
                _describe(file, tally) for file, tally in zip(self._files, tallies, strict=True)
            ],
            "domains": list(self._data.domains),
            "splits": splits,
        }


def _describe(file: SourceFile, tally: Tally) -> dict[str, Any]:
    return {
        "name": file.name,
        "kind": file.kind,
        "text_field": file.text_field,
        "where": described(file.where),
        "domain": file.domain,
        "sha256": tally.sha256,
        "bytes": tally.bytes,
        "documents": tally.documents,
        "empty": tally.empty,
        "filtered": tally.filtered,
        "skipped": tally.skipped,
        "skipped_examples": tally.examples,
    }


def _sampled(texts: Iterator[str], share: float) -> Iterator[str]:
    """About a share of the text, spread over all of it, chosen by content."""
    threshold = int(min(1.0, share) * 2**64)
    for text in texts:
        for part in paragraphs(text):
            digest = hashlib.blake2b(part.encode(), digest_size=8).digest()
            if int.from_bytes(digest) < threshold:
                yield part
