"""Verbs of the registry: models list, show, lineage, promote, rollback, export, import."""

import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from eagleray.cli.console import (
    ConfigOption,
    JsonOption,
    console,
    emit,
    print_lines,
    table,
)
from eagleray.platform.artifact import publish_artifact, verify_artifact
from eagleray.platform.config import CONFIG_NAME
from eagleray.platform.errors import NotFoundError, UsageError
from eagleray.platform.ledger import LineageNode
from eagleray.platform.registry import DEFAULT_ALIAS, ModelVersion
from eagleray.platform.storage import digest_file
from eagleray.project import Project

SpecArgument = Annotated[str, typer.Argument(help="name, name@version or name@alias.")]
_SHORT = 12


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    group = typer.Typer(no_args_is_help=True, help="Registered models.")
    group.command("list")(list_models)
    for verb in (show, lineage, promote, rollback, export):
        group.command()(verb)
    group.command("import")(import_model)
    app.add_typer(group, name="models")


def list_models(config: ConfigOption = Path(CONFIG_NAME), as_json: JsonOption = False) -> None:
    """List every model with its versions and aliases.

    Example: eagleray models list
    """
    registry = Project.load(config).registry
    found = [
        {**asdict(version), "aliases": _aliases_of(registry.aliases(name), version)}
        for name in registry.names()
        for version in registry.versions(name)
    ]

    def rows() -> None:
        if not found:
            console.print("no models yet; `eagleray train` makes one", markup=False)
            return
        lines = [
            [
                f"{m['name']}@{m['version']}", " ".join(m["aliases"]), _loss(m["metrics"]),
                m["record"][:_SHORT], _when(m["created_s"]),
            ]
            for m in found
        ]  # fmt: skip
        console.print(table("models", ["model", "aliases", "held-out", "digest", "made"], lines))

    emit(found, as_json, rows)


def show(
    spec: SpecArgument, config: ConfigOption = Path(CONFIG_NAME), as_json: JsonOption = False
) -> None:
    """Show one model: digests, figures, files.

    Example: eagleray models show my-project@prod
    """
    project = Project.load(config)
    version = project.registry.resolve(spec)
    document = {
        **asdict(version),
        "aliases": _aliases_of(project.registry.aliases(version.name), version),
        "folder": str(project.storage.path("artifacts", version.artifact)),
    }
    lines = [
        ["held-out loss", _loss(version.metrics)],
        ["aliases", " ".join(document["aliases"])],
        ["made", _when(version.created_s)],
        ["record", version.record],
        ["artifact", version.artifact],
        ["folder", document["folder"]],
    ]

    def told() -> None:
        console.print(version.spec, style="bold", markup=False)
        print_lines(["", ""], lines)

    emit(document, as_json, told)


def lineage(
    spec: Annotated[str, typer.Argument(help="A model, or the digest from x-model-digest.")],
    config: ConfigOption = Path(CONFIG_NAME),
    as_json: JsonOption = False,
) -> None:
    """Print the chain from a model, or a served answer's digest, down to the raw files.

    Example: eagleray models lineage my-project@prod
    """
    project = Project.load(config)
    try:
        digest = project.registry.resolve(spec).record
    except NotFoundError:
        if not _is_hex(spec):
            raise
        digest = project.ledger.complete(spec)
    tree = project.ledger.lineage(digest, "model")

    def draw() -> None:
        for depth, node in tree.walk():
            text = f"{'  ' * depth}{node.role or node.record.kind}: {_described(node)}"
            console.print(f"{text}  {node.record.digest}", markup=False, soft_wrap=True)

    emit(_tree(tree), as_json, draw)


def promote(
    spec: SpecArgument,
    alias: Annotated[str, typer.Argument(help="Alias to move.")] = DEFAULT_ALIAS,
    config: ConfigOption = Path(CONFIG_NAME),
    as_json: JsonOption = False,
) -> None:
    """Point an alias at a model, if the gate lets it through (else exit code 5).

    Example: eagleray models promote my-project@3 prod
    """
    project = Project.load(config)
    version = project.registry.resolve(spec)
    is_new = alias not in _aliases_of(project.registry.aliases(version.name), version)
    project.promote(version, alias)
    document = {"model": version.spec, "alias": alias, "record": version.record}
    told = f"{alias} {'is now' if is_new else 'was already'} {version.spec}"
    emit(document, as_json, lambda: console.print(told, markup=False))


