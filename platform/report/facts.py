"""Everything a report of a run needs, read from storage once; secrets are masked on the way."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from eagleray.platform.errors import EagleRayError, NotFoundError
from eagleray.platform.ledger import Ledger, LineageNode, Record
from eagleray.platform.registry import Registry
from eagleray.platform.report.history import History, read_history, read_rows
from eagleray.platform.report.trials import TrialStory, read_trials
from eagleray.platform.runs import RunState, RunStore
from eagleray.platform.storage import Storage
from eagleray.platform.telemetry import MASK, redacted

_SECRET_KEY = re.compile(r"(password|passwd|secret|credential|api_?key|(^|[._])token$)", re.I)
NO_LINEAGE = "A run gets its records when it finishes."


@dataclass(frozen=True)
class RunFacts:
    """A run as storage knows it."""

    state: RunState
    config: dict[str, Any]
    history: History
    trials: list[TrialStory]
    lineage: LineageNode | None
    no_lineage: str
    """Why there is no lineage; empty when there is one."""
    aliases: tuple[str, ...]
    """Aliases that name the run's model now."""

    def find(self, kind: str) -> Record | None:
        """The first record of a kind in the lineage."""
        return self.lineage.find(kind) if self.lineage else None


def read_facts(storage: Storage, run_id: str) -> RunFacts:
    """Read a run; damaged records make its lineage unknown, nothing else.

    Raises:
        NotFoundError: There is no such run.
    """
    runs = RunStore(storage)
    found = runs.state(run_id)
    state = replace(found, message=redacted(found.message), results=masked(found.results))
    try:
        config = masked(runs.config(run_id))
    except NotFoundError:  # its creator died between the two files
        config = {}
    events = [masked(event) for event in runs.events(run_id)]
    history = read_history(state, read_rows(runs.metrics(run_id)), events)
    lineage, reason = _lineage(storage, state.results.get("record"))
    aliases = _aliases(storage, state.results.get("model"))
    return RunFacts(state, config, history, read_trials(events), lineage, reason, aliases)


def masked(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without secrets: values of keys that name one, and credentials inside of texts."""
    return {key: _masked(value, str(key)) for key, value in tree.items()}


def _masked(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return masked(value)
    if isinstance(value, list):
        return [_masked(child, key) for child in value]
    if value is not None and _SECRET_KEY.search(key):
        return MASK
    return redacted(value) if isinstance(value, str) else value


def _lineage(storage: Storage, digest: str | None) -> tuple[LineageNode | None, str]:
    if not digest:
        return None, NO_LINEAGE
    try:
        return Ledger(storage).lineage(digest), ""
    except EagleRayError as error:
        return None, error.what


def _aliases(storage: Storage, spec: object) -> tuple[str, ...]:
    name, at, number = str(spec or "").partition("@")
    if not at:
        return ()
    try:
        aliases = Registry(storage).aliases(name)
    except EagleRayError:
        return ()
    return tuple(sorted(alias for alias, version in aliases.items() if str(version) == number))
