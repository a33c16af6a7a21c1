"""Runs: what a training run or a sweep leaves on storage while it goes on and after it ended.

    runs/<id>/config.json     the resolved configuration
              state.json      status and progress, replaced atomically
              metrics.jsonl   one row per report; a torn last line is ignored by the reader
              events.jsonl    starts, faults, checkpoints, the end; with times
              checkpoints/    see actors/checkpoint
              samples/        the ids that trained the committed weights

The driver, the run's recorder and its checkpoint store write here: states change by
compare-and-set, rows and events are appended whole.
"""

import contextlib
import fcntl
import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from eagleray.platform.clock import steady_time
from eagleray.platform.errors import ConflictError, NotFoundError, UsageError
from eagleray.platform.storage import Storage, canonical_json

_ALPHABET = "23456789abcdefghjkmnpqrstuvwxyz"
_ID_TRIES = 50
_UPDATE_TRIES = 50


class RunStatus(StrEnum):
    """Life of a run: pending -> running -> one of the three ends."""

    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def is_terminal(self) -> bool:
        """Whether nothing more will happen by itself."""
        return self in (RunStatus.FINISHED, RunStatus.FAILED, RunStatus.STOPPED)


@dataclass(frozen=True)
class RunState:
    """Where a run stands."""

    run_id: str
    kind: str
    status: RunStatus
    created_s: float
    updated_s: float
    step: int = 0
    steps: int = 0
    message: str = ""
    results: dict[str, Any] = field(default_factory=dict)


class RunStore:
    """Runs under `<storage>/runs/`.

    Args:
        storage: The project's storage.
        clock: Seconds since the epoch.
    """

    def __init__(self, storage: Storage, clock: Callable[[], float] = steady_time) -> None:
        self._storage, self._clock = storage, clock

    def create(self, name: str, kind: str, config: dict[str, Any], steps: int = 0) -> str:
        """Make a run with a short id such as `sotu-tiny-7f3k`.

        Returns:
            The id; no other run has it.
        """
        for _ in range(_ID_TRIES):
            run_id = f"{name}-{''.join(secrets.choice(_ALPHABET) for _ in range(4))}"
            now = self._clock()
            state = RunState(run_id, kind, RunStatus.PENDING, now, now, steps=steps)
            data = json.dumps(asdict(state), sort_keys=True).encode()
            if self._storage.put_if_absent(data, "runs", run_id, "state.json"):
                self._storage.put_json(config, "runs", run_id, "config.json")
                return run_id
        raise UsageError(f"no free run id for {name} in {_ID_TRIES} tries", "remove old runs")

    def state(self, run_id: str) -> RunState:
        """Where a run stands.

        Raises:
            NotFoundError: There is no such run; the message names the newest ones.
        """
        try:
            return _parsed(self._storage.read("runs", run_id, "state.json"))
        except NotFoundError:
            newest = ", ".join(state.run_id for state in self.all()[:5]) or "none yet"
            raise NotFoundError(
                f"there is no run {run_id!r} (newest: {newest})", "see `eagleray ps`"
            ) from None

    def update(self, run_id: str, **changes: Any) -> RunState:
        """Replace fields of a run's state; the other fields stay what other processes made them.

        A message belongs to the status that it came with: a new status without one clears it.

        Raises:
            NotFoundError: There is no such run.
            ConflictError: Others changed it all the time.
        """
        self.state(run_id)
        if "status" in changes:
            changes.setdefault("message", "")
        for _ in range(_UPDATE_TRIES):
            before = self._storage.read("runs", run_id, "state.json")
            state = replace(_parsed(before), **changes, updated_s=self._clock())
            after = canonical_json(asdict(state))
            with contextlib.suppress(ConflictError):
                self._storage.compare_and_set(before, after, "runs", run_id, "state.json")
                return state
        raise ConflictError(
            f"the state of run {run_id} changed under each of {_UPDATE_TRIES} tries to update it",
            "see which processes write to it: eagleray ps",
        )

    @contextlib.contextmanager
    def claim(self, run_id: str) -> Iterator[None]:
        """Be the one driver of a run; the system lets go of it however the process ends.

        Raises:
            NotFoundError: There is no such run.
            UsageError: Another driver is at work on it.
        """
        self.state(run_id)
        with self._storage.path("runs", run_id, ".driver.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"run {run_id} has a driver at work on it, and takes only one",
                    "follow it with `eagleray logs`, or stop that one first",
                ) from None
            yield

    def all(self) -> list[RunState]:
        """Every run, newest first."""
        states = []
        for run_id in self._storage.names("runs"):
            try:
                states.append(_parsed(self._storage.read("runs", run_id, "state.json")))
            except NotFoundError:  # being created right now
                continue
        return sorted(states, key=lambda state: state.created_s, reverse=True)

    def config(self, run_id: str) -> dict[str, Any]:
        """The resolved configuration that a run was started with.

        Raises:
            NotFoundError: There is no such run; the message names the newest ones.
        """
        self.state(run_id)
        config: dict[str, Any] = self._storage.read_json("runs", run_id, "config.json")
        return config

    def add_metrics(self, run_id: str, row: dict[str, Any]) -> None:
        """Append one row of figures."""
        self._append(run_id, "metrics.jsonl", row)

    def add_event(self, run_id: str, event: str, **details: Any) -> None:
        """Append one event with the time."""
        self._append(run_id, "events.jsonl", {"time_s": self._clock(), "event": event, **details})

    def metrics(self, run_id: str) -> list[dict[str, Any]]:
        """Every row of figures so far."""
        return self._rows(run_id, "metrics.jsonl")

    def events(self, run_id: str) -> list[dict[str, Any]]:
        """Every event so far."""
        return self._rows(run_id, "events.jsonl")

    def _append(self, run_id: str, name: str, row: dict[str, Any]) -> None:
        self._storage.append(json.dumps(row, sort_keys=True).encode(), "runs", run_id, name)

    def _rows(self, run_id: str, name: str) -> list[dict[str, Any]]:
        path = self._storage.path("runs", run_id, name)
        if not path.exists():
            return []
        rows = []
        for line in path.read_bytes().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:  # the writer died inside this line
                continue
        return rows


def _parsed(data: bytes) -> RunState:
    content = json.loads(data)
    return RunState(**{**content, "status": RunStatus(content["status"])})
