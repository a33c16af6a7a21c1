"""Every metric declared, the sink they go to, and the logging of a process.

Metrics are data: `eagleray_<part>_<what>_<unit>`, where a counter's unit is the noun it counts.
Whoever measures is given a `Sink` and names a metric of this file; tests give a sink that
remembers, actors the one of `actors/telemetry.py`. The server keeps a registry of its own for
`/metrics`, whose names and texts stand here too.

Logging: one event per line, values as key=value; run, rank, attempt and step are added by a filter
from what `log_context` or `bind_log_context` said. A new thread starts without them.
"""

import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Protocol, TextIO

_NAME = re.compile(r"^eagleray_[a-z]+(_[a-z0-9]+)+$")
_SECRET = re.compile(
    r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)[^\s/@]+@|(?P<bearer>\bbearer\s+)[^\s,;'\"]+"
    r"|\ber-[A-Za-z0-9_-]{16,}",
    re.IGNORECASE,
)
_ROOT = "eagleray"
_FILE_BYTES, _FILES_KEPT = 10_000_000, 3
MASK = "**********"


class MetricKind(StrEnum):
    """How a metric moves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric:
    """A declared metric.

    Raises:
        ValueError: The name breaks the rule, or a histogram has no buckets.
    """

    name: str
    kind: MetricKind
    about: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.match(self.name):
            raise ValueError(f"metric {self.name!r} is not eagleray_<part>_<what>_<unit>")
        if (self.kind is MetricKind.HISTOGRAM) != bool(self.buckets):
            raise ValueError(f"metric {self.name}: a histogram, and nothing else, has buckets")

    def check(self, kind: MetricKind, labels: dict[str, str]) -> None:
        """Refuse a use that does not fit the declaration.

        Raises:
            ValueError: Another kind, or other labels.
        """
        if kind is not self.kind:
            raise ValueError(f"metric {self.name} is a {self.kind}, it was used as a {kind}")
        if set(labels) != set(self.labels):
            raise ValueError(
                f"metric {self.name} takes labels {sorted(self.labels)}, not {sorted(labels)}"
            )


_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
_RUN = ("run",)

TRAIN_LOSS = Metric(
    "eagleray_train_loss_nats", _GAUGE, "Training loss per token since the report before.", _RUN
)
TRAIN_EVAL_LOSS = Metric(
    "eagleray_train_eval_loss_nats", _GAUGE, "Loss per token on held-out documents.", _RUN
)
TRAIN_THROUGHPUT = Metric(
    "eagleray_train_throughput_tokens_per_second", _GAUGE, "Tokens trained, over all ranks.", _RUN
)
TRAIN_MFU = Metric(
    "eagleray_train_mfu_ratio", _GAUGE, "Share of the peak of a plain matrix product.", _RUN
)
TRAIN_STEP = Metric("eagleray_train_progress_steps", _GAUGE, "Optimizer steps done.", _RUN)
TRAIN_WORKERS = Metric("eagleray_train_group_workers", _GAUGE, "Workers of the attempt.", _RUN)
TRAIN_RESTARTS = Metric(
    "eagleray_train_group_restarts", _COUNTER, "Attempts after the first one.", _RUN
)
TRAIN_FAULTS = Metric(
    "eagleray_train_worker_faults", _COUNTER, "Times that workers died or failed.", _RUN
)
TRAIN_SKIPPED = Metric(
    "eagleray_train_skipped_steps", _COUNTER, "Steps whose update was skipped: not finite.", _RUN
)
TRAIN_SPENT = Metric(
    "eagleray_train_spent_seconds",
    _COUNTER,
    "Time of rank 0 by part: compute, communication, data, checkpoint, eval.",
    ("run", "part"),
)
DATA_BATCHES = Metric(
    "eagleray_data_served_batches", _COUNTER, "Batches asked for; ready: read ahead.", ("ready",)
)
DATA_WAIT = Metric(
    "eagleray_data_wait_seconds", _COUNTER, "Time that callers of a loader waited for batches."
)
DATA_READ = Metric("eagleray_data_read_seconds", _COUNTER, "Time that loaders read, in all.")
CACHE_LOOKUPS = Metric(
    "eagleray_cache_block_lookups", _COUNTER, "Blocks asked of the feature cache.", ("result",)
)
CACHE_LEVEL_LOOKUPS = Metric(
    "eagleray_cache_level_lookups",
    _COUNTER,
    "Values asked of a level of the feature cache: l1 memory, l2 Redis, l3 disk.",
    ("level", "result"),
)
CACHE_LEVEL_READ = Metric(
    "eagleray_cache_level_read_bytes", _COUNTER, "Bytes that a level gave.", ("level",)
)
CACHE_LEVEL_SPENT = Metric(
    "eagleray_cache_level_spent_seconds", _COUNTER, "Time of a level's look-ups.", ("level",)
)
CACHE_LEVEL_CALLS = Metric(
    "eagleray_cache_level_calls", _COUNTER, "Look-ups of a level, of many values each.", ("level",)
)
CACHE_LEVEL_EVICTIONS = Metric(
    "eagleray_cache_level_evictions", _COUNTER, "Segments that were removed for room.", ("level",)
)
CACHE_LEVEL_LATE = Metric(
    "eagleray_cache_level_late", _COUNTER, "Look-ups that were not waited for.", ("level",)
)
SERVE_RUNNING = Metric(
    "eagleray_serve_running_requests", _GAUGE, "Requests that are decoded together."
)
SERVE_WAITING = Metric("eagleray_serve_waiting_requests", _GAUGE, "Requests without a seat.")
SERVE_BLOCKS = Metric("eagleray_serve_kv_blocks", _GAUGE, "KV blocks in the pool.")
SERVE_FREE_BLOCKS = Metric("eagleray_serve_kv_free_blocks", _GAUGE, "KV blocks that nobody holds.")
SERVE_KEPT_BLOCKS = Metric(
    "eagleray_serve_kv_kept_blocks", _GAUGE, "Those of them that hold a prefix for later requests."
)
SERVE_PREEMPTIONS = Metric(
    "eagleray_serve_preemptions", _COUNTER, "Requests that lost their blocks to an older one."
)
SERVE_STEPS = Metric("eagleray_serve_steps", _COUNTER, "Forward passes.")
SERVE_FAILED_STEPS = Metric("eagleray_serve_failed_steps", _COUNTER, "Forward passes that raised.")
SERVE_COMPUTED = Metric(
    "eagleray_serve_computed_tokens", _COUNTER, "Tokens that went through the model."
)
SERVE_REUSED = Metric(
    "eagleray_serve_reused_tokens", _COUNTER, "Tokens of which an earlier request had left keys."
)
SERVE_GUESSED = Metric(
    "eagleray_serve_guessed_tokens", _COUNTER, "Tokens that were computed before they were drawn."
)
SERVE_TAKEN = Metric(
    "eagleray_serve_taken_tokens", _COUNTER, "Guessed tokens that were then drawn."
)
SERVE_OUTPUT = Metric("eagleray_serve_output_tokens", _COUNTER, "Tokens that were sampled.")
SERVE_FINISHED = Metric(
    "eagleray_serve_finished_requests", _COUNTER, "Requests that ended, by reason.", ("reason",)
)
SERVE_RESPONSES = Metric(
    "eagleray_serve_responses", _COUNTER, "Answers by route and HTTP status.", ("route", "status")
)
SERVE_KEY_REQUESTS = Metric(
    "eagleray_serve_key_requests", _COUNTER, "Requests that ended, by key.", ("key",)
)
SERVE_KEY_TOKENS = Metric(
    "eagleray_serve_key_tokens", _COUNTER, "Tokens by key and kind.", ("key", "kind")
)
SERVE_KEY_COMPUTE = Metric(
    "eagleray_serve_key_compute_seconds",
    _COUNTER,
    "Each key's part of the engine's time, by tokens.",
    ("key",),
)
SERVE_TTFT = Metric(
    "eagleray_serve_ttft_seconds", _HISTOGRAM, "Seconds to the first token.", (), _LATENCY_S
)
SERVE_QUEUE = Metric(
    "eagleray_serve_queue_seconds", _HISTOGRAM, "Seconds before the first step.", (), _LATENCY_S
)
SERVE_REQUEST = Metric(
    "eagleray_serve_request_seconds", _HISTOGRAM, "Seconds from arrival to the end.", (), _LATENCY_S
)
SERVE_TPOT = Metric(
    "eagleray_serve_tpot_seconds", _HISTOGRAM, "Seconds per token after the first.", (), _TOKEN_S
)

METRICS: tuple[Metric, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)
"""Every metric there is, in the order in which data flows."""


class Sink(Protocol):
    """Where measurements go.

    Laws: safe for several threads; returns at once; raises only when the use does not fit the
    metric's declaration, which is a fault of ours.
    """

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Let a counter grow; an amount of 0 is nothing."""
        ...

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Put a gauge to a value."""
        ...

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Count a value in a histogram."""
        ...


