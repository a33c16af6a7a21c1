"""Charts as data, and the pictures made of them."""

import re
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from eagleray.platform.report.chart import (
    NARROW,
    WIDE,
    Chart,
    Dot,
    LegendItem,
    Line,
    Mark,
    Point,
    draw,
    hover_data,
)
from eagleray.platform.report.history import History, read_history, read_rows
from eagleray.platform.report.run_charts import run_charts
from eagleray.platform.report.scales import LinearScale
from eagleray.platform.report.sweep_charts import sweep_charts
from eagleray.platform.report.timeline import SIZES, draw_timeline, make_timeline, timeline_hover
from eagleray.platform.report.trials import TrialStory
from eagleray.platform.runs import RunState, RunStatus

CHART = Chart(
    "c", "Loss <b>", "nats", "It falls & rests.", LinearScale(0, 10), LinearScale(0, 1),
    lines=(Line("train", "train", (Point(0, 1, "step 0"), Point(10, 0, "step 10"))),),
    dots=(Dot(9.9, 0.5, "trial best", "trial 3", "best"), Dot(50, 7, "trial cut")),
    marks=(Mark(5, "fault", "rank 1 <script>", "fault 1"), Mark(5.1, "fault", "again", "fault 2"),
           Mark(3, "checkpoint", "checkpoint")),
    legend=(LegendItem("train", "train"),),
)  # fmt: skip


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def found(svg: str, name: str, **attributes: str) -> list[ElementTree.Element]:
    return [
        one for one in parsed(svg).iter(name)
        if all(one.get(key.rstrip("_")) == value for key, value in attributes.items())
    ]  # fmt: skip


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=lambda size: size.name)
def test_a_picture_is_well_formed_named_and_within_its_bounds(size: Any) -> None:
    svg = draw(CHART, size)
    root = parsed(svg)
    names = (root.get("aria-labelledby") or "").split()
    ids = {one.get("id"): one.text for one in root.iter() if one.get("id")}
    assert [ids[name] for name in names] == ["Loss <b> (nats)", "It falls & rests."]
    for one in root.iter("circle"):
        assert 0 <= float(one.get("cx") or -1) <= size.width
        assert 0 <= float(one.get("cy") or -1) <= size.height


def test_what_a_run_says_is_text_in_a_picture_not_markup() -> None:
    svg = draw(CHART, WIDE)
    assert "<script" not in svg
    assert "<b>" not in svg
    assert hover_data(CHART)["marks"][0] == [0.5, "rank 1 <script>"]


def test_labels_of_marks_do_not_overlap() -> None:
    texts = [one.text for one in found(draw(CHART, WIDE), "text", class_="mark-label fault")]
    assert texts == ["fault 1"]


def test_hovering_knows_every_point_in_positions_between_0_and_1() -> None:
    series = hover_data(CHART)["series"]
    assert series[0]["points"] == [[0.0, 1.0, "step 0"], [1.0, 0.0, "step 10"]]
    assert series[1]["points"][0] == [0.99, 0.5, "trial 3"]


def raw_row(attempt: int, step: int, time_s: float, **more: Any) -> dict[str, Any]:
    return {
        "attempt": attempt, "step": step, "time_s": time_s, "loss": 9.0 - step / 100,
        "grad_norm": 1.0, "lr": 0.1, "tokens_per_s": 100.0, "mfu": 0.25, "data_s": 0.1,
        "compute_s": 0.8, "communication_s": 0.1, "checkpoint_s": 0.0, "eval_s": 0.0, **more,
    }  # fmt: skip


STATE = RunState("r", "train", RunStatus.FINISHED, 0.0, 1000.0, 200, 200)


