"""Content-addressed records: one chain of digests from raw data to the served answer.

A record is immutable: its name is the SHA-256 of its canonical JSON, and it names the records it
was made from by theirs. Kinds: dataset, config, code, run, checkpoint, model, sweep, imported.
Format and version: docs/formats.md#record.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from eagleray.platform.errors import IntegrityError, NotFoundError, UsageError
from eagleray.platform.storage import Storage, canonical_json, digest_bytes

FORMAT = 1
_DIGEST_LENGTH = 64
_MAX_DEPTH = 64


@dataclass(frozen=True)
class Record:
    """One immutable fact and the digests of the records it was made from."""

    digest: str
    kind: str
    body: dict[str, Any]
    inputs: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LineageNode:
    """A record with the lineage of each of its inputs; `role` is what it was to its parent."""

    role: str
    record: Record
    inputs: tuple["LineageNode", ...]

    def walk(self, depth: int = 0) -> Iterator[tuple[int, "LineageNode"]]:
        """Every node with its depth, parents first."""
        yield depth, self
        for node in self.inputs:
            yield from node.walk(depth + 1)

    def find(self, kind: str) -> Record | None:
        """The first record of a kind on the way down."""
        return next((node.record for _, node in self.walk() if node.record.kind == kind), None)


class Ledger:
    """Records under `<storage>/records/`; any number of processes may write at once."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def put(self, kind: str, body: dict[str, Any], inputs: dict[str, str] | None = None) -> str:
        """Keep a record; the same content gives the same digest, however often it is put.

        Returns:
            Its digest.
        """
        content = {"format": FORMAT, "kind": kind, "body": body, "inputs": inputs or {}}
        data = canonical_json(content)
        digest = digest_bytes(data)
        self._storage.put_if_absent(data, *_place(digest))
        return digest

    def get(self, digest: str) -> Record:
        """The record of a digest, checked against it.

        Raises:
            NotFoundError: There is none.
            IntegrityError: Its bytes do not have this digest, or its format is unknown.
        """
        try:
            data = self._storage.read(*_place(digest))
        except NotFoundError:
            raise NotFoundError(
                f"the ledger has no record {digest}",
                "list what there is with `eagleray models list`",
            ) from None
        if digest_bytes(data) != digest:
            raise IntegrityError(
                f"record {digest} was changed after it was written", "restore it from a copy"
            )
        content = json.loads(data)
        if content.get("format") != FORMAT:
            raise IntegrityError(
                f"record {digest} has format {content.get('format')}, this eagleray reads {FORMAT}",
                "use the eagleray version that wrote it, or a newer one",
            )
        return Record(digest, content["kind"], content["body"], content["inputs"])

    def complete(self, prefix: str) -> str:
        """The one digest that starts with a prefix of at least six characters.

        Raises:
            UsageError: The prefix is too short or fits several.
            NotFoundError: It fits none.
        """
        if len(prefix) < 6:
            raise UsageError(
                f"digest prefix {prefix!r} is shorter than 6 characters", "give more of it"
            )
        names = self._storage.names("records", prefix[:2])
        matches = [name.removesuffix(".json") for name in names if name.startswith(prefix)]
        if not matches:
            raise NotFoundError(f"the ledger has no record {prefix}…", "check the digest")
        if len(matches) > 1:
            raise UsageError(
                f"digest prefix {prefix!r} fits {len(matches)} records", "give more of it"
            )
        return matches[0]

    def lineage(self, digest: str, role: str = "") -> LineageNode:
        """The whole tree that a record stands on.

        Raises:
            NotFoundError: A record on the way is missing.
        """
        return self._lineage(digest, role, 0)

    def _lineage(self, digest: str, role: str, depth: int) -> LineageNode:
        if depth > _MAX_DEPTH:
            raise IntegrityError(f"lineage of {digest} is deeper than {_MAX_DEPTH} records")
        record = self.get(digest)
        nodes = (
            self._lineage(child, name, depth + 1) for name, child in sorted(record.inputs.items())
        )
        return LineageNode(role, record, tuple(nodes))


def _place(digest: str) -> tuple[str, ...]:
    if len(digest) != _DIGEST_LENGTH or not all(c in "0123456789abcdef" for c in digest):
        raise UsageError(f"{digest!r} is not a SHA-256 digest in hexadecimal", "copy it whole")
    return ("records", digest[:2], f"{digest}.json")
