"""A lineage as the tree that a page shows: each record once, down to the raw files."""

from dataclasses import dataclass, field
from typing import Any

from eagleray.platform.ledger import LineageNode, Record
from eagleray.platform.report.wording import counted, number, size

_MAX_NODES = 400
_MAX_FILES = 200


@dataclass(frozen=True)
class FileNote:
    """Something with a digest of its own that a record names."""

    name: str
    digest: str
    about: str = ""


@dataclass(frozen=True)
class Branch:
    """A record and what it was made from."""

    role: str
    kind: str
    digest: str
    about: str
    is_repeat: bool = False
    """The record stands further up already, with its inputs."""
    files: tuple[FileNote, ...] = ()
    files_left_out: int = 0
    inputs: tuple["Branch", ...] = ()
    inputs_left_out: int = 0
    is_folded: bool = False
    """One of many of its kind, so its inputs are shown on demand."""


@dataclass
class _Seen:
    digests: set[str] = field(default_factory=set)
    count: int = 0


def draw_tree(node: LineageNode) -> Branch:
    """The tree below a record."""
    return _branch(node, _Seen())


def _branch(node: LineageNode, seen: _Seen) -> Branch:
    record = node.record
    role, about = node.role or record.kind, _about(record)
    if record.digest in seen.digests:
        return Branch(role, record.kind, record.digest, about, is_repeat=True)
    seen.digests.add(record.digest)
    inputs: list[Branch] = []
    for child in node.inputs:
        if seen.count >= _MAX_NODES:
            break
        seen.count += 1
        inputs.append(_branch(child, seen))
    files = _files(record)
    return Branch(
        role, record.kind, record.digest, about, False, tuple(files[:_MAX_FILES]),
        max(0, len(files) - _MAX_FILES), tuple(inputs), len(node.inputs) - len(inputs),
        role.startswith("trial-"),
    )  # fmt: skip


def _about(record: Record) -> str:
    body = record.body
    if record.kind == "model":
        return f"{number(body.get('num_parameters'))} parameters" if _has_size(body) else ""
    if record.kind == "checkpoint":
        return f"after step {number(body.get('step'))}"
    if record.kind == "dataset":
        manifest = body.get("manifest", {})
        samples = manifest.get("splits", {}).get("train", {}).get("samples")
        files = counted(len(manifest.get("sources", [])), "raw file")
        return f"{files}, {number(samples)} training samples" if samples else files
    if record.kind == "code":
        libraries = sorted(set(body) - {"version", "source"})
        versions = [f"{name} {body[name]}" for name in libraries]
        return ", ".join([f"eagleray {body.get('version', '?')}", *versions])
    keys = ("run_id", "sweep_id", "source", "file", "folder")
    return ", ".join(f"{body[key]}" for key in keys if key in body)


def _has_size(body: dict[str, Any]) -> bool:
    return isinstance(body.get("num_parameters"), int)


def _files(record: Record) -> list[FileNote]:
    body = record.body
    if record.kind == "dataset":
        return _dataset_files(body)
    named = {
        "model": ("artifact", "served files"), "checkpoint": ("manifest", "manifest"),
        "code": ("source", "source files"), "config": ("digest", "resolved configuration"),
    }  # fmt: skip
    if record.kind == "imported":
        files = body.get("files") or {body.get("file", "file"): body.get("sha256", "")}
        return [FileNote(str(name), str(digest)) for name, digest in sorted(files.items())]
    if record.kind in named and named[record.kind][0] in body:
        key, name = named[record.kind]
        return [FileNote(name, str(body[key]))]
    return []


def _dataset_files(body: dict[str, Any]) -> list[FileNote]:
    manifest = body.get("manifest", {})
    notes = []
    for source in manifest.get("sources", []):
        parts = [counted(source["documents"], "document")] if "documents" in source else []
        parts += [size(source["bytes"])] if "bytes" in source else []
        notes.append(
            FileNote(f"raw file {source.get('name', '')}", str(source.get("sha256", "")),
                     ", ".join(parts))
        )  # fmt: skip
    if "sha256" in manifest.get("tokenizer", {}):
        notes.append(FileNote("tokenizer", str(manifest["tokenizer"]["sha256"])))
    for split, content in sorted(manifest.get("splits", {}).items()):
        for shard in content.get("shards", []):
            about = f"{split}, {number(shard.get('tokens'))} tokens"
            notes.append(FileNote(f"shard {shard['file']}", str(shard.get("sha256", "")), about))
    if "digest" in body:
        notes.append(FileNote("data set", str(body["digest"])))
    return notes
