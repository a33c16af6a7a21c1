"""From `eagleray.yaml` and dotted overrides to one validated, frozen tree.

Precedence: defaults < file < overrides, and nothing else. The CLI, the Python API and Tune's
trials share one override function, so a value means the same wherever it comes from. Every
problem of a file is reported at once, each with its path, value, rule and nearest legal name.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from eagleray.platform.config.sections import ProjectConfig
from eagleray.platform.config.values import near
from eagleray.platform.errors import UsageError

CONFIG_NAME = "eagleray.yaml"
_MISSING = object()


@dataclass(frozen=True)
class Problem:
    """One broken rule: where, which value, which rule, and what was probably meant."""

    path: str
    value: str
    rule: str
    hint: str = ""

    def __str__(self) -> str:
        value = f" = {self.value}" if self.value else ""
        hint = f" (did you mean `{self.hint}`?)" if self.hint else ""
        return f"{self.path}{value}: {self.rule}{hint}"


class ConfigError(UsageError):
    """The configuration breaks rules; `problems` lists all of them."""

    def __init__(self, source: str, problems: tuple[Problem, ...]) -> None:
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        lines = "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(
            f"{source} has {count}:{lines}", "correct these; `eagleray schema` lists every key"
        )
        # Rebuilt from its own arguments on the other side of a process border.
        self.args = (source, problems)
        self.source, self.problems = source, problems


@dataclass(frozen=True)
class LoadedConfig:
    """A validated tree and the folder that its relative paths start from."""

    config: ProjectConfig
    root: Path

    def resolve(self, path: str) -> Path:
        """The absolute form of a path in the configuration."""
        return (self.root / Path(path.removeprefix("file://")).expanduser()).resolve()

    @property
    def storage_path(self) -> Path:
        """The absolute storage folder."""
        return self.resolve(self.config.storage.uri)


def load_config(path: Path | str = CONFIG_NAME, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a file, lay `a.b=value` overrides over it, and validate the whole.

    Args:
        path: The YAML file, or the folder that holds an eagleray.yaml.
        overrides: Dotted assignments; values are read as YAML.

    Raises:
        UsageError: There is no such file, or it is not YAML.
        ConfigError: It breaks rules; all of them are listed.
    """
    path = Path(path)
    if path.is_dir():
        path = path / CONFIG_NAME
    tree = _read_yaml(path)
    return LoadedConfig(
        validated(_merged(tree, parse_overrides(overrides)), str(path)), path.resolve().parent
    )


def with_overrides(config: ProjectConfig, overrides: Mapping[str, Any]) -> ProjectConfig:
    """A new tree with dotted paths replaced, validated as a whole.

    Raises:
        ConfigError: A path does not exist or a value breaks a rule.
    """
    tree = config.model_dump(mode="python", exclude_unset=True)
    return validated(_merged(tree, overrides), "overrides")


def validated(tree: Mapping[str, Any], source: str) -> ProjectConfig:
    """The configuration of a tree from anywhere.

    Args:
        tree: Plain values.
        source: What an error names as the place of its problems.

    Raises:
        ConfigError: It breaks rules; all of them are listed.
    """
    try:
        return ProjectConfig.model_validate(tree)
    except ValidationError as error:
        problems = tuple(_problem(detail) for detail in error.errors(include_url=False))
        raise ConfigError(source, problems) from None


def parse_overrides(assignments: Sequence[str]) -> dict[str, Any]:
    """Split `a.b=value` texts; values are YAML, so `1e-3`, `true`, `[1, 2]` and `null` work.

    Raises:
        UsageError: One of them has no `=` or no path.
    """
    parsed: dict[str, Any] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UsageError(
                f"override {text!r} is not of the form path=value",
                "write for example train.steps=100",
            )
        try:
            parsed[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UsageError(
                f"the value of override {text!r} is not YAML", "quote it: name='\"a: b\"'"
            ) from error
    return parsed


def resolved_json(config: ProjectConfig) -> dict[str, Any]:
    """The whole tree with its defaults as plain JSON values; secrets stay masked."""
    dumped: dict[str, Any] = config.model_dump(mode="json")
    return dumped


def config_digest(config: ProjectConfig) -> str:
    """SHA-256 of the resolved tree: equal configurations have equal digests."""
    text = json.dumps(resolved_json(config), sort_keys=True, separators=(",", ":"))
    return sha256(text.encode()).hexdigest()


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(
            f"there is no {path}", "run `eagleray init`, or name a file with --config"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}", "check its permissions and encoding"
        ) from error
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = getattr(error, "problem", None) or "unreadable"
        raise UsageError(f"{path}{where}: not valid YAML: {reason}", "correct that line") from error
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise UsageError(
            f"{path} holds a {type(tree).__name__}, not a mapping of sections",
            "see `eagleray init`",
        )
    return tree


