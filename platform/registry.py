"""Named models: versions that never change, and aliases that move by compare-and-set.

    models/<name>/<version>.json        {"record": <model record>, "artifact": <artifact>, ...}
    models/<name>/aliases/<alias>.json  {"version": 3, "history": [1, 2]}

Laws:
    * A version is written once; two registrations at the same time get two numbers.
    * `promote` and `rollback` are one atomic act each; a lost race is a ConflictError.
    * The endpoint and the trainer read the same files: there is no second registry.
"""

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eagleray.platform.errors import GateRefusedError, NotFoundError, UsageError
from eagleray.platform.gate import Verdict
from eagleray.platform.storage import Storage, canonical_json

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_MAX_RACES = 100
_HISTORY = 50
DEFAULT_ALIAS = "prod"


@dataclass(frozen=True)
class ModelVersion:
    """One registered model.

    `record` is the digest of its ledger record, which is what `x-model-digest` carries;
    `artifact` is the digest of the folder that is served.
    """

    name: str
    version: int
    record: str
    artifact: str
    metrics: dict[str, Any]
    created_s: float

    @property
    def spec(self) -> str:
        """`name@version`."""
        return f"{self.name}@{self.version}"


class Registry:
    """Models under `<storage>/models/`.

    Args:
        storage: The project's storage.
        clock: Seconds since the epoch.
    """

    def __init__(self, storage: Storage, clock: Callable[[], float] = time.time) -> None:
        self._storage, self._clock = storage, clock

    def register(
        self, name: str, record: str, artifact: str, metrics: dict[str, Any]
    ) -> ModelVersion:
        """Give a model the next version number under a name.

        A record that has a version under this name keeps it, however often it is registered.

        Raises:
            UsageError: The name breaks the naming rule.
        """
        _check_name(name)
        for _ in range(_MAX_RACES):
            versions = self.versions(name)
            for version in versions:
                if version.record == record:
                    return version
            number = versions[-1].version + 1 if versions else 1
            made = ModelVersion(name, number, record, artifact, metrics, self._clock())
            content = {
                "record": record,
                "artifact": artifact,
                "metrics": metrics,
                "created_s": made.created_s,
            }
            if self._storage.put_if_absent(
                canonical_json(content), "models", name, f"{number}.json"
            ):
                return made
        raise UsageError(f"{_MAX_RACES} others registered {name} at the same time", "try again")

    def names(self) -> list[str]:
        """Every model's name."""
        return self._storage.names("models")

    def versions(self, name: str) -> list[ModelVersion]:
        """The versions of a name, oldest first."""
        numbers = (file.removesuffix(".json") for file in self._storage.names("models", name))
        return [
            self._version(name, number) for number in sorted(int(n) for n in numbers if n.isdigit())
        ]

    def aliases(self, name: str) -> dict[str, int]:
        """Alias -> version."""
        files = self._storage.names("models", name, "aliases")
        return {file.removesuffix(".json"): self._alias(name, file)[1]["version"] for file in files}

    def resolve(self, spec: str) -> ModelVersion:
        """The version that `name@3`, `name@prod` or `name` means now (prod, else the newest).

        Raises:
            NotFoundError: There is no such model, version or alias; the message lists them.
        """
        name, _, which = spec.partition("@")
        versions = self.versions(name) if _NAME.fullmatch(name) else []
        if not versions:
            known = ", ".join(self.names()) or "none yet"
            raise NotFoundError(
                f"there is no model {name!r} (registered: {known})",
                "train one, or `eagleray models import`",
            )
        aliases = self.aliases(name)
        if not which:
            number = aliases.get(DEFAULT_ALIAS, versions[-1].version)
        elif which.isdecimal():
            number = int(which)
        else:
            number = aliases.get(which, -1)
        for version in versions:
            if version.version == number:
                return version
        numbers = ", ".join(str(version.version) for version in versions)
        raise NotFoundError(
            f"model {name} has no version or alias {which!r} "
            f"(versions: {numbers}; aliases: {', '.join(aliases) or 'none'})",
            "see `eagleray models list`",
        )

    def promote(
        self,
        version: ModelVersion,
        alias: str = DEFAULT_ALIAS,
        gate: Callable[[ModelVersion, ModelVersion | None], Verdict] | None = None,
    ) -> None:
        """Point an alias at a version, if the gate lets it through.

        Raises:
            UsageError: The alias breaks the naming rule, or is a number.
            GateRefusedError: The gate refused; nothing changed.
            ConflictError: Somebody moved the alias meanwhile; nothing changed.
        """
        _check_name(alias)
        if alias.isdecimal():
            raise UsageError(
                f"alias {alias!r} would read as a version number", "choose one with a letter"
            )
        before, state = self._alias(version.name, f"{alias}.json")
        current = state["version"] if state else None
        if gate is not None:
            verdict = gate(version, self._version(version.name, current) if current else None)
            if not verdict.passed:
                raise GateRefusedError(
                    f"{version.spec} may not become {alias}: " + "; ".join(verdict.reasons),
                    "train or choose a better one, or change eval.max_loss or eval.tolerance in "
                    "eagleray.yaml",
                )
        if current == version.version:
            return
        history = [*(state["history"] if state else []), *([current] if current else [])]
        self._move(version.name, alias, before, version.version, history)

    def rollback(self, name: str, alias: str = DEFAULT_ALIAS) -> ModelVersion:
        """Point an alias back at the version it named before.

        Raises:
            NotFoundError: There is no such alias or nothing before it.
            ConflictError: Somebody moved the alias meanwhile; nothing changed.
        """
        before, state = self._alias(name, f"{alias}.json")
        if state is None or not state["history"]:
            raise NotFoundError(
                f"{name}@{alias} has no earlier version to go back to", "see `eagleray models list`"
            )
        *history, previous = state["history"]
        self._move(name, alias, before, previous, history)
        return self._version(name, previous)

    def _move(
        self, name: str, alias: str, before: bytes | None, version: int, history: list[int]
    ) -> None:
        content = {
            "version": version, "history": history[-_HISTORY:], "changed_s": self._clock()
        }  # fmt: skip
        self._storage.compare_and_set(
            before, canonical_json(content), "models", name, "aliases", f"{alias}.json"
        )

    def _alias(self, name: str, file: str) -> tuple[bytes | None, Any]:
        try:
            data = self._storage.read("models", name, "aliases", file)
        except NotFoundError:
            return None, None
        return data, json.loads(data)

    def _version(self, name: str, number: int) -> ModelVersion:
        content = self._storage.read_json("models", name, f"{number}.json")
        return ModelVersion(
            name,
            number,
            content["record"],
            content["artifact"],
            content["metrics"],
            content["created_s"],
        )


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a name: lower-case letters, digits, '.', '_' and '-', at most 63",
            "choose another",
        )
