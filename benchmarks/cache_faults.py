"""Time of a step that reads through a Redis Cluster, during and after a master's failure.

    python -m benchmarks.cache_faults [--quick] [--json FILE]

Two clusters of three masters and three replicas on loopback hold the dataset, and a reader of each
takes a step in turn, so that whatever else the machine does meets both. A step reads a batch of 32
samples, without reading ahead, and computes a digest of it, which must be that of the same step
without a cache. Then a master of the one cluster is killed, stopped (SIGSTOP), or replaced by a
port that takes connections and never answers, and stays away.

    before     both are well
    during     from the fault until the breaker of the master opens
    after      all steps of the next seconds, with those that try whether the master is back

The goal is the project's: once the breaker is open, within 10 % of a step that nothing disturbs,
for the median as for the mean. Medians over rounds. Five minutes; with --quick one.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.record import Figure, run
from examples.sotu.corpus import write_corpus
from tools.redis_cluster import FAULTS, HOST, RedisCluster

from eagleray.actors.cache import open_cache
from eagleray.actors.cache.cluster_store import ClusterStore
from eagleray.actors.cache.frame import digest_key
from eagleray.actors.data import Dataset, build_dataset
from eagleray.actors.data.batch import Batch
from eagleray.actors.data.loader import Loader
from eagleray.platform.config import DataConfig, FeatureCacheConfig
from eagleray.platform.storage import Storage

_BATCH = 32
_STEPS = 500
_GOAL = 1.1
_STAYS_AWAY_MS = 600_000


@dataclass(frozen=True)
class Round:
    """Seconds of each step beside those of an undisturbed cluster, and tries after the opening."""

    before: list[tuple[float, float]]
    during: list[float]
    after: list[tuple[float, float]]
    tries: int


def measure(arguments: argparse.Namespace) -> list[Figure]:
    """All figures."""
    rounds, after_s = (1, 4.0) if arguments.quick else (5, 8.0)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="bench-faults-") as folder:
        root = Path(folder)
        dataset = _dataset(root)
        with Loader(dataset, "train", 0, _BATCH, prefetch_batches=0) as plain:
            wanted = [_digest(plain.batch(step)) for step in range(_STEPS)]
        for fault in FAULTS:
            done = [_round(dataset, wanted, fault, after_s) for _ in range(rounds)]
            figures += _figures(fault, done)
    return figures


def _dataset(root: Path) -> Dataset:
    settings = {
        "sources": [{"path": str(write_corpus(root))}],
        "tokenizer": {"vocab_size": 4096},
        "seq_len": 128,
    }
    return build_dataset(DataConfig.model_validate(settings), Path, Storage(root / "store"))


class _Reader:
    """Reads through a cluster of its own."""

    def __init__(self, dataset: Dataset, wanted: list[bytes]) -> None:
        self.cluster, self._wanted, self._next = RedisCluster(_STAYS_AWAY_MS), wanted, 0
        self.cluster.join()
        cache = open_cache(FeatureCacheConfig(), self.cluster.url)
        assert cache is not None
        assert isinstance(cache.store, ClusterStore)
        self.link = cache.store.link
        self._loader = Loader(dataset, "train", 0, _BATCH, cache, prefetch_batches=0)
        for _ in range(_STEPS):
            self.step()

    def step(self) -> float:
        """Seconds of the next step."""
        number, self._next = self._next, (self._next + 1) % _STEPS
        started = time.perf_counter()
        got = _digest(self._loader.batch(number))
        took_s = time.perf_counter() - started
        if got != self._wanted[number]:
            raise RuntimeError(f"step {number} read another batch than without a cache")
        return took_s

    def close(self) -> None:
        self._loader.close()
        self.cluster.stop()


def _round(dataset: Dataset, wanted: list[bytes], fault: str, after_s: float) -> Round:
    with ExitStack() as stack:
        ours, well = (stack.enter_context(closing(_Reader(dataset, wanted))) for _ in range(2))
        before = [(ours.step(), well.step()) for _ in range(_STEPS)]
        victim = HOST, ours.cluster.owner(digest_key(f"{dataset.digest}:train:0".encode()))
        breaker = ours.link._nodes[victim].breaker
        with ours.cluster.faulty(victim[1], fault):
            during: list[float] = []
            while not breaker.times_opened:
                during.append(ours.step())
            failed = ours.link.counts.by_node[victim]
            after = []
            end_s = time.perf_counter() + after_s
            while time.perf_counter() < end_s:
                after.append((ours.step(), well.step()))
        return Round(before, during, after, ours.link.counts.by_node[victim] - failed)


def _figures(fault: str, rounds: list[Round]) -> list[Figure]:
    def ms(of: Callable[[Round], float]) -> float:
        return 1000 * median(of(each) for each in rounds)

    def beside(
        name: str, of: Callable[[list[float]], float], steps: Callable[[Round], Any], goal: str
    ) -> Figure:
        ours = ms(lambda r: of([pair[0] for pair in steps(r)]))
        theirs = ms(lambda r: of([pair[1] for pair in steps(r)]))
        is_met = ours < _GOAL * theirs if goal else None
        return Figure(f"{fault}: {name}", ours, "ms", "undisturbed", theirs, goal, is_met)

    goal = f"below {_GOAL:g} x"
    return [
        beside("median step before", median, lambda r: r.before, ""),
        Figure(f"{fault}: longest step during", ms(lambda r: max(r.during)), "ms"),
        Figure(f"{fault}: all steps during", ms(lambda r: sum(r.during)), "ms"),
        Figure(f"{fault}: tries after", median(r.tries for r in rounds), "calls"),
        beside("median step after", median, lambda r: r.after, goal),
        beside("mean step after", mean, lambda r: r.after, goal),
    ]


def _digest(batch: Batch) -> bytes:
    return sha256(batch.ids.tobytes() + batch.tokens.tobytes()).digest()


if __name__ == "__main__":
    run(__doc__ or "", measure)
