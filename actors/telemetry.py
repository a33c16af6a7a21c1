"""Ray as the sink of metrics: what actors measure is scraped from the node they run on.

Ray exports each metric as `ray_<name>`, a counter also with `_total` behind it, with labels of its
own beside ours (WorkerId, NodeAddress). A process that is not connected to Ray measures for nobody.
"""

import threading
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from eagleray.platform.telemetry import Metric, MetricKind, Sink


class RaySink:
    """Hands measurements to Ray. For several threads; what it costs is about ten microseconds."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}
        self._lock = threading.Lock()

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Let a counter grow; an amount of 0 is nothing."""
        metric.check(MetricKind.COUNTER, labels)
        if amount > 0:
            self._find(metric).inc(amount, labels)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Put a gauge to a value."""
        metric.check(MetricKind.GAUGE, labels)
        self._find(metric).set(value, labels)

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Count a value in a histogram."""
        metric.check(MetricKind.HISTOGRAM, labels)
        self._find(metric).observe(value, labels)

    def _find(self, metric: Metric) -> Any:
        with self._lock:
            if metric.name not in self._made:
                self._made[metric.name] = _create(metric)
            return self._made[metric.name]


class TotalsMeter:
    """Turns totals that only grow, as `stats()` methods give them, into counters."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._seen: dict[tuple[str, ...], float] = {}

    def reach(self, metric: Metric, total: float, **labels: str) -> None:
        """Let a counter grow to a total since the start of this process."""
        key = (metric.name, *labels.values())
        self._sink.add(metric, max(0.0, total - self._seen.get(key, 0.0)), **labels)
        self._seen[key] = max(total, self._seen.get(key, 0.0))


def _create(metric: Metric) -> Any:
    if metric.kind is MetricKind.COUNTER:
        return Counter(metric.name, metric.about, metric.labels)
    if metric.kind is MetricKind.GAUGE:
        return Gauge(metric.name, metric.about, metric.labels)
    return Histogram(metric.name, metric.about, list(metric.buckets), metric.labels)
