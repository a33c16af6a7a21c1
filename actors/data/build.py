"""Raw files to a published dataset, in four streaming passes: hash, count, learn, encode.

Laws:
    * The same files and settings give the same digest, on any machine and in any folder.
    * A dataset is visible whole or not at all; a killed build leaves nothing but a hidden folder,
      which the next build removes.
    * Memory is bounded by one document and one batch of text, not by the corpus.
    * A document's split depends on its text alone: adding data never moves a held-out document into
      training, and the tokenizer never sees held-out text.
"""

import fcntl
import hashlib
import logging
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tokenizers

from eagleray.actors.data.dataset import FORMAT, SPLITS, Dataset, Split
from eagleray.actors.data.records import MAX_RECORD_BYTES, SourceFile
from eagleray.actors.data.shards import BLOCK_TOKENS
from eagleray.actors.data.sources import DocumentReader, Tally, described, find_files
from eagleray.actors.data.split_writer import SplitWriter, joined
from eagleray.actors.data.tokenizer import TextTokenizer, load_tokenizer, paragraphs, train_bpe
from eagleray.platform.config import BpeConfig, DataConfig
from eagleray.platform.errors import DataError, NotFoundError, StorageError
from eagleray.platform.storage import Storage, canonical_json, digest_bytes, digest_file

logger = logging.getLogger(__name__)

_BATCH_CHARS = 1_000_000
_LAST = ("datasets", "last.json")

Phase = Literal["hash", "count", "tokenizer", "encode", "found", "done"]


@dataclass(frozen=True)
class BuildProgress:
    """How far a phase is: `fraction` of its bytes, with what has been read and written in it."""

    phase: Phase
    fraction: float
    documents: int = 0
    bytes: int = 0
    tokens: int = 0


OnProgress = Callable[[BuildProgress], None]


