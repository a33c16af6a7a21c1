"""The tables of a page: what the pictures show, in figures."""

from collections.abc import Callable
from dataclasses import dataclass

from eagleray.platform.report.facts import RunFacts
from eagleray.platform.report.history import PARTS, History, Row
from eagleray.platform.report.trials import TrialStory, best_trial, ranked
from eagleray.platform.report.wording import duration, loss_text, number, parameter, percent

_MAX_ROWS = 400
_MAX_TRIALS = 1000
_DECIMALS = 4


@dataclass(frozen=True)
class Column:
    """A column; numbers are aligned to the right."""

    title: str
    is_number: bool = True
    is_digest: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of texts; `marked` rows stand out."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    is_folded: bool = False
    marked: frozenset[int] = frozenset()


def run_tables(facts: RunFacts) -> list[Table]:
    """Faults, attempts, checkpoints, other events, and the figures of every report."""
    history = facts.history
    made = [_faults(history), _attempts(history), _checkpoints(history), _notes(history)]
    return [table for table in [*made, _figures(history)] if table.rows]


def trial_table(facts: RunFacts) -> list[Table]:
    """The trials, best first."""
    trials = ranked(facts.trials)
    best = best_trial(facts.trials)
    names = sorted({name for trial in trials for name in trial.params})
    columns = (
        Column("trial"), Column("run", False), Column("end", False), Column("steps"),
        Column("held-out loss"),
        *(Column(name.rpartition(".")[2], _is_numeric(trials, name)) for name in names),
        Column("took"),
    )  # fmt: skip
    shown = trials[:_MAX_TRIALS]
    rows = tuple(_trial(trial, names) for trial in shown)
    left_out = len(trials) - len(shown)
    note = f"{left_out} more are in the sweep's events." if left_out else ""
    marked = frozenset({0} if best else set())
    tables = [Table("trials", "Trials", columns, rows, note, marked=marked)]
    return [table for table in [*tables, _notes(facts.history)] if table.rows]


def _trial(trial: TrialStory, names: list[str]) -> tuple[str, ...]:
    return (
        str(trial.number), trial.run_id, trial.status, str(trial.steps),
        loss_text(trial.value, _DECIMALS),
        *(parameter(trial.params[name]) if name in trial.params else "" for name in names),
        duration(trial.seconds),
    )  # fmt: skip


def _is_numeric(trials: list[TrialStory], name: str) -> bool:
    values = [trial.params[name] for trial in trials if name in trial.params]
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def _faults(history: History) -> Table:
    at = history.clock.at
    columns = (
        Column("fault"), Column("at"), Column("attempt"), Column("step"), Column("ranks", False),
        Column("what", False), Column("steps redone"), Column("lost"), Column("recovery", False),
    )  # fmt: skip
    rows = tuple(
        (
            str(f.number), duration(at(f.time_s)), str(f.attempt), str(f.step),
            ", ".join(map(str, f.ranks)), f.message, str(f.steps_redone),
            "not recovered" if f.lost_s is None else duration(f.lost_s),
            ", ".join(f"{name.removesuffix('_s')} {s:.2f} s" for name, s in f.phases.items()),
        )
        for f in history.faults
    )  # fmt: skip
    note = (
        "Lost: from the last report before a fault to the first one after it. Recovery: since it "
        "was noticed, until the survivors had returned, all had a process, had met, had the state, "
        "had done a step; each since the one before."
    )
    return Table("faults", "Faults and recovery", columns, rows, note)


def _attempts(history: History) -> Table:
    at = history.clock.at
    columns = (
        Column("attempt"), Column("begun"), Column("lasted"), Column("workers"),
        Column("from step"), Column("to step"), Column("reports"), Column("end", False),
    )  # fmt: skip
    rows = tuple(
        (
            str(a.number), duration(at(a.begun_s)), duration(a.ended_s - a.begun_s),
            str(a.world_size), str(a.start_step), str(a.last_step), str(a.num_rows), a.end,
        )
        for a in history.attempts
    )  # fmt: skip
    return Table("attempts", "Attempts", columns, rows)


def _checkpoints(history: History) -> Table:
    at = history.clock.at
    columns = (Column("step"), Column("committed"), Column("manifest", False, True))
    picked, note = _picked(len(history.checkpoints))
    rows = tuple(
        (str(c.step), duration(at(c.time_s)), c.digest)
        for c in (history.checkpoints[i] for i in picked)
    )
    return Table("checkpoints", "Checkpoints", columns, rows, note, is_folded=True)


def _notes(history: History) -> Table:
    at = history.clock.at
    columns = (Column("at"), Column("event", False), Column("what", False))
    rows = tuple((duration(at(n.time_s)), n.event, n.text) for n in history.notes[-_MAX_ROWS:])
    return Table("events", "Other events", columns, rows)


def _figures(history: History) -> Table:
    at = history.clock.at
    columns: list[tuple[Column, Callable[[Row], str]]] = [
        (Column("step"), lambda row: str(row.step)),
        (Column("at"), lambda row: duration(at(row.time_s))),
        (Column("attempt"), lambda row: str(row.attempt)),
        (Column("loss"), lambda row: loss_text(row.loss, _DECIMALS)),
        (Column("held-out"), lambda row: loss_text(row.eval_loss, _DECIMALS)),
        (Column("grad norm"), lambda row: number(row.grad_norm)),
        (Column("lr"), lambda row: number(row.lr)),
        (Column("tokens/s"), lambda row: f"{row.tokens_per_s:,.0f}"),
        (Column("MFU"), lambda row: percent(row.mfu)),
        *((Column(part), _part_of(part)) for part in PARTS),
    ]
    picked, note = _picked(len(history.rows))
    rows = tuple(tuple(show(history.rows[i]) for _, show in columns) for i in picked)
    titles = tuple(column for column, _ in columns)
    return Table("figures", "Figures of every report", titles, rows, note, is_folded=True)


def _part_of(part: str) -> Callable[[Row], str]:
    return lambda row: duration(row.parts_s[part])


def _picked(count: int) -> tuple[list[int], str]:
    """Which of many rows are listed, and a note if not all are."""
    every = -(-count // _MAX_ROWS) if count else 1
    picked = list(range(0, count, every))
    if count and picked[-1] != count - 1:
        picked.append(count - 1)
    return picked, f"Every {every}th of {count:,}." if every > 1 else ""