class NullSink:
    """Takes everything and keeps nothing."""

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Nothing."""

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Nothing."""

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Nothing."""


@dataclass(frozen=True)
class LogContext:
    """What a log record is about."""

    run: str | None = None
    rank: int | None = None
    attempt: int | None = None
    step: int | None = None

    def known(self) -> dict[str, Any]:
        """The fields that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}


_NOTHING_KNOWN = LogContext()
_context: ContextVar[LogContext] = ContextVar("eagleray_log_context", default=_NOTHING_KNOWN)


@contextmanager
def log_context(**fields: Any) -> Iterator[None]:
    """Add run, rank, attempt or step to the records of a block."""
    token = _context.set(replace(_context.get(), **fields))
    try:
        yield
    finally:
        _context.reset(token)


def bind_log_context(**fields: Any) -> None:
    """Add run, rank, attempt or step to all later records of this thread or task."""
    _context.set(replace(_context.get(), **fields))


def configure_logging(
    verbose: bool = False, *, json_file: Path | None = None, stream: TextIO | None = None
) -> None:
    """Set up the logging of this process; a second call replaces what the first one set up.

    Args:
        verbose: Show everything; otherwise only what someone must act on.
        json_file: Also write one JSON object per line there, from INFO on; rotated by size.
        stream: Where text goes; standard error by default.
    """
    root = logging.getLogger(_ROOT)
    for old in [handler for handler in root.handlers if isinstance(handler.filters, list)]:
        if any(isinstance(entry, ContextFilter) for entry in old.filters):
            root.removeHandler(old)
            old.close()
    text = logging.StreamHandler(stream or sys.stderr)
    text.setLevel(logging.DEBUG if verbose else logging.WARNING)
    text.setFormatter(TextFormatter())
    handlers: list[logging.Handler] = [text]
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        lines = RotatingFileHandler(
            json_file, maxBytes=_FILE_BYTES, backupCount=_FILES_KEPT, encoding="utf-8", delay=True
        )
        lines.setLevel(logging.DEBUG if verbose else logging.INFO)
        lines.setFormatter(JsonFormatter())
        handlers.append(lines)
    for handler in handlers:
        handler.addFilter(ContextFilter())
        root.addHandler(handler)
    root.setLevel(min(handler.level for handler in handlers))
    # Without this a handler of the root logger would print everything a second time.
    root.propagate = False