def rollback(
    name: Annotated[str, typer.Argument(help="Model name.")],
    alias: Annotated[str, typer.Argument(help="Alias to move back.")] = DEFAULT_ALIAS,
    config: ConfigOption = Path(CONFIG_NAME),
    as_json: JsonOption = False,
) -> None:
    """Point an alias back at the model it named before.

    Example: eagleray models rollback my-project
    """
    version = Project.load(config).registry.rollback(name, alias)
    document = {"model": version.spec, "alias": alias, "record": version.record}
    emit(document, as_json, lambda: console.print(f"{alias} is again {version.spec}", markup=False))


def export(
    spec: SpecArgument,
    folder: Annotated[Path, typer.Argument(help="New folder.")],
    config: ConfigOption = Path(CONFIG_NAME),
    as_json: JsonOption = False,
) -> None:
    """Copy a model's verified files: the layout that transformers and vLLM load.

    Example: eagleray models export my-project@prod ./out
    """
    project = Project.load(config)
    version = project.registry.resolve(spec)
    source = verify_artifact(project.storage, version.artifact)
    if folder.exists():
        raise UsageError(f"{folder} is already there", "name a new folder")
    staged = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    shutil.copytree(source, staged)
    staged.rename(folder)
    document = {"model": version.spec, "folder": str(folder)}
    emit(document, as_json, lambda: console.print(f"wrote {folder}", markup=False))


def import_model(
    source: Annotated[str, typer.Argument(help="hf:<folder> or gguf:<file>.")],
    name: Annotated[str, typer.Option("--name", help="Name in the registry.")],
    config: ConfigOption = Path(CONFIG_NAME),
    as_json: JsonOption = False,
) -> None:
    """Register weights that were trained elsewhere.

    Example: eagleray models import gguf:SmolLM2-135M-Instruct.Q4_1.gguf --name smollm2
    """
    project = Project.load(config)
    kind, _, location = source.partition(":")
    path = Path(location).expanduser()
    if kind not in ("hf", "gguf") or not location:
        raise UsageError(f"{source!r} is neither hf:<folder> nor gguf:<file>", "name one of these")
    if not path.exists():
        raise UsageError(f"there is no {path}", "check the path")
    if kind == "gguf":
        from eagleray.platform.model.gguf_import import convert

        artifact = publish_artifact(project.storage, lambda folder: convert(path, folder))
        origin: dict[str, Any] = {"file": path.name, "sha256": digest_file(path)}
    else:
        from eagleray.platform.model.adopt import adopt

        artifact = publish_artifact(project.storage, lambda folder: adopt(path, folder))
        files = {file.name: digest_file(file) for file in sorted(path.iterdir()) if file.is_file()}
        origin = {"folder": path.name, "files": files}
    imported = project.ledger.put("imported", {"source": kind, **origin})
    record = project.ledger.put(
        "model", {"artifact": artifact, "metrics": {}}, {"imported": imported}
    )
    version = project.registry.register(name, record, artifact, {})
    emit(
        asdict(version), as_json, lambda: console.print(f"registered {version.spec}", markup=False)
    )


def _aliases_of(aliases: dict[str, int], version: ModelVersion) -> list[str]:
    return sorted(alias for alias, number in aliases.items() if number == version.version)


def _described(node: LineageNode) -> str:
    body = node.record.body
    if node.record.kind == "dataset":
        files = body["manifest"].get("sources", [])
        return f"{len(files)} raw file(s): " + ", ".join(
            f"{file['name']} sha256 {file['sha256'][:_SHORT]}" for file in files[:3]
        )
    keys = ("run_id", "step", "version", "artifact", "source", "file", "folder")
    return ", ".join(f"{key} {str(body[key])[:40]}" for key in keys if key in body)


def _tree(node: LineageNode) -> dict[str, Any]:
    return {
        "role": node.role,
        **asdict(node.record),
        "inputs": [_tree(child) for child in node.inputs],
    }


def _loss(metrics: dict[str, Any]) -> str:
    return f"{metrics['eval_loss']:.4f}" if "eval_loss" in metrics else ""


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _is_hex(text: str) -> bool:
    return all(c in "0123456789abcdef" for c in text)
