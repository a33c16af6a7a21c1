"""What travels to a cluster with a job: this Eagleray and the project's file, never data.

Both go as archives named by the digest of their content, so equal code is sent once and changed
code is never mistaken for old (Ray names an uploaded wheel by its file name). Paths in the file are
made absolute: storage and data must be reachable by the same path on every node.
"""

import io
import os
import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml
from pydantic import SecretStr

from eagleray.platform.config import CONFIG_NAME, LoadedConfig, parse_overrides
from eagleray.platform.errors import UsageError

MAX_BYTES = 20_000_000
_OFFENDERS_SHOWN = 5
_LEFT_OUT = ("__pycache__",)
_OVERRIDE = re.compile(r"^[a-z_]+(\.\w+)+=")
# Overrides that name files; `data.sources.0.path` among them.
_PATH_KEY = re.compile(r"^(storage\.uri|data\.tokenizer\.path|data\.sources\.\d+\.path)$")
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Package:
    """One archive and what it holds."""

    label: str
    files: tuple[tuple[str, int], ...]
    """Name and size in bytes of each file."""
    data: bytes

    @property
    def name(self) -> str:
        """The archive's name on the cluster; equal content has equal names."""
        return f"_ray_pkg_{sha256(self.data).hexdigest()[:32]}.zip"

    @property
    def uri(self) -> str:
        """How a runtime environment refers to it."""
        return f"gcs://{self.name}"

    @property
    def num_bytes(self) -> int:
        """Size of the files before compression."""
        return sum(size for _, size in self.files)


@dataclass(frozen=True)
class Shipment:
    """A verb with its arguments and what it needs to run elsewhere."""

    arguments: tuple[str, ...]
    code: Package
    project: Package

    @property
    def overrides(self) -> list[str]:
        """Those of the arguments that override the project's file."""
        return [argument for argument in self.arguments[1:] if _OVERRIDE.match(argument)]

    @property
    def packages(self) -> tuple[Package, Package]:
        """Everything that is sent."""
        return (self.code, self.project)


def prepare(loaded: LoadedConfig, arguments: Sequence[str], code: Path) -> Shipment:
    """Gather what a verb needs on a cluster.

    Args:
        loaded: The project.
        arguments: The verb and its arguments, as after `eagleray`.
        code: The folder of the package `eagleray`.

    Raises:
        UsageError: There is no verb, it names a file of its own, or the archive would be too big.
    """
    arguments = list(arguments)
    if arguments[:1] == ["eagleray"]:
        arguments = arguments[1:]
    if not arguments or arguments[0].startswith("-"):
        raise UsageError(
            "no verb was given to submit", "for example: eagleray submit -- train train.steps=50"
        )
    chosen = [a for a in arguments if a in ("-c", "--config") or a.startswith("--config=")]
    if chosen:
        raise UsageError(
            f"{chosen[0]} stands after `--`, but a job runs on the file that is sent along",
            "name the file before it: eagleray submit --config FILE -- VERB ...",
        )
    text = yaml.safe_dump(_absolute(loaded), sort_keys=False, allow_unicode=True)
    return Shipment(
        tuple(_absolute_override(loaded, argument) for argument in arguments),
        _pack("code", _walk(code, code.name)),
        _pack("project", [(CONFIG_NAME, text.encode())]),
    )


def _absolute(loaded: LoadedConfig) -> dict[str, Any]:
    tree: dict[str, Any] = _plain(loaded.config.model_dump(mode="python", exclude_unset=True))
    tree.setdefault("storage", {})["uri"] = str(loaded.storage_path)
    data = tree.get("data", {})
    for source in data.get("sources", []):
        source["path"] = str(loaded.resolve(source["path"]))
    tokenizer = data.get("tokenizer", {})
    if "path" in tokenizer:
        tokenizer["path"] = str(loaded.resolve(tokenizer["path"]))
    return tree


def _absolute_override(loaded: LoadedConfig, argument: str) -> str:
    if not _OVERRIDE.match(argument):
        return argument
    ((key, value),) = parse_overrides([argument]).items()
    return f"{key}={loaded.resolve(value)}" if _PATH_KEY.match(key) else argument


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.get_secret_value() if isinstance(value, SecretStr) else value


def _walk(root: Path, prefix: str) -> Iterator[tuple[str, bytes]]:
    # Links are followed: in a checkout the four root folders are links in the package.
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = sorted(f for f in folders if f not in _LEFT_OUT and not f.startswith("."))
        for name in sorted(names):
            path = Path(folder) / name
            if not name.startswith(".") and path.suffix != ".pyc" and path.is_file():
                yield f"{prefix}/{path.relative_to(root)}", path.read_bytes()


def _pack(label: str, files: Sequence[tuple[str, bytes]] | Iterator[tuple[str, bytes]]) -> Package:
    listed: list[tuple[str, int]] = []
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, content in files:
            listed.append((name, len(content)))
            if sum(size for _, size in listed) > 2 * MAX_BYTES:
                break  # Refused below; a stray data folder need not be read to its end.
            # Without a time: equal content must give equal bytes.
            zipped.writestr(zipfile.ZipInfo(name, _EPOCH), content, zipfile.ZIP_DEFLATED)
    package = Package(label, tuple(listed), archive.getvalue())
    if package.num_bytes > MAX_BYTES:
        largest = sorted(listed, key=lambda entry: entry[1], reverse=True)[:_OFFENDERS_SHOWN]
        named = ", ".join(f"{name} ({size / 1e6:.1f} MB)" for name, size in largest)
        raise UsageError(
            f"the job's {label} is over the limit of {MAX_BYTES / 1e6:.0f} MB; largest: {named}",
            "move data out of the package's folder; jobs read it from storage",
        )
    return package