class ContextFilter(logging.Filter):
    """Puts the context of the thread or task that logs into its records."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record through."""
        record.context = _context.get().known()
        return True


class TextFormatter(logging.Formatter):
    """`18:44:12 WARNING actors.trainer.loop run=sotu-7f3k rank=1: message`."""

    def format(self, record: logging.LogRecord) -> str:
        """One record; secrets are masked."""
        when = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        name = record.name.removeprefix(f"{_ROOT}.")
        context = getattr(record, "context", {})
        about = "".join(f" {key}={value}" for key, value in context.items())
        text = f"{when} {record.levelname} {name}{about}: {record.getMessage()}"
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return redacted(text)


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time, level, logger, message, the context, the exception."""

    def format(self, record: logging.LogRecord) -> str:
        """One record; secrets are masked."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": redacted(record.getMessage()),
            **getattr(record, "context", {}),
        }
        if record.exc_info:
            entry["exception"] = redacted(self.formatException(record.exc_info))
        return json.dumps(entry, default=str)


def redacted(text: str) -> str:
    """A text without the credentials of addresses, bearer tokens and API keys."""
    return _SECRET.sub(
        lambda found: f"{found['scheme']}{MASK}@" if found["scheme"] else
        f"{found['bearer'] or ''}{MASK}",
        text,
    )  # fmt: skip
