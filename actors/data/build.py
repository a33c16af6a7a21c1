"""Raw files to a published dataset, in streaming passes: hash, count, learn, encode, join.

Laws:
    * The same files and settings give the same digest, on any machine and in any folder, however
      often the build was killed and by however many processes it was done.
    * A dataset is visible whole or not at all. A killed build leaves a hidden folder with what it
      finished, which the next build of the same goes on from and a build of anything else removes.
    * Memory is bounded by one document and one batch of text or rows, not by the corpus.
    * The split of a document or a row depends on its content alone: adding data never moves what is
      held out into training, and no tokenizer or figure of a column has seen it.
"""

import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from eagleray.actors.data.build_folder import building, named_failure
from eagleray.actors.data.dataset import Dataset
from eagleray.actors.data.recipe import BuildProgress, OnProgress, Recipe, Task
from eagleray.actors.data.records import SourceFile
from eagleray.actors.data.row_recipe import RowRecipe
from eagleray.actors.data.sources import NUM_EXAMPLES, Part, Tally, described, find_files, parts_of
from eagleray.actors.data.text_recipe import TextRecipe
from eagleray.actors.data.units import LAYOUT, Encoder, Unit, UnitResult, changed, total
from eagleray.platform.config import DataConfig
from eagleray.platform.errors import NotFoundError
from eagleray.platform.storage import Storage, canonical_json, digest_bytes, digest_file

logger = logging.getLogger(__name__)

UNIT_BYTES = 16_000_000
"""Of raw text: what a kill costs, and what a process takes at a time."""
PARALLEL_BYTES = 256_000_000
"""Below, a cluster's start would take longer than it saves."""
_REPORT_BYTES = 1_000_000
_LAST = ("datasets", "last.json")

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
        data: Sources, tokenizer and sample length, or features, and split.
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
        self._data, self._storage, self._report = data, storage, on_progress
        self._files = find_files(data.sources, resolve)
        total_bytes = sum(file.path.stat().st_size for file in self._files)
        self._task = Task(data, resolve, self._files, total_bytes, on_progress)
        self._recipe: Recipe = (TextRecipe if data.features is None else RowRecipe)(self._task)

    def run(self, open_cluster: OpenCluster | None) -> Dataset:
        digests, parts = self._plan()
        key = self._key(digests)
        dataset = self._found(key)
        if dataset is None:
            # How the corpus is cut belongs to the name: unit 7 must be unit 7 of the build before.
            name = f"{key}-{UNIT_BYTES}-{LAYOUT}"
            with building(self._storage, name, self._waits) as folder:
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
                self._report(BuildProgress("hash", self._task.share(done), bytes=done))

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
        return digest_bytes(
            canonical_json(
                {
                    "format": self._recipe.format,
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
                    **self._recipe.identity(),
                }
            )
        )

    def _found(self, key: str) -> Dataset | None:
        try:
            digest = self._storage.read_json("datasets", "builds", f"{key}.json")["digest"]
            dataset = Dataset.open(self._storage, digest)
        except NotFoundError:
            return None
        self._report(BuildProgress("found", 1.0, bytes=self._task.total_bytes))
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
            encoder = self._recipe.encoder(folder, digests)
            units = [
                Unit(index, file_index, self._files[file_index], part)
                for index, (file_index, part) in enumerate(
                    (i, part) for i, of_file in enumerate(parts) for part in of_file
                )
            ]
            results = self._encode(encoder, units, open_cluster)
            tallies = self._tallies(units, results, digests)
            files = folder / "dataset"
            shutil.rmtree(files, ignore_errors=True)
            files.mkdir()
            of_kind = self._recipe.write(files, encoder, units, results)
            self._recipe.check(tallies, of_kind["splits"])
            manifest = canonical_json(self._manifest(tallies, of_kind))
            (files / "manifest.json").write_bytes(manifest)
        digest = digest_bytes(manifest)
        with self._storage.publish_folder("datasets", digest) as published:
            for path in files.iterdir():
                path.rename(published / path.name)
        self._storage.put_json({"digest": digest}, "datasets", "builds", f"{key}.json")
        dataset = Dataset.open(self._storage, digest)
        logger.info("dataset built digest=%s", digest)
        return dataset

    def _encode(
        self,
        encoder: Encoder,
        units: Sequence[Unit],
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
                BuildProgress("encode", self._task.share(num_bytes), documents, num_bytes, tokens)
            )

        def finished(unit: Unit, result: UnitResult) -> None:
            advance(
                result.tally.documents,
                unit.part.num_bytes,
                sum(part.items for part in result.splits.values()),
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
                results[unit.index] = encoder.encode(unit, advance)
        return [result for result in results.values() if result is not None]

    def _tallies(
        self, units: Sequence[Unit], results: Sequence[UnitResult], digests: Sequence[str]
    ) -> list[Tally]:
        """What was found in each file, which must still be the one that was hashed."""
        of_file: list[list[Tally]] = [[] for _ in self._files]
        for unit, result in zip(units, results, strict=True):
            of_file[unit.file_index].append(result.tally)
        tallies = []
        for file, digest, parts in zip(self._files, digests, of_file, strict=True):
            tally = total(parts, digest, NUM_EXAMPLES)
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

    def _manifest(self, tallies: Sequence[Tally], of_kind: dict[str, Any]) -> dict[str, Any]:
        return {
            "format": self._recipe.format,
            "eval_fraction": self._data.eval_fraction,
            "sources": [
                _describe(file, tally, is_text=self._data.features is None)
                for file, tally in zip(self._files, tallies, strict=True)
            ],
            "domains": list(self._data.domains),
            **of_kind,
        }


def _describe(file: SourceFile, tally: Tally, *, is_text: bool) -> dict[str, Any]:
    return {
        "name": file.name,
        "kind": file.kind,
        **({"text_field": file.text_field} if is_text else {}),
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