def build_dataset(
    data: DataConfig,
    resolve: Callable[[str], Path],
    storage: Storage,
    on_progress: OnProgress | None = None,
) -> Dataset:
    """Build the dataset that `data` describes, or find it if it was built before.

    Args:
        data: Sources, tokenizer, sample length and split.
        resolve: Turns a path of the configuration into an absolute one.
        storage: Gets `datasets/<digest>/`.
        on_progress: Called a few times a second, from this thread.

    Raises:
        DataError: The sources cannot be used, or give no sample for a split.
        StorageError: Storage cannot be written.
    """
    return _Build(data, resolve, storage, on_progress or (lambda progress: None)).run()


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

    def run(self) -> Dataset:
        digests = self._hash()
        key = self._key(digests)
        dataset = self._found(key)
        if dataset is None:
            with _builders_lock(self._storage), _staging(self._storage) as folder:
                digest = self._fill(folder, digests)
                with self._storage.publish_folder("datasets", digest) as published:
                    for path in folder.iterdir():
                        path.rename(published / path.name)
                self._storage.put_json({"digest": digest}, "datasets", "builds", f"{key}.json")
            dataset = Dataset.open(self._storage, digest)
            logger.info("dataset built digest=%s", digest)
        self._storage.put_json({"digest": dataset.digest}, *_LAST)
        return dataset

    def _hash(self) -> list[str]:
        digests: dict[Path, str] = {}
        done = 0
        for file in self._files:
            self._report(BuildProgress("hash", done / max(1, self._total_bytes), bytes=done))
            try:
                # Several domains may read one file.
                if file.path not in digests:
                    digests[file.path] = digest_file(file.path)
                done += file.path.stat().st_size
            except OSError as error:
                raise DataError(
                    f"{file.path} cannot be read: {error.strerror or error}",
                    "check the file and its permissions",
                ) from error
        return [digests[file.path] for file in self._files]

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

    def _fill(self, folder: Path, digests: Sequence[str]) -> str:
        tokenizer = self._tokenizer()
        with _named_failure(folder):
            (folder / "tokenizer.json").write_bytes(tokenizer.json)
            splits = self._encode(folder, tokenizer)
            self._check(digests, splits)
            manifest = canonical_json(self._manifest(tokenizer, splits))
            (folder / "manifest.json").write_bytes(manifest)
        return digest_bytes(manifest)

    def _tokenizer(self) -> TextTokenizer:
        config = self._data.tokenizer
        if not isinstance(config, BpeConfig):
            return load_tokenizer(self._resolve(config.path))
        total = sum(len(text.encode()) for text in self._training_texts("count"))
        self._check_documents()
        if not total:
            raise self._no_sample("train", 0, 0)
        share = config.train_bytes / max(1, total)
        texts = self._training_texts("tokenizer")
        return train_bpe(_sampled(texts, share), config.vocab_size)

    def _training_texts(self, phase: Phase) -> Iterator[str]:
        for document in self._documents(phase):
            if document.split == "train":
                yield document.text

    def _documents(self, phase: Phase) -> Iterator["_Placed"]:
        """Each document with its place; reports reading as progress."""
        threshold = int(self._data.eval_fraction * 2**64)
        reported = -_BATCH_CHARS
        for count, document in enumerate(self._reader.documents(), start=1):
            digest = hashlib.sha256(document.text.encode()).digest()
            is_held_out = int.from_bytes(digest[:8]) < threshold
            domain = self._files[document.file].domain
            yield _Placed(document.text, domain, "eval" if is_held_out else "train")
            if phase != "encode" and self._reader.bytes_read - reported >= _BATCH_CHARS:
                reported = self._reader.bytes_read
                self._report(BuildProgress(phase, self._fraction(), count, reported))

    def _encode(self, folder: Path, tokenizer: TextTokenizer) -> dict[str, Any]:
        shape = (tokenizer, self._data.shard_bytes, self._data.seq_len)
        domains = self._data.domains
        with ExitStack() as stack:
            writers = {
                (domain, split): stack.enter_context(SplitWriter(folder, domain, split, *shape))
                for domain in domains
                for split in SPLITS
            }
            for batch in _batches(self._documents("encode")):
                encoded = tokenizer.encode_batch([document.text for document in batch])
                for ids, document in zip(encoded, batch, strict=True):
                    writers[document.domain, document.split].append(ids)
                self._report(
                    BuildProgress(
                        "encode",
                        self._fraction(),
                        sum(writer.num_documents for writer in writers.values()),
                        self._reader.bytes_read,
                        sum(writer.num_tokens for writer in writers.values()),
                    )
                )
        return {
            split: joined({domain: writers[domain, split].describe() for domain in domains})
            for split in SPLITS
        }

    def _fraction(self) -> float:
        return min(1.0, self._reader.bytes_read / max(1, self._total_bytes))

    def _check(self, digests: Sequence[str], splits: dict[str, Any]) -> None:
        for file, before, tally in zip(self._files, digests, self._reader.tallies, strict=True):
            if tally.sha256 != before:
                raise DataError(
                    f"{file.path} was changed while the dataset was built",
                    "build again when it is still",
                )
        self._check_documents()
        for domain, found in splits["train"]["domains"].items():
            if not found["samples"]:
                raise self._no_sample("train", found["documents"], found["tokens"], domain)
        held_out = splits["eval"]
        if not held_out["samples"]:
            raise self._no_sample("eval", held_out["documents"], held_out["tokens"])

    def _no_sample(
        self, split: str, num_documents: int, num_tokens: int, domain: str = ""
    ) -> DataError:
        total = sum(tally.documents for tally in self._reader.tallies)
        of_domain = f" of domain {domain}" if len(self._data.domains) > 1 and domain else ""
        return DataError(
            f"the {split} split{of_domain} has no sample: {num_documents} of {total} documents "
            f"with {num_tokens} tokens, and one sample needs seq_len + 1 = "
            f"{self._data.seq_len + 1} (data.eval_fraction={self._data.eval_fraction:g})",
            f"add text{of_domain}, lower data.seq_len, or "
            f"{'raise' if split == 'eval' else 'lower'} data.eval_fraction",
        )

    def _check_documents(self) -> None:
        tallies = self._reader.tallies
        if not any(tally.documents for tally in tallies):
            paths = ", ".join(source.path for source in self._data.sources)
            raise DataError(
                f"data.sources: no document with text in {len(self._files)} files of {paths}: "
                f"{sum(t.empty for t in tallies)} empty, "
                f"{sum(t.filtered for t in tallies)} filtered out, "
                f"{sum(t.skipped for t in tallies)} skipped as bad",
                "check text_field and `where`, or name other files",
            )

    def _manifest(self, tokenizer: TextTokenizer, splits: dict[str, Any]) -> dict[str, Any]:
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
                _describe(file, tally)
                for file, tally in zip(self._files, self._reader.tallies, strict=True)
            ],
            "domains": list(self._data.domains),
            "splits": splits,
        }


@dataclass(frozen=True)
class _Placed:
    """A document and where it belongs."""

    text: str
    domain: str
    split: Split


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


def _batches(documents: Iterator[_Placed]) -> Iterator[list[_Placed]]:
    batch: list[_Placed] = []
    num_chars = 0
    for document in documents:
        batch.append(document)
        num_chars += len(document.text)
        if num_chars >= _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


@contextmanager
def _builders_lock(storage: Storage) -> Iterator[None]:
    """Held, shared, by each running build; one that is alone removes what killed ones left."""
    root = storage.path("datasets")
    with _named_failure(root):
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / ".building.lock").open("w")
    with lock:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Folders only: a temporary file may be another process writing a pointer right now.
            for path in root.glob(".tmp-*/"):
                shutil.rmtree(path, ignore_errors=True)
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield


@contextmanager
def _staging(storage: Storage) -> Iterator[Path]:
    folder = storage.path("datasets", f".tmp-build-{uuid.uuid4().hex}")
    with _named_failure(folder):
        folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _named_failure(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"storage cannot write {folder}: {error.strerror or error}",
            "check that it is writable and has room",
        ) from error
