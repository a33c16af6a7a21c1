"""The run's recorder: hears the workers, writes the run's record, answers the driver.

Life: created by the run's driver under a name of the run; restarted by Ray if its process dies,
from the files it wrote (lost are the workers' addresses, until the next attempt, and figures that
storage had not taken). Exactly one exists per run, so attempts are numbered without gaps whatever
dies.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from eagleray.actors.trainer.non_finite import Poison
from eagleray.actors.trainer.step_row import StepRow
from eagleray.platform.clock import steady_time
from eagleray.platform.errors import StorageError
from eagleray.platform.runs import RunStatus, RunStore
from eagleray.platform.telemetry import (
    TRAIN_EVAL_LOSS,
    TRAIN_FAULTS,
    TRAIN_LOSS,
    TRAIN_MFU,
    TRAIN_RESTARTS,
    TRAIN_SKIPPED,
    TRAIN_SPENT,
    TRAIN_STEP,
    TRAIN_THROUGHPUT,
    TRAIN_WORKERS,
    NullSink,
    Sink,
)

logger = logging.getLogger(__name__)

_Told = TypeVar("_Told", "WorkerInfo", "Fatal")

_SKIPPED, _REWOUND, _WORKER, _FATAL = "batch_skipped", "rewound", "worker", "fatal"


@dataclass(frozen=True)
class WorkerInfo:
    """Where one worker of the current attempt runs."""

    rank: int
    pid: int
    host: str
    node_id: str


@dataclass(frozen=True)
class Fatal:
    """A failure that no retry can mend."""

    error: str
    what: str
    fix: str
    exit_code: int


@dataclass(frozen=True)
class RunView:
    """What the driver sees when it looks."""

    attempt: int
    start: int
    """Number of rows before these."""
    rows: tuple[StepRow, ...]
    """Rows that the caller does not have."""
    workers: tuple[WorkerInfo, ...]
    first_row_at: dict[int, float]
    """Attempt -> time of its first row, in seconds since the epoch."""
    fatal: Fatal | None = None


@dataclass
class _Memory:
    attempt: int = 0
    token: str = ""
    rows: list[StepRow] = field(default_factory=list)
    workers: dict[int, WorkerInfo] = field(default_factory=dict)
    first_row_at: dict[int, float] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    rewound: dict[int, Poison] = field(default_factory=dict)
    stop_reason: str | None = None
    fatal: Fatal | None = None


class RunRecorder:
    """The recorder of one run, without Ray.

    Args:
        runs: Where the record is kept.
        run_id: The run.
        clock: Seconds since the epoch.
        sink: Where its metrics go; None: nowhere.
        is_restarted: This process stands in for one that died in the same run, not for one of a
            driver before: its workers live, and what was fatal still is.
    """

    def __init__(
        self,
        runs: RunStore,
        run_id: str,
        clock: Callable[[], float] = steady_time,
        sink: Sink | None = None,
        *,
        is_restarted: bool = False,
    ) -> None:
        self._runs, self._run_id, self._clock = runs, run_id, clock
        self._sink = sink or NullSink()
        self._memory = _Memory()
        self._unwritten: deque[dict[str, Any]] = deque()
        self._is_stuck = False
        for event in runs.events(run_id):
            if event["event"] == "attempt":
                self._memory.attempt, self._memory.token = event["attempt"], event["token"]
                self._memory.workers.clear()
                self._memory.fatal = None
            elif event["event"] == _WORKER and is_restarted:
                self._memory.workers[event["rank"]] = _told(WorkerInfo, event)
            elif event["event"] == _FATAL and is_restarted:
                self._memory.fatal = _told(Fatal, event)
            elif event["event"] == _SKIPPED:
                self._memory.skipped.add(event["step"])
            elif event["event"] == _REWOUND:
                poison = Poison(event["step"], event["what"], float(event["value"]))
                self._memory.rewound[poison.step] = poison
        for kept in runs.metrics(run_id):
            time_s = kept.pop("time_s")
            self._remember(StepRow(**kept), time_s)

    def begin(self, world_size: int, token: str) -> int:
        """Number the attempt that rank 0 starts; the same token gets the same number."""
        memory = self._memory
        if token != memory.token:
            memory.attempt, memory.token = memory.attempt + 1, token
            memory.workers.clear()
            self._runs.add_event(
                self._run_id, "attempt", attempt=memory.attempt, world_size=world_size, token=token
            )
            self._sink.set(TRAIN_WORKERS, world_size, run=self._run_id)
            self._sink.add(TRAIN_RESTARTS, float(memory.attempt > 1), run=self._run_id)
        self._runs.update(self._run_id, status=RunStatus.RUNNING)
        return memory.attempt

    def join(self, attempt: int, worker: WorkerInfo) -> None:
        """Note where a worker of the current attempt runs."""
        if attempt == self._memory.attempt and self._memory.workers.get(worker.rank) != worker:
            self._memory.workers[worker.rank] = worker
            # A full disk must not keep a rank from training.
            with contextlib.suppress(StorageError):
                self._runs.add_event(self._run_id, _WORKER, attempt=attempt, **asdict(worker))

    def fatal(self) -> Fatal | None:
        """The failure of an earlier attempt that no retry can mend, if there was one."""
        return self._memory.fatal

    def report(self, row: StepRow) -> str | None:
        """Keep a row; a reason to stop after it, if somebody asked for that."""
        rows = self._memory.rows
        newest = rows[-1].step if rows and rows[-1].attempt == row.attempt else 0
        if row.attempt == self._memory.attempt and row.step > newest:
            now = self._clock()
            self._remember(row, now)
            self._unwritten.append({**asdict(row), "time_s": now})
            self._write_rows(row.step)
            self._measure(row)
        return self._memory.stop_reason

    def fault(self, message: str, ranks: list[int]) -> None:
        """Note that workers died or failed; the run goes on by itself or ends."""
        self._runs.add_event(
            self._run_id, "fault", attempt=self._memory.attempt, ranks=ranks, message=message
        )
        self._sink.add(TRAIN_FAULTS, run=self._run_id)

    def skipped(self, poison: Poison) -> None:
        """Note that the update of a step was skipped; a step that is done again counts once."""
        if poison.step not in self._memory.skipped:
            self._memory.skipped.add(poison.step)
            self._add_poison(_SKIPPED, poison)
            self._sink.add(TRAIN_SKIPPED, run=self._run_id)

    def rewound(self, poison: Poison, to_step: int) -> None:
        """Note that training went back to the state after `to_step` steps because of a step."""
        if poison.step not in self._memory.rewound:
            self._memory.rewound[poison.step] = poison
            self._add_poison(_REWOUND, poison, from_step=poison.step, to_step=to_step)

    def rewinds(self) -> list[Poison]:
        """What the run was rewound for, in any attempt."""
        return list(self._memory.rewound.values())

    def fail(self, fatal: Fatal) -> None:
        """Note a failure that no retry can mend; the first one counts."""
        if self._memory.fatal is None:
            self._memory.fatal = fatal
            self._runs.add_event(self._run_id, _FATAL, **asdict(fatal))

    def flush(self) -> None:
        """Try once more to write what storage did not take."""
        if self._unwritten:
            self._write_rows(int(self._unwritten[-1]["step"]))

    def request_stop(self, reason: str) -> None:
        """Let training stop, with a checkpoint, after its next row."""
        self._memory.stop_reason = reason

    def view(self, rows_seen: int) -> RunView:
        """The state now, with the rows that the caller has not seen."""
        memory = self._memory
        workers = tuple(memory.workers[rank] for rank in sorted(memory.workers))
        # A restarted recorder may have fewer rows than it had told of.
        start = min(rows_seen, len(memory.rows))
        return RunView(
            memory.attempt,
            start,
            tuple(memory.rows[start:]),
            workers,
            dict(memory.first_row_at),
            memory.fatal,
        )

    def event(self, event: str, details: dict[str, Any]) -> None:
        """Keep an event of another part of the run."""
        self._runs.add_event(self._run_id, event, **details)

    def _add_poison(self, event: str, poison: Poison, **details: int) -> None:
        step, what, value = poison.listed()
        logger.warning("%s: step=%d what=%r value=%s %s", event, step, what, value, details or "")
        self._runs.add_event(
            self._run_id, event, attempt=self._memory.attempt, step=step, what=what, value=value,
            **details,
        )  # fmt: skip

    def _write_rows(self, step: int) -> None:
        """Write what is not yet on storage; a run does not end because its figures find no room."""
        try:
            while self._unwritten:
                self._runs.add_metrics(self._run_id, self._unwritten[0])
                self._unwritten.popleft()
            self._runs.update(self._run_id, step=step)
        except StorageError as error:
            if not self._is_stuck:
                logger.warning("figures wait in memory until storage takes them: %s", error.what)
            self._is_stuck = True
        else:
            self._is_stuck = False

    def _remember(self, row: StepRow, time_s: float) -> None:
        self._memory.rows.append(row)
        self._memory.first_row_at.setdefault(row.attempt, time_s)

    def _measure(self, row: StepRow) -> None:
        sink, run = self._sink, self._run_id
        if row.loss is not None:
            sink.set(TRAIN_LOSS, row.loss, run=run)
        sink.set(TRAIN_THROUGHPUT, row.tokens_per_s, run=run)
        sink.set(TRAIN_MFU, row.mfu, run=run)
        sink.set(TRAIN_STEP, row.step, run=run)
        if row.eval_loss is not None:
            sink.set(TRAIN_EVAL_LOSS, row.eval_loss, run=run)
        for part in ("data", "compute", "communication", "checkpoint", "eval"):
            sink.add(TRAIN_SPENT, getattr(row, f"{part}_s"), run=run, part=part)


def _told(kind: type[_Told], event: dict[str, Any]) -> _Told:
    """What an event of these fields, and more, was made of."""
    return kind(**{name: event[name] for name in kind.__dataclass_fields__})
