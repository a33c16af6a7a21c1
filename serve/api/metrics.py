"""What /metrics shows: counters of the engine read when asked, and histograms of the answers.

Names are `eagleray_serve_<what>_<unit>`. Every application has a registry of its own, so several
servers in one process do not mix.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from eagleray.serve.engine.engine import EngineStats
from eagleray.serve.engine.stream import StreamTiming

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)

_GAUGES = {
    "num_running": ("running_requests", "Requests that are decoded together."),
    "num_waiting": ("waiting_requests", "Requests without a seat."),
    "num_blocks": ("kv_blocks", "KV blocks in the pool."),
    "num_free_blocks": ("kv_free_blocks", "KV blocks that nobody holds."),
    "num_kept_blocks": ("kv_kept_blocks", "Those of them that hold a prefix for later requests."),
}
_COUNTERS = {
    "num_preemptions": ("preemptions", "Requests that lost their blocks to an older one."),
    "num_steps": ("steps", "Forward passes."),
    "num_failed_steps": ("failed_steps", "Forward passes that raised."),
    "num_computed_tokens": ("computed_tokens", "Tokens that went through the model."),
    "num_reused_tokens": ("reused_tokens", "Tokens of which an earlier request had left keys."),
    "num_guessed_tokens": ("guessed_tokens", "Tokens that were computed before they were drawn."),
    "num_taken_tokens": ("taken_tokens", "Guessed tokens that were then drawn."),
    "num_output_tokens": ("output_tokens", "Tokens that were sampled."),
}


class ServeMetrics:
    """The metrics of one application.

    Args:
        stats: Reads the engine's counters.
    """

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats))
        self._responses = Counter(
            "eagleray_serve_responses",
            "Answers by route and HTTP status.",
            ["route", "status"],
            registry=self._registry,
        )
        self._key_requests = self._counter("key_requests", "Requests that ended, by key.")
        self._key_tokens = self._counter("key_tokens", "Tokens by key and kind.", "kind")
        self._key_compute = self._counter(
            "key_compute_seconds", "Each key's part of the engine's time, by tokens."
        )
        self._ttft = self._histogram("ttft", "Seconds to the first token.", _SECONDS)
        self._queue = self._histogram("queue", "Seconds before the first step.", _SECONDS)
        self._total = self._histogram("request", "Seconds from arrival to the end.", _SECONDS)
        self._tpot = self._histogram("tpot", "Seconds per token after the first.", _TOKEN_SECONDS)

    def used(self, key: str, counts: Mapping[str, Any], compute_s: float) -> None:
        """Count what a request of a key has used; `counts` as in the answer."""
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        self._key_requests.labels(key).inc()
        self._key_tokens.labels(key, "prompt").inc(counts["prompt_tokens"] - cached)
        self._key_tokens.labels(key, "cached").inc(cached)
        self._key_tokens.labels(key, "output").inc(counts["completion_tokens"])
        self._key_compute.labels(key).inc(compute_s)

    def answered(self, route: str, status: int) -> None:
        """Count an answer."""
        self._responses.labels(route, str(status)).inc()

    def generated(self, timing: StreamTiming) -> None:
        """Observe a completion that ended; one that gave no token has no latency to observe."""
        if not timing.num_output:
            return
        self._ttft.observe(timing.ttft_s)
        self._queue.observe(timing.queue_s)
        self._total.observe(max(0.0, timing.finished_s - timing.submitted_s))
        if timing.tpot_s is not None:
            self._tpot.observe(timing.tpot_s)

    def text(self) -> bytes:
        """The Prometheus exposition."""
        return generate_latest(self._registry)

    def _counter(self, what: str, about: str, *labels: str) -> Counter:
        return Counter(f"eagleray_serve_{what}", about, ["key", *labels], registry=self._registry)

    def _histogram(self, what: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"eagleray_serve_{what}_seconds", about, buckets=buckets, registry=self._registry
        )


class _EngineCollector(Collector):
    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """Read the engine once per scrape."""
        stats = self._stats()
        for field, (name, about) in _GAUGES.items():
            yield GaugeMetricFamily(f"eagleray_serve_{name}", about, getattr(stats, field))
        for field, (name, about) in _COUNTERS.items():
            yield CounterMetricFamily(f"eagleray_serve_{name}", about, getattr(stats, field))
        finished = CounterMetricFamily(
            "eagleray_serve_finished_requests", "Requests that ended, by reason.", labels=["reason"]
        )
        for reason, count in stats.finished.items():
            finished.add_metric([reason], count)
        yield finished