def _merged(tree: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(dict(tree))
    for path, value in overrides.items():
        _assign(result, path, path.split("."), value)
    return result


def _assign(node: Any, path: str, keys: list[str], value: Any) -> None:
    for position, key in enumerate(keys[:-1]):
        child = _child(node, path, key)
        if child is _MISSING or child is None:
            child = node[key] = {}
        # `tune.space` and `tune.overrides` are keyed by dotted paths: the rest is one key.
        if keys[: position + 1] in (["tune", "space"], ["tune", "overrides"]):
            node, keys = child, [*keys[: position + 1], ".".join(keys[position + 1 :])]
            break
        node = child
    last: Any = keys[-1]
    if isinstance(node, list):
        last = _index(node, path, last)
    elif not isinstance(node, dict):
        raise UsageError(
            f"override {path}: {'.'.join(keys[:-1])} is a value, it has no {last!r}",
            "see `eagleray schema`",
        )
    elif last == "kind" and _is_other_variant(keys[:-1], node, value):
        # Another variant has other keys; the old variant's would leak into it.
        node.clear()
    node[last] = value


def _is_other_variant(keys: list[str], node: dict[str, Any], kind: Any) -> bool:
    """Whether `kind` chooses between sections there, and chooses another one than now."""
    models: list[type[BaseModel]] = [ProjectConfig]
    for key in keys:
        fields = [model.model_fields[key] for model in models if key in model.model_fields]
        if fields:  # else an index, or a key of a mapping
            models = [nested for field in fields for nested in _models_in(field.annotation)]
    return len(models) > 1 and node.get("kind", _default_kind(keys)) != kind


def _default_kind(keys: list[str]) -> Any:
    """The `kind` that a part of the tree has when the file does not say."""
    default: Any = ProjectConfig.model_construct(name="")
    for key in keys:
        default = getattr(default, key, None)
    return getattr(default, "kind", None)


def _child(node: Any, path: str, key: str) -> Any:
    if isinstance(node, dict):
        return node.get(key, _MISSING)
    if isinstance(node, list):
        return node[_index(node, path, key)]
    raise UsageError(f"override {path}: {key!r} has nothing under it", "see `eagleray schema`")


def _index(node: list[Any], path: str, key: str) -> int:
    if not key.isdigit() or int(key) >= len(node):
        raise UsageError(
            f"override {path}: {key!r} is not an index below {len(node)}",
            "lists are indexed from 0",
        )
    return int(key)


def _problem(detail: Any) -> Problem:
    location: tuple[Any, ...] = detail["loc"]
    kind, value = detail["type"], detail["input"]
    keys, legal = _walk(location)
    path = ".".join(keys) or "(the whole file)"
    if kind == "extra_forbidden":
        meant = near(str(location[-1]), legal)
        prefix = ".".join(keys[:-1])
        hint = ".".join(part for part in (prefix, meant) if part) if meant else ""
        return Problem(path, _shown(value), "is not a key that exists here", hint)
    if kind == "missing":
        return Problem(path, "", "is required")
    rule = detail["msg"].removeprefix("Value error, ")
    return Problem(path, "" if isinstance(value, dict | BaseModel) else _shown(value), rule)


def _walk(location: tuple[Any, ...]) -> tuple[list[str], list[str]]:
    """The keys a user wrote to get to a location, and the names legal beside its last one.

    Pydantic puts the tag of a union's variant into the location; in the file it is not a key.
    """
    keys: list[str] = []
    models: list[type[BaseModel]] = [ProjectConfig]
    for position, part in enumerate(location):
        tagged = [model for model in models if part in _tags(model)] if len(models) > 1 else []
        if tagged:
            models = tagged
            continue
        if part in ("values", "range") and "where" in location[:position][-2:-1]:
            continue
        keys.append(str(part))
        if position < len(location) - 1:
            fields = [model.model_fields[part] for model in models if part in model.model_fields]
            models = [
                nested for field in fields for nested in _models_in(field.annotation)
            ] or models
    return keys, sorted({name for model in models for name in model.model_fields})


def _tags(model: type[BaseModel]) -> tuple[Any, ...]:
    return get_args(model.model_fields["kind"].annotation) if "kind" in model.model_fields else ()


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]


def _shown(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
