"""What became of a run, worked out from its events and rows: attempts, faults, checkpoints, pauses.

Laws:
    * The seconds lost to a fault run from the last row before it to the first row of the attempt
      that follows; faults without a row between them share that stretch and never count it twice.
    * The steps redone after a fault are those that its attempt had reported beyond the checkpoint
      from which the next one went on.
    * A silence before an attempt that is longer than `PAUSE_S` is a pause: nobody was training, so
      it counts neither as lost nor as wall time.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeGuard

from eagleray.platform.runs import RunState, RunStatus

PAUSE_S = 600.0
PARTS = ("compute", "communication", "data", "checkpoint", "eval")
_END_BY_STATUS = {
    RunStatus.FINISHED: "finished",
    RunStatus.FAILED: "failed",
    RunStatus.STOPPED: "stopped",
    RunStatus.RUNNING: "running",
    RunStatus.PENDING: "starting",
}


@dataclass(frozen=True)
class Row:
    """One report of a run: figures of the steps since the report before; see StepRow."""

    attempt: int
    step: int
    time_s: float
    loss: float
    eval_loss: float | None
    grad_norm: float
    lr: float
    tokens_per_s: float
    mfu: float
    parts_s: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    """Of each domain, where a mixture that follows the losses decided."""
    skipped_steps: int = 0
    """Steps so far whose update was skipped, as something was not finite."""


@dataclass(frozen=True)
class Attempt:
    """One life of the group of workers."""

    number: int
    begun_s: float
    ended_s: float
    world_size: int
    start_step: int
    """Steps that its first state had seen."""
    last_step: int
    """Steps at its last row; `start_step` if it has none."""
    num_rows: int
    end: str
    """How it ended, in words."""


_PHASES = ("gathered_s", "seated_s", "met_s", "restored_s", "stepped_s")


@dataclass(frozen=True)
class Fault:
    """Workers that died or failed, and what that cost."""

    number: int
    time_s: float
    attempt: int
    ranks: tuple[int, ...]
    message: str
    step: int
    steps_redone: int
    lost_s: float | None
    """None: no row came after it."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of what its recovery went through, in order, where survivors went on."""


@dataclass(frozen=True)
class CheckpointNote:
    """A checkpoint that was committed."""

    time_s: float
    step: int
    digest: str


@dataclass(frozen=True)
class Note:
    """Any other event."""

    time_s: float
    event: str
    text: str


@dataclass(frozen=True)
class Clock:
    """Seconds since the run was created, pauses left out."""

    origin_s: float
    pauses: tuple[tuple[float, float], ...] = ()

    def at(self, time_s: float) -> float:
        """The position of a moment."""
        paused = sum(max(0.0, min(time_s, end) - start) for start, end in self.pauses)
        return max(0.0, time_s - self.origin_s - paused)


@dataclass(frozen=True)
class History:
    """A run's life."""

    rows: tuple[Row, ...]
    attempts: tuple[Attempt, ...]
    faults: tuple[Fault, ...]
    checkpoints: tuple[CheckpointNote, ...]
    notes: tuple[Note, ...]
    clock: Clock
    ended_s: float
    """The last sign of life."""
    kept: tuple[Row, ...] = ()
    """The rows behind the final weights, by step."""
    redone: tuple[Row, ...] = ()
    """Rows whose steps a later attempt trained again."""


def read_rows(raw: Iterable[dict[str, Any]]) -> tuple[Row, ...]:
    """Rows of a metrics file; those that lack a step, a time or a finite loss are left out."""
    rows = (_row(entry) for entry in raw)
    return tuple(sorted((row for row in rows if row), key=lambda row: row.time_s))


def read_history(state: RunState, rows: tuple[Row, ...], events: list[dict[str, Any]]) -> History:
    """Work out a run's life."""
    timed = sorted(
        (e for e in events if _is_number(e.get("time_s")) and "event" in e),
        key=lambda e: e["time_s"],
    )
    checkpoints = tuple(
        CheckpointNote(e["time_s"], int(e["step"]), str(e.get("digest", "")))
        for e in timed
        if e["event"] == "checkpoint"
    )
    last_s = max([state.updated_s, *(e["time_s"] for e in timed), *(r.time_s for r in rows)])
    attempts = _attempts(state, rows, timed, checkpoints, last_s)
    clock = Clock(state.created_s, _pauses(attempts))
    known = (
        "attempt", "start", "recovery", "resize", "resized", "checkpoint", "fault", "trial",
        "value", "trial_end", "worker",
    )  # fmt: skip
    notes = tuple(
        Note(e["time_s"], str(e["event"]), _details(e)) for e in timed if e["event"] not in known
    )
    faults = _faults(rows, timed, attempts, clock)
    kept, redone = _parted(rows, attempts)
    return History(rows, attempts, faults, checkpoints, notes, clock, last_s, kept, redone)


