"""Metrics as declared, the sinks they go to, and the logging of a process."""

import importlib.util
import io
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagleray.actors.telemetry import RaySink, TotalsMeter
from eagleray.actors.trainer.recorder import RunRecorder
from eagleray.actors.trainer.step_row import StepRow
from eagleray.platform import telemetry
from eagleray.platform.runs import RunStore
from eagleray.platform.storage import Storage
from eagleray.platform.telemetry import (
    CACHE_LOOKUPS,
    METRICS,
    SERVE_TTFT,
    TRAIN_LOSS,
    TRAIN_STEP,
    Metric,
    MetricKind,
    NullSink,
    bind_log_context,
    configure_logging,
    log_context,
    redacted,
)


class MemorySink:
    """Remembers what it is given, and holds every use against the declaration."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], float] = {}

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        metric.check(MetricKind.COUNTER, labels)
        key = (metric.name, *labels.values())
        self.values[key] = self.values.get(key, 0.0) + amount

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        metric.check(MetricKind.GAUGE, labels)
        self.values[metric.name, *labels.values()] = value

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        metric.check(MetricKind.HISTOGRAM, labels)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger("eagleray")
    before = (list(root.handlers), root.level, root.propagate)
    yield
    for handler in set(root.handlers) - set(before[0]):
        handler.close()
    root.handlers[:], root.propagate = before[0], before[2]
    root.setLevel(before[1])


def logger() -> logging.Logger:
    return logging.getLogger("eagleray.actors.test")


def test_names_are_declared_once_and_follow_the_rule() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names)) > 20
    assert all(metric.about.endswith(".") for metric in METRICS)
    with pytest.raises(ValueError, match="not eagleray_<part>_<what>_<unit>"):
        Metric("train_loss", MetricKind.GAUGE, "No part.")
    with pytest.raises(ValueError, match="has buckets"):
        Metric("eagleray_a_b_seconds", MetricKind.HISTOGRAM, "No buckets.")


def test_a_use_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="is a gauge, it was used as a counter"):
        MemorySink().add(TRAIN_STEP, 1.0, run="r")
    with pytest.raises(ValueError, match=r"takes labels \['run'\], not \[\]"):
        MemorySink().set(TRAIN_LOSS, 1.0)


def test_the_server_shows_what_is_declared_here() -> None:
    metrics = pytest.importorskip("eagleray.serve.api.metrics")
    shown = [
        *(name for name, _ in metrics._GAUGES.values()),
        *(name for name, _ in metrics._COUNTERS.values()),
        "finished_requests", "responses", "ttft_seconds", "queue_seconds", "request_seconds",
        "tpot_seconds", "key_requests", "key_tokens", "key_compute_seconds",
    ]  # fmt: skip
    declared = {m.name for m in METRICS if m.name.startswith("eagleray_serve_")}
    assert declared == {f"eagleray_serve_{name}" for name in shown}
    texts = {m.name: m.about for m in METRICS}
    for name, about in [*metrics._GAUGES.values(), *metrics._COUNTERS.values()]:
        assert texts[f"eagleray_serve_{name}"] == about


def test_every_metric_is_documented() -> None:
    text = Path(__file__).parents[3].joinpath("docs/operations.md").read_text(encoding="utf-8")
    assert [m.name for m in METRICS if f"`{m.name}`" not in text] == []


def test_declaring_metrics_needs_neither_ray_nor_torch() -> None:
    spec = importlib.util.find_spec("eagleray.platform.telemetry")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    assert "import ray" not in source
    assert "import torch" not in source


def test_the_recorder_measures_what_it_records(tmp_path: Path) -> None:
    runs, sink = RunStore(Storage(tmp_path)), MemorySink()
    run = runs.create("r", "train", {})
    recorder = RunRecorder(runs, run, sink=sink)
    recorder.begin(2, "a")
    recorder.report(StepRow(1, 5, 6.5, 1.0, 0.1, 900.0, 0.3, 1, 2, 3, 0, 0))
    recorder.report(StepRow(1, 5, 6.5, 1.0, 0.1, 900.0, 0.3, 1, 2, 3, 0, 0))  # asked again
    recorder.fault("rank 1: gone", [1])
    recorder.begin(1, "b")
    recorder.begin(1, "b")
    recorder.report(StepRow(2, 10, 6.0, 1.0, 0.1, 500.0, 0.2, 1, 2, 3, 0, 1, eval_loss=6.25))
    recorder.report(StepRow(1, 9, 1.0, 1.0, 0.1, 1.0, 1.0, 9, 9, 9, 9, 9))  # of a dead attempt
    values = sink.values
    assert values["eagleray_train_loss_nats", run] == 6.0
    assert values["eagleray_train_eval_loss_nats", run] == 6.25
    assert values["eagleray_train_progress_steps", run] == 10
    assert values["eagleray_train_throughput_tokens_per_second", run] == 500.0
    assert values["eagleray_train_mfu_ratio", run] == 0.2
    assert values["eagleray_train_group_workers", run] == 1
    assert values["eagleray_train_group_restarts", run] == 1
    assert values["eagleray_train_worker_faults", run] == 1
    assert values["eagleray_train_spent_seconds", run, "compute"] == 4
    assert values["eagleray_train_spent_seconds", run, "eval"] == 1


def test_totals_become_counters() -> None:
    sink = MemorySink()
    meter = TotalsMeter(sink)
    for total in (3, 3, 10):
        meter.reach(CACHE_LOOKUPS, total, result="hit")
    meter.reach(CACHE_LOOKUPS, 2, result="miss")
    meter.reach(CACHE_LOOKUPS, 1, result="miss")  # a total that fell is one that began anew
    assert sink.values == {
        ("eagleray_cache_block_lookups", "hit"): 10, ("eagleray_cache_block_lookups", "miss"): 2
    }  # fmt: skip


def test_rays_sink_hands_each_kind_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    class Fake:
        def __init__(self, kind: str, name: str, *rest: Any) -> None:
            calls.append((kind, name, rest[1:]))
            self.name = name

        def inc(self, value: float, tags: dict[str, str]) -> None:
            calls.append((self.name, value, tags))

        set = observe = inc

    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(
            f"eagleray.actors.telemetry.{kind}",
            lambda name, *rest, kind=kind: Fake(kind, name, *rest),
        )
    sink = RaySink()
    sink.add(CACHE_LOOKUPS, 2.0, result="hit")
    sink.add(CACHE_LOOKUPS, 0.0, result="hit")
    sink.add(CACHE_LOOKUPS, result="miss")
    sink.set(TRAIN_LOSS, 6.5, run="r")
    sink.observe(SERVE_TTFT, 0.2)
    assert calls == [
        ("Counter", "eagleray_cache_block_lookups", (("result",),)),
        ("eagleray_cache_block_lookups", 2.0, {"result": "hit"}),
        ("eagleray_cache_block_lookups", 1.0, {"result": "miss"}),
        ("Gauge", "eagleray_train_loss_nats", (("run",),)),
        ("eagleray_train_loss_nats", 6.5, {"run": "r"}),
        ("Histogram", "eagleray_serve_ttft_seconds", (list(SERVE_TTFT.buckets), ())),
        ("eagleray_serve_ttft_seconds", 0.2, {}),
    ]
    with pytest.raises(ValueError, match="labels"):
        sink.add(CACHE_LOOKUPS, run="r")


def test_nothing_happens_in_the_null_sink() -> None:
    sink = NullSink()
    sink.add(CACHE_LOOKUPS, result="hit")
    sink.set(TRAIN_LOSS, 1.0, run="r")
    sink.observe(SERVE_TTFT, 1.0)
    assert vars(sink) == {}


def test_records_say_what_they_are_about() -> None:
    stream = io.StringIO()
    configure_logging(verbose=True, stream=stream)
    logger().info("plain")
    with log_context(run="sotu-7f3k", rank=1):
        with log_context(step=4, attempt=2):
            logger().warning("slow step_s=%.1f", 2.5)
        logger().debug("after")
    lines = [line.partition(" ")[2] for line in stream.getvalue().splitlines()]
    assert lines == [
        "INFO actors.test: plain",
        "WARNING actors.test run=sotu-7f3k rank=1 attempt=2 step=4: slow step_s=2.5",
        "DEBUG actors.test run=sotu-7f3k rank=1: after",
    ]


def test_what_is_bound_stays_for_its_thread_alone() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream)

    def work() -> None:
        bind_log_context(run="r", rank=0)
        bind_log_context(step=7)
        logger().warning("in")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    logger().warning("out")
    first, second = stream.getvalue().splitlines()
    assert first.endswith("actors.test run=r rank=0 step=7: in")
    assert second.endswith("actors.test: out")


def test_only_what_someone_must_act_on_is_shown_by_default() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream)
    logger().info("state")
    logger().warning("act")
    assert stream.getvalue().count("\n") == 1


def test_configuring_again_replaces_what_was_configured(tmp_path: Path) -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging(stream=first, json_file=tmp_path / "log.jsonl")
    configure_logging(stream=second)
    logger().warning("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


def test_json_lines_carry_context_and_exceptions(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "run.jsonl"
    configure_logging(stream=io.StringIO(), json_file=file)
    with log_context(run="r", attempt=1):
        logger().info("checkpoint step=%d", 10)
        try:
            raise OSError("redis://u:hunter2@h/0 is down")
        except OSError:
            logger().exception("lost")
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert {key: first[key] for key in ("level", "message", "run", "attempt", "logger")} == {
        "level": "INFO", "message": "checkpoint step=10", "run": "r", "attempt": 1,
        "logger": "eagleray.actors.test",
    }  # fmt: skip
    assert first["time"].endswith("+00:00")
    assert "OSError" in second["exception"]
    assert "hunter2" not in file.read_text()


def test_a_log_file_does_not_grow_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "_FILE_BYTES", 2000)
    configure_logging(stream=io.StringIO(), json_file=tmp_path / "log.jsonl")
    for number in range(300):
        logger().info("event number=%d", number)
    files = list(tmp_path.iterdir())
    assert len(files) == 4
    assert all(file.stat().st_size <= 2000 for file in files)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://user:pw@host:1/0", "redis://**********@host:1/0"),
        ("Authorization: Bearer abc.def-ghi", "Authorization: Bearer **********"),
        ("key er-AbCd_efgh-0123456789 used", "key ********** used"),
        ("http://host/a@b and me@host", "http://host/a@b and me@host"),
        ("layer-0123456789abcdef0123", "layer-0123456789abcdef0123"),
    ],
)
def test_secrets_are_masked(text: str, shown: str) -> None:
    assert redacted(text) == shown


def test_tracebacks_are_masked_too() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream)
    try:
        raise ValueError("rediss://:hunter2@h")
    except ValueError:
        logger().exception("failed")
    assert "Traceback" in stream.getvalue()
    assert "hunter2" not in stream.getvalue()
