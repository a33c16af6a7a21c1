"""A run's life worked out from its events and rows."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from eagleray.platform.report.history import History, read_history, read_rows
from eagleray.platform.runs import RunState, RunStatus


def row(attempt: int, step: int, time_s: float, **more: Any) -> dict[str, Any]:
    return {
        "attempt": attempt, "step": step, "time_s": time_s, "loss": 5.0, "eval_loss": None,
        "grad_norm": 1.0, "lr": 0.1, "tokens_per_s": 100.0, "mfu": 0.5, "data_s": 0.1,
        "compute_s": 0.8, "communication_s": 0.1, "checkpoint_s": 0.0, "eval_s": 0.0, **more,
    }  # fmt: skip


def event(kind: str, time_s: float, **details: Any) -> dict[str, Any]:
    return {"event": kind, "time_s": time_s, **details}


def attempt(number: int, time_s: float, workers: int = 2) -> dict[str, Any]:
    return event("attempt", time_s, attempt=number, world_size=workers)


def fault(number: int, time_s: float) -> dict[str, Any]:
    return event("fault", time_s, attempt=number, ranks=[1], message="rank 1: gone")


def checkpoint(step: int, time_s: float) -> dict[str, Any]:
    return event("checkpoint", time_s, step=step, digest="d")


def life(
    rows: list[dict[str, Any]],
    events: list[dict[str, Any]],
    status: RunStatus = RunStatus.FINISHED,
    updated_s: float = 0.0,
) -> History:
    state = RunState("r", "train", status, 0.0, updated_s)
    return read_history(state, read_rows(rows), events)


def test_a_fault_costs_the_time_to_the_next_row_and_the_steps_since_the_checkpoint() -> None:
    history = life(
        [row(1, 5, 10), row(1, 10, 20), row(1, 15, 30), row(2, 15, 60), row(2, 20, 70)],
        [attempt(1, 1), checkpoint(10, 21), fault(1, 33), attempt(2, 50), checkpoint(20, 71)],
    )
    [seen] = history.faults
    assert (seen.step, seen.steps_redone, seen.lost_s) == (15, 5, 30)
    assert [(a.start_step, a.last_step, a.num_rows) for a in history.attempts] == [
        (0, 15, 3), (10, 20, 2)
    ]  # fmt: skip
    assert history.attempts[0].end == "fault: rank 1: gone"
    assert history.attempts[1].end == "finished"
    assert [(r.attempt, r.step) for r in history.redone] == [(1, 15)]
    assert [r.step for r in history.kept] == [5, 10, 15, 20]


def test_survivors_that_go_on_without_a_snapshot_redo_nothing() -> None:
    history = life(
        [row(1, 10, 20), row(1, 15, 30), row(2, 20, 34)],
        [
            attempt(1, 1), event("start", 1, attempt=1, step=0), checkpoint(10, 21), fault(1, 31),
            attempt(2, 32), event("start", 32, attempt=2, step=15),
            event("recovery", 33, gathered_s=0.1, seated_s=0.2, stepped_s=0.7),
        ],
    )  # fmt: skip
    [seen] = history.faults
    assert (seen.steps_redone, seen.lost_s) == (0, 4)
    assert seen.phases == {"gathered_s": 0.1, "seated_s": 0.2, "stepped_s": 0.7}
    assert history.attempts[1].start_step == 15
    assert history.redone == ()
    assert history.notes == ()


def test_faults_without_a_row_between_them_share_the_stretch() -> None:
    history = life(
        [row(1, 5, 10), row(3, 5, 100)],
        [attempt(1, 1), fault(1, 12), attempt(2, 30), fault(2, 40), attempt(3, 60)],
    )
    first, second = history.faults
    assert (first.lost_s, second.lost_s) == (30, 60)
    assert first.steps_redone == 5
    assert second.steps_redone == 0


def test_a_fault_before_the_first_row_costs_from_its_attempts_start() -> None:
    history = life([row(2, 5, 50)], [attempt(1, 10), fault(1, 20), attempt(2, 30)])
    assert history.faults[0].lost_s == 40


def test_a_fault_that_nothing_followed_was_not_recovered() -> None:
    history = life([row(1, 5, 10)], [attempt(1, 1), fault(1, 12)], RunStatus.FAILED, 13)
    assert history.faults[0].lost_s is None
    assert history.ended_s == 13


def test_a_damaged_checkpoint_is_not_where_an_attempt_began() -> None:
    history = life(
        [row(1, 20, 10), row(2, 15, 40)],
        [
            attempt(1, 1), checkpoint(10, 5), checkpoint(20, 11), fault(1, 12),
            event("checkpoint_damaged", 20, message="step 20"), attempt(2, 30),
        ],
    )  # fmt: skip
    assert history.attempts[1].start_step == 10
    assert history.faults[0].steps_redone == 10
    assert [(n.event, n.text) for n in history.notes] == [("checkpoint_damaged", "message step 20")]


def test_the_night_between_a_stop_and_a_resume_is_no_wall_time() -> None:
    history = life(
        [row(1, 5, 10), row(2, 10, 40_020)],
        [attempt(1, 1), checkpoint(5, 11), attempt(2, 40_011)],
        updated_s=40_030,
    )
    assert history.clock.pauses == ((11, 40_011),)
    assert history.clock.at(5) == 5
    assert history.clock.at(20_000) == 11
    assert history.clock.at(history.ended_s) == 30
    assert history.attempts[0].end == "cut off: its driver ended"
    assert history.faults == ()


def test_a_pause_after_a_fault_is_not_counted_as_lost() -> None:
    history = life(
        [row(1, 5, 10), row(2, 10, 40_020)], [attempt(1, 1), fault(1, 12), attempt(2, 40_012)]
    )
    assert history.faults[0].lost_s == 10


def test_how_the_last_attempt_ended_is_the_runs_status() -> None:
    ends = {
        status: life([row(1, 5, 10)], [attempt(1, 1)], status, 50).attempts[0]
        for status in RunStatus
    }
    assert ends[RunStatus.STOPPED].end == "stopped"
    assert ends[RunStatus.RUNNING].ended_s == 50
    assert ends[RunStatus.FAILED].ended_s == 10
    fatal = event("fatal", 11, error="E", what="loss is nan", fix="", exit_code=1)
    assert life([], [attempt(1, 1), fatal], RunStatus.FAILED).attempts[0].end == (
        "fatal: loss is nan"
    )


def test_rows_and_events_that_make_no_sense_are_left_out() -> None:
    rows = [
        row(1, 5, 10, loss=float("nan")), {"step": 1}, row(1, 6, 12, eval_loss=float("inf")),
        row(1, 7, 11, mfu=None, compute_s=-1.0),
    ]  # fmt: skip
    history = life(rows, [{"event": "attempt"}, {"time_s": 3.0}, attempt(1, 1)])
    assert [r.step for r in history.rows] == [7, 6]
    assert history.rows[1].eval_loss is None
    assert history.rows[0].mfu == 0.0
    assert history.rows[0].parts_s["compute"] == 0.0
    assert len(history.attempts) == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=12))
def test_what_faults_cost_never_adds_up_to_more_than_there_was(
    lives: list[tuple[int, int]],
) -> None:
    rows, events, now, step = [], [], 0.0, 0
    for number, (reports, gap) in enumerate(lives, 1):
        events.append(attempt(number, now))
        for _ in range(reports):
            now, step = now + 5, step + 1
            rows.append(row(number, step, now))
        now += 1
        events.append(fault(number, now))
        now += gap
    history = life(rows, events, RunStatus.FAILED, now)
    assert len(history.faults) == len(lives)
    assert 0 <= sum(f.lost_s or 0 for f in history.faults) <= now
    assert len(history.kept) + len(history.redone) == len(rows)
    assert all(f.steps_redone >= 0 for f in history.faults)


def test_a_resize_ends_an_attempt_by_name_and_is_no_fault() -> None:
    resize = event("resize", 25, **{"from": 2, "to": 4, "message": "moved"})
    history = life(
        [row(1, 5, 10), row(1, 10, 20), row(2, 15, 30)],
        [attempt(1, 1), resize, attempt(2, 26, 4), event("start", 27, attempt=2, step=12)],
    )
    assert history.attempts[0].end == "resized: 2 -> 4 workers"
    assert (history.attempts[0].ended_s, history.attempts[1].start_step) == (25, 12)
    assert history.faults == ()
    assert history.notes == ()
    assert [r.step for r in history.kept] == [5, 10, 15]