def _attempts(
    state: RunState,
    rows: tuple[Row, ...],
    events: list[dict[str, Any]],
    checkpoints: tuple[CheckpointNote, ...],
    last_s: float,
) -> tuple[Attempt, ...]:
    begun = [e for e in events if e["event"] == "attempt"]
    made: list[Attempt] = []
    for position, event in enumerate(begun):
        until = begun[position + 1]["time_s"] if position + 1 < len(begun) else math.inf
        number, start_s = int(event["attempt"]), float(event["time_s"])
        own = [row for row in rows if row.attempt == number]
        started = (e["step"] for e in events if e["event"] == "start" and e["attempt"] == number)
        # Earlier versions did not note it.
        guessed = _start_step(start_s, own, checkpoints) if position else 0
        start = int(next(started, guessed))
        ends = [e for e in events if start_s <= e["time_s"] < until]
        fault = next((e for e in ends if e["event"] in ("fault", "fatal", "state_lost")), None)
        resize = next((e for e in ends if e["event"] == "resize"), None)
        signs = [e["time_s"] for e in ends] + [r.time_s for r in own if r.time_s < until]
        if fault is not None:
            what = str(fault.get("message") or fault.get("what") or "")
            end, ended_s = f"{fault['event']}: {what}", float(fault["time_s"])
        elif resize is not None:
            end = f"resized: {resize.get('from')} -> {resize.get('to')} workers"
            ended_s = float(resize["time_s"])
        elif until == math.inf:
            end, ended_s = _END_BY_STATUS[state.status], max([*signs, start_s])
            if not state.status.is_terminal:
                ended_s = last_s
        else:
            end, ended_s = "cut off: its driver ended", max(signs)
        made.append(
            Attempt(
                number, start_s, ended_s, int(event.get("world_size", 1)), start,
                max((row.step for row in own), default=start), len(own), end,
            )
        )  # fmt: skip
    return tuple(made)


def _start_step(start_s: float, own: list[Row], checkpoints: tuple[CheckpointNote, ...]) -> int:
    first = own[0].step if own else math.inf
    # A checkpoint is noted once it is on storage, which a restart takes longer than. One beyond the
    # attempt's first row was found damaged, and skipped.
    return max((c.step for c in checkpoints if c.time_s <= start_s and c.step < first), default=0)


def _faults(
    rows: tuple[Row, ...],
    events: list[dict[str, Any]],
    attempts: tuple[Attempt, ...],
    clock: Clock,
) -> tuple[Fault, ...]:
    raw = [e for e in events if e["event"] == "fault"]
    recoveries = [e for e in events if e["event"] == "recovery"]
    made: list[Fault] = []
    counted_until = -math.inf
    for number, event in enumerate(raw, 1):
        time_s, attempt = float(event["time_s"]), int(event.get("attempt", 0))
        before = [row for row in rows if row.time_s <= time_s]
        after = [row for row in rows if row.time_s > time_s and row.attempt > attempt]
        begins = [a.begun_s for a in attempts if a.number == attempt and not before]
        since = max([counted_until, *(r.time_s for r in before), *begins], default=time_s)
        since = since if math.isfinite(since) else time_s
        until = None
        if after:
            ahead = (float(later["time_s"]) for later in raw[number:])
            until = counted_until = min([after[0].time_s, *ahead])
        own_last = max((row.step for row in before if row.attempt == attempt), default=None)
        following = next((a for a in attempts if a.number > attempt), None)
        redone = 0
        if own_last is not None and following is not None:
            redone = max(0, own_last - following.start_step)
        made.append(
            Fault(
                number, time_s, attempt, tuple(event.get("ranks", ())),
                str(event.get("message", "")), max((row.step for row in before), default=0),
                redone, None if until is None else clock.at(until) - clock.at(since),
                _phases(time_s, raw[number:], recoveries),
            )
        )  # fmt: skip
    return tuple(made)


def _phases(
    time_s: float, later: list[dict[str, Any]], recoveries: list[dict[str, Any]]
) -> dict[str, float]:
    """What the recovery from a fault went through, if survivors went on."""
    until = min((float(event["time_s"]) for event in later), default=math.inf)
    for event in recoveries:
        if time_s <= float(event["time_s"]) < until:
            return {name: float(event[name]) for name in _PHASES if name in event}
    return {}


def _parted(
    rows: tuple[Row, ...], attempts: tuple[Attempt, ...]
) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    # An attempt's steps count up to where a later one went on from.
    until: dict[int, float] = {}
    lowest = math.inf
    for attempt in reversed(attempts):
        until[attempt.number] = lowest
        lowest = min(lowest, attempt.start_step)
    redone = tuple(row for row in rows if row.step > until.get(row.attempt, math.inf))
    kept = (row for row in rows if row.step <= until.get(row.attempt, math.inf))
    return tuple(sorted(kept, key=lambda row: row.step)), redone


def _pauses(attempts: tuple[Attempt, ...]) -> tuple[tuple[float, float], ...]:
    gaps = [(one.ended_s, other.begun_s) for one, other in pairwise(attempts)]
    return tuple((start, end) for start, end in gaps if end - start > PAUSE_S)


def _row(entry: dict[str, Any]) -> Row | None:
    needed = (entry.get("step"), entry.get("time_s"), entry.get("loss"))
    if not all(_is_number(value) for value in needed):
        return None
    held_out = entry.get("eval_loss")
    return Row(
        int(entry.get("attempt", 1)), int(entry["step"]), float(entry["time_s"]),
        float(entry["loss"]), float(held_out) if _is_number(held_out) else None,
        _figure(entry, "grad_norm"), _figure(entry, "lr"), _figure(entry, "tokens_per_s"),
        _figure(entry, "mfu"), {part: max(0.0, _figure(entry, f"{part}_s")) for part in PARTS},
        {str(name): float(w) for name, w in (entry.get("weights") or {}).items() if _is_number(w)},
        int(_figure(entry, "skipped_steps")),
    )  # fmt: skip


def _figure(entry: dict[str, Any], name: str) -> float:
    value = entry.get(name)
    return float(value) if _is_number(value) else 0.0


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _details(event: dict[str, Any]) -> str:
    rest = {key: value for key, value in event.items() if key not in ("time_s", "event")}
    return ", ".join(f"{key} {value}" for key, value in sorted(rest.items()))