def faulty(rows_per_attempt: int = 10) -> History:
    n = rows_per_attempt
    rows = [raw_row(1, i, 10.0 + i, eval_loss=8.0) for i in range(1, n + 1)]
    rows += [raw_row(2, n // 2 + i, 60.0 + n + i) for i in range(1, n + 1)]
    events = [
        {"event": "attempt", "time_s": 10.0, "attempt": 1, "world_size": 2},
        {"event": "checkpoint", "time_s": 10.0 + n, "step": n // 2, "digest": "d"},
        {"event": "fault", "time_s": 12.0 + n, "attempt": 1, "ranks": [1], "message": "gone"},
        {"event": "attempt", "time_s": 60.0 + n, "attempt": 2, "world_size": 1},
    ]
    return read_history(STATE, read_rows(rows), events)


def test_a_run_has_six_charts_with_its_fault_in_each() -> None:
    charts = run_charts(faulty(), 0)
    assert [chart.name for chart in charts] == [
        "loss", "throughput", "gradient", "mfu", "rate", "split"
    ]  # fmt: skip
    assert all("fault 1" in [mark.label for mark in chart.marks] for chart in charts)
    loss, throughput = charts[0], charts[1]
    assert [line.name for line in loss.lines] == ["attempt 1, redone", "train", "held-out"]
    assert [point.x for point in loss.lines[0].points] == [6, 7, 8, 9, 10]
    assert [mark.style for mark in throughput.marks] == ["fault", "restart", "checkpoint"]
    assert [(band.x0, band.x1) for band in throughput.bands] == [(22.0, 70.0)]
    assert "from 8.990 at step 1 to 8.850 at step 15" in loss.about


def test_weights_that_follow_the_losses_are_drawn_where_they_were_decided() -> None:
    rows = [raw_row(1, step, 10.0 + step) for step in range(1, 9)]
    for row in rows[3::4]:
        row["weights"] = {"old": 0.25, "new <b>": 0.75}
    rows[1]["weights"] = {"old": "much", "new <b>": float("nan")}
    chart = run_charts(read_history(STATE, read_rows(rows), []), 0)[-1]
    assert chart.name == "weights"
    assert [(line.name, [point.x for point in line.points]) for line in chart.lines] == [
        ("old", [4, 8]),
        ("new <b>", [4, 8]),
    ]
    assert chart.legend[1] == LegendItem("domain-1", "new <b>", "75 %")
    assert "new <b> 75 %" in chart.about
    parsed(draw(chart, WIDE))


def test_shares_of_time_add_up_and_bars_do_not_overlap() -> None:
    split = run_charts(faulty(), 0)[-1]
    for bar in split.bars:
        assert abs(sum(height for _, height in bar.parts) - 1) < 1e-9
    ends = [(bar.x0, bar.x1) for bar in split.bars]
    assert all(one[1] <= other[0] for one, other in pairwise(ends))
    assert split.legend[0] == LegendItem("compute", "compute", "80 %")


def test_a_long_run_makes_no_longer_page() -> None:
    charts = run_charts(faulty(5000), 0)
    assert all(len(line.points) <= 330 for chart in charts for line in chart.lines)
    assert len(charts[-1].bars) <= 125


def test_a_run_that_goes_on_shows_the_way_ahead() -> None:
    assert run_charts(faulty(), 4000)[0].x == run_charts(faulty(), 4000)[2].x
    assert run_charts(faulty(), 4000)[0].x.at(4000) == 1.0
    assert run_charts(read_history(STATE, (), []), 10) == []


def test_the_timeline_tells_a_runs_life_in_order() -> None:
    line = make_timeline(STATE, faulty())
    assert line is not None
    ordered = sorted(line.segments, key=lambda segment: segment.start)
    assert [s.label for s in ordered] == [
        "start-up", "attempt 1, 2 workers", "no workers", "attempt 2, 1 worker", "end"
    ]  # fmt: skip
    assert ordered[0].start == 0
    assert all(a.end <= b.start + 1e-9 for a, b in pairwise(ordered))
    for size in SIZES:
        svg = draw_timeline(line, size)
        assert len(found(svg, "rect")) == 5
        assert found(svg, "text", class_="mark-label fault")[0].text == "fault 1"
    assert timeline_hover(line)["segments"][0][:2] == [0.0, 0.01]
    assert make_timeline(STATE, read_history(STATE, (), [])) is None


def trial(number: int, values: dict[int, float], status: str, **params: Any) -> TrialStory:
    return TrialStory(number, f"run-{number}", params, 0.0, 1.0, status, values)


TRIALS = [
    trial(0, {10: 5.0, 20: 4.0}, "finished", lr=1e-3, kind="a", size=2),
    trial(1, {10: 4.8, 20: 3.5}, "finished", lr=1e-2, kind="b", size=4),
    trial(2, {10: 7.0}, "pruned", lr=1e-1, kind="a", size=8),
    trial(3, {10: 900.0}, "diverged", lr=1.0, kind="c", size=8),
    trial(4, {}, "running", lr=1e-4, kind="a", size=1),
]
SPACE = {
    "lr": {"kind": "float", "low": 1e-4, "high": 1.0, "log": True},
    "kind": {"kind": "choice", "values": ["a", "b"]},
    "size": {"kind": "int", "low": 1, "high": 8},
}


def test_a_sweep_has_curves_progress_and_a_scatter_for_each_parameter() -> None:
    charts = sweep_charts(TRIALS, SPACE)
    assert [chart.title for chart in charts] == [
        "Value over steps", "Search progress", "kind", "lr", "size"
    ]  # fmt: skip
    curves, progress, kind, lr, size = charts
    assert [line.style for line in curves.lines] == ["cut", "cut", "full", "best"]
    assert [point.y for point in progress.lines[0].points] == [4.0, 4.0, 3.5, 3.5, 3.5, 3.5, 3.5]
    assert lr.unit == "lr (log)"
    assert abs(lr.x.at(1e-2) - 0.5) < 1e-9
    assert [tick.label for tick in kind.x.ticks(9)] == ["a", "b", "c"]
    assert [dot.label for dot in size.dots] == ["", "", "", "best"]
    assert size.dots[-1].x == 4


def test_values_after_fewer_steps_stand_apart_at_the_edge() -> None:
    lr = sweep_charts(TRIALS, SPACE)[3]
    cut = [dot for dot in lr.dots if dot.style == "trial cut"]
    assert len(cut) == 2
    assert {lr.y.at(dot.y) for dot in cut} == {1.0}
    assert LegendItem("cut", "stopped earlier", "2") in lr.legend
    assert any("7.000" in dot.text for dot in cut)


def test_one_diverged_value_does_not_flatten_all_curves() -> None:
    trials = [trial(n, {10: 3.0 + n / 10}, "finished", lr=n) for n in range(10)]
    trials.append(trial(10, {10: 1e6}, "finished", lr=10))
    scale = sweep_charts(trials, {})[0].y
    assert scale.at(3.9) > 0.5


def test_a_sweep_of_many_trials_stays_readable() -> None:
    trials = [trial(n, {10: 3.0 + n}, "finished", lr=float(n)) for n in range(2000)]
    curves, progress, lr = sweep_charts(trials, {})
    assert len(curves.lines) == 80
    assert curves.note == "The best 80 of 2000 trials."
    assert len(progress.dots) == len(lr.dots) == 600


def test_a_sweep_without_values_has_no_charts() -> None:
    assert sweep_charts([TRIALS[4]], SPACE) == []
    assert sweep_charts([trial(0, {5: 3.0}, "diverged", lr=1.0)], SPACE) == []


def test_pictures_are_numbers_of_a_tenth_of_a_pixel() -> None:
    assert not re.search(r"\d\.\d\d", draw(run_charts(faulty(), 0)[0], WIDE).partition("<g")[2])
