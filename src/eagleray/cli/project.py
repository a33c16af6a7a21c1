"""Verbs of the project's file: init, check, schema."""

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from eagleray.cli.console import ConfigOption, JsonOption, OverridesArgument, console, emit
from eagleray.platform.config import CONFIG_NAME, ProjectConfig, load_config, resolved_json
from eagleray.platform.errors import UsageError

_TEMPLATE = """\
# Every key, its default and its meaning: eagleray schema
name: "{name}"

data:
  sources:
    - {{kind: jsonl, path: data/*.jsonl, text_field: text}}
  tokenizer: {{kind: bpe, vocab_size: 4096}}
  seq_len: 128

model: {{dim: 192, num_layers: 4, num_heads: 6, num_kv_heads: 2}}

train:
  num_workers: 1
  steps: 200
  batch_size: 32
  optimizer: {{lr: 1e-3}}

tune:
  num_trials: 6
  overrides: {{train.steps: 60}}
  space:
    train.optimizer.lr: {{kind: float, low: 3e-4, high: 1e-2, log: true}}
    train.optimizer.weight_decay: {{kind: float, low: 0.0, high: 0.3}}
"""


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command()(init)
    app.command()(check)
    app.command()(schema)


def init(
    folder: Annotated[Path, typer.Argument(help="New or existing folder.")] = Path(),
    force: Annotated[bool, typer.Option(help="Replace an eagleray.yaml that is there.")] = False,
) -> None:
    """Write an eagleray.yaml to start from.

    Example: eagleray init my-project
    """
    target = folder / CONFIG_NAME
    if target.exists() and not force:
        raise UsageError(f"{target} is already there", "edit it, or replace it with --force")
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub("[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    target.write_text(_TEMPLATE.format(name=name[:60] or "project"), encoding="utf-8")
    ignore = folder / ".gitignore"
    if not ignore.exists():
        ignore.write_text(".eagleray/\n", encoding="utf-8")
    console.print(f"wrote {target}", markup=False)
    console.print("next: put text into data/*.jsonl, then `eagleray check`", markup=False)


def check(
    overrides: OverridesArgument = None,
    config: ConfigOption = Path(CONFIG_NAME),
    as_json: JsonOption = False,
) -> None:
    """Validate the project's file and the paths it names: every problem at once.

    Example: eagleray check train.steps=500
    """
    loaded = load_config(config, overrides or [])
    problems = [
        f"data.sources: nothing found at {source.path} (paths start from {loaded.root})"
        for source in loaded.config.data.sources
        if not _matches(loaded.root, source.path)
    ]
    if reason := _unwritable(loaded.storage_path):
        problems.append(f"storage.uri: {reason}")
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise UsageError(
            f"{config} names what is not there:{listed}", "correct these paths, or make them"
        )
    emit(
        resolved_json(loaded.config),
        as_json,
        lambda: console.print(f"{config}: ok ({loaded.config.name})", markup=False),
    )


def schema() -> None:
    """Print the JSON Schema of eagleray.yaml, for editors.

    Example: eagleray schema > eagleray.schema.json
    """
    sys.stdout.write(json.dumps(ProjectConfig.model_json_schema(), indent=2) + "\n")


def _unwritable(folder: Path) -> str:
    """Why nothing can be written there; empty if it can, or can be made."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            return ""
    except OSError as error:
        return f"{there} cannot be written: {error.strerror or error}"


def _matches(root: Path, pattern: str) -> bool:
    path = Path(pattern).expanduser()
    if path.is_absolute():
        return path.exists() or any(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    return (root / path).exists() or any(root.glob(pattern))
