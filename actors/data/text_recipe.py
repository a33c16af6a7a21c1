"""How text becomes a dataset: a tokenizer that is learnt or given, token ids, token shards."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from eagleray.actors.data.dataset import FORMAT, SPLITS
from eagleray.actors.data.recipe import BuildProgress, Phase, Task, check_documents
from eagleray.actors.data.records import MAX_RECORD_BYTES
from eagleray.actors.data.shards import BLOCK_TOKENS
from eagleray.actors.data.sources import DocumentReader, Tally
from eagleray.actors.data.split_writer import TokenSplitWriter, joined
from eagleray.actors.data.text_units import TOKENIZER, TextEncoder, kept_tokenizer, split_of_text
from eagleray.actors.data.tokenizer import TextTokenizer, load_tokenizer, paragraphs, train_bpe
from eagleray.actors.data.units import Encoder, Unit, UnitResult, changed
from eagleray.platform.config import BpeConfig
from eagleray.platform.errors import DataError

_REPORT_BYTES = 1_000_000
_WHAT = "document with text"
_FIX = "check text_field and `where`, or name other files"


class TextRecipe:
    """Documents to samples of `seq_len` tokens. The tokenizer never sees held-out text."""

    format = FORMAT

    def __init__(self, task: Task) -> None:
        self._task, self._data = task, task.data
        self._reader = DocumentReader(task.files, task.data.on_bad_record)

    def identity(self) -> dict[str, Any]:
        """What the dataset follows from, beside its sources and its format."""
        tokenizer: dict[str, Any] = self._data.tokenizer.model_dump()
        if not isinstance(self._data.tokenizer, BpeConfig):
            path = self._task.resolve(self._data.tokenizer.path)
            tokenizer = {"sha256": load_tokenizer(path).digest}
        return {
            "tokenizers": tokenizers.__version__,
            "limits": [BLOCK_TOKENS, MAX_RECORD_BYTES],
            "tokenizer": tokenizer,
            "data": self._data.model_dump(
                include={"seq_len", "eval_fraction", "shard_bytes", "on_bad_record"}
            ),
        }

    def encoder(self, folder: Path, digests: Sequence[str]) -> Encoder:
        """One that has the build's tokenizer, which is learnt once, whatever is killed."""
        kept = folder / TOKENIZER
        if not kept.exists():
            tokenizer = self._tokenizer(digests)
            staging = folder / f".tmp-{TOKENIZER}"
            with staging.open("wb") as file:
                file.write(tokenizer.json)
                file.flush()
                os.fsync(file.fileno())
            staging.rename(kept)
        return TextEncoder(folder, self._data.eval_fraction, self._data.on_bad_record)

    def write(
        self, folder: Path, encoder: Encoder, units: Sequence[Unit], results: Sequence[UnitResult]
    ) -> dict[str, Any]:
        """Cut what the units hold into shards, in the order of the units; the part of it."""
        tokenizer = kept_tokenizer(encoder.folder)
        (folder / TOKENIZER).write_bytes(tokenizer.json)
        shape = (tokenizer, self._data.shard_bytes, self._data.seq_len)
        described: dict[str, dict[str, dict[str, Any]]] = {split: {} for split in SPLITS}
        for domain in self._data.domains:
            for split in SPLITS:
                with TokenSplitWriter(folder, domain, split, *shape) as writer:
                    for unit, result in zip(units, results, strict=True):
                        if unit.file.domain != domain:
                            continue
                        part = result.splits[split]
                        writer.count(part.documents, part.lengths)
                        for ids in encoder.items(unit, split, part):
                            writer.append(ids)
                described[split][domain] = writer.describe()
        return {
            "seq_len": self._data.seq_len,
            "vocab_size": tokenizer.vocab_size,
            "block_tokens": BLOCK_TOKENS,
            "tokenizer": {
                "sha256": tokenizer.digest,
                "eod_id": tokenizer.eod_id,
                "eod_token": tokenizer.eod_token,
            },
            "splits": {split: joined(domains) for split, domains in described.items()},
        }

    def check(self, tallies: Sequence[Tally], splits: dict[str, Any]) -> None:
        """Refuse what has too few samples.

        Raises:
            DataError: A split, or a domain's training split, has none.
        """
        check_documents(self._task, tallies, _WHAT, _FIX)
        for domain, found in splits["train"]["domains"].items():
            if not found["samples"]:
                raise self._no_sample(tallies, "train", found["documents"], found["tokens"], domain)
        held_out = splits["eval"]
        if not held_out["samples"]:
            raise self._no_sample(tallies, "eval", held_out["documents"], held_out["tokens"])

    def _tokenizer(self, digests: Sequence[str]) -> TextTokenizer:
        config = self._data.tokenizer
        if not isinstance(config, BpeConfig):
            return load_tokenizer(self._task.resolve(config.path))
        num_bytes = sum(len(text.encode()) for text in self._training_texts("count"))
        check_documents(self._task, self._reader.tallies, _WHAT, _FIX)
        if not num_bytes:
            raise self._no_sample(self._reader.tallies, "train", 0, 0)
        share = config.train_bytes / num_bytes
        texts = self._training_texts("tokenizer")
        tokenizer = train_bpe(_sampled(texts, share), config.vocab_size)
        read = zip(self._task.files, digests, self._reader.tallies, strict=True)
        for file, digest, tally in read:
            if tally.sha256 != digest:
                raise changed(file)
        return tokenizer

    def _training_texts(self, phase: Phase) -> Iterator[str]:
        """The text that a tokenizer may see; reports reading as progress."""
        reported = -_REPORT_BYTES
        for count, document in enumerate(self._reader.documents(), start=1):
            if split_of_text(document.text, self._data.eval_fraction) == "train":
                yield document.text
            read = self._reader.bytes_read
            if read - reported >= _REPORT_BYTES:
                reported = read
                self._task.report(BuildProgress(phase, self._task.share(read), count, read))

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


def _sampled(texts: Iterator[str], share: float) -> Iterator[str]:
    """About a share of the text, spread over all of it, chosen by content."""
    threshold = int(min(1.0, share) * 2**64)
    for text in texts:
        for part in paragraphs(text):
            digest = hashlib.blake2b(part.encode(), digest_size=8).digest()
            if int.from_bytes(digest) < threshold:
                yield part
