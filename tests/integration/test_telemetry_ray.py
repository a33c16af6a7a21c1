"""Ray as a sink: what an actor measures can be scraped from its node."""

import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from eagleray.actors.telemetry import RaySink
from eagleray.platform.telemetry import SERVE_TTFT, TRAIN_FAULTS, TRAIN_LOSS

pytestmark = pytest.mark.cluster


class Measurer:
    """An actor that measures."""

    def __init__(self) -> None:
        self._sink = RaySink()

    def measure(self) -> bool:
        self._sink.add(TRAIN_FAULTS, 2.0, run="r")
        self._sink.set(TRAIN_LOSS, 6.5, run="r")
        self._sink.observe(SERVE_TTFT, 0.2)
        return True


def test_what_an_actor_measures_is_scraped_from_its_node(
    ray_cluster: str, until: Callable[..., None]
) -> None:
    import ray

    actor: Any = ray.remote(Measurer).options(num_cpus=0).remote()
    try:
        assert ray.get(actor.measure.remote(), timeout=60)
        port = ray.nodes()[0]["MetricsExportPort"]

        def scraped() -> bool:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                lines = answer.read().decode().splitlines()
            values = {
                line.partition("{")[0]: float(line.rpartition(" ")[2])
                for line in lines
                if "eagleray_" in line and not line.startswith("#") and "_bucket" not in line
            }
            return (
                values.get("ray_eagleray_train_worker_faults_total") == 2.0
                and values.get("ray_eagleray_train_loss_nats") == 6.5
                and values.get("ray_eagleray_serve_ttft_seconds_count") == 1.0
            )

        until(scraped, "the actor's metrics", timeout_s=50.0)
    finally:
        ray.kill(actor)
