"""Time of a step that reads through a Redis Cluster, before, during and after a master fails.

    python -m benchmarks.cache_faults [--quick] [--json FILE]

Three masters and three replicas on loopback hold the dataset. A step reads a batch of 32 samples,
without reading ahead, and computes a digest of it, which must be that of the same step without a
cache. Then a master is killed, stopped (SIGSTOP), or replaced by a port that takes connections and
never answers, and stays away.

    before     the cluster is well
    during     from the fault until the breaker of the master opens
    after      all steps of the next seconds, with those that try whether the master is back

The goal is the project's: within 10 % of before once the breaker is open, for the median as for the
mean. Medians over rounds, each with a cluster of its own. Three minutes; with --quick one.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import mean, median

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
    """Seconds of each step, and the calls that failed after the breaker had opened."""

    before: list[float]
    during: list[float]
    after: list[float]
    probes: int


def measure(arguments: argparse.Namespace) -> list[Figure]:
    """All figures."""
    rounds, after_s = (1, 4.0) if arguments.quick else (5, 8.0)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="bench-faults-") as folder:
        root = Path(folder)
        dataset = _dataset(root)
        for fault in FAULTS:
            done = [
                _round(dataset, root / f"{fault}-{number}", fault, after_s)
                for number in range(rounds)
            ]
            figures += _figures(fault, done)
    return figures


def _dataset(root: Path) -> Dataset:
    settings = {
        "sources": [{"path": str(write_corpus(root))}],
        "tokenizer": {"vocab_size": 4096},
        "seq_len": 128,
    }
    return build_dataset(DataConfig.model_validate(settings), Path, Storage(root / "store"))


def _round(dataset: Dataset, folder: Path, fault: str, after_s: float) -> Round:
    cluster = RedisCluster(folder, _STAYS_AWAY_MS)
    try:
        cluster.join()
        cache = open_cache(FeatureCacheConfig(), cluster.url)
        assert cache is not None
        assert isinstance(cache.store, ClusterStore)
        link = cache.store.link
        with (
            Loader(dataset, "train", 0, _BATCH, cache, prefetch_batches=0) as loader,
            Loader(dataset, "train", 0, _BATCH, prefetch_batches=0) as plain,
        ):
            wanted = [_digest(plain.batch(step)) for step in range(_STEPS)]

            def step(number: int) -> float:
                started = time.perf_counter()
                got = _digest(loader.batch(number % _STEPS))
                took_s = time.perf_counter() - started
                if got != wanted[number % _STEPS]:
                    raise RuntimeError(f"step {number} read another batch than without a cache")
                return took_s

            for number in range(_STEPS):
                step(number)
            before = [step(number) for number in range(_STEPS)]
            victim = HOST, cluster.owner(digest_key(f"{dataset.digest}:train:0".encode()))
            during: list[float] = []
            after: list[float] = []
            with cluster.faulty(victim[1], fault):
                breaker = link._nodes[victim].breaker
                while not breaker.times_opened:
                    during.append(step(len(during)))
                failed = link.counts.by_node[victim]
                end_s = time.perf_counter() + after_s
                while time.perf_counter() < end_s:
                    after.append(step(len(after)))
            return Round(before, during, after, link.counts.by_node[victim] - failed)
    finally:
        cluster.stop()


def _figures(fault: str, rounds: list[Round]) -> list[Figure]:
    def ms(of: Callable[[Round], float]) -> float:
        return 1000 * median(of(each) for each in rounds)

    def back(name: str, of: Callable[[list[float]], float]) -> Figure:
        before, after = ms(lambda r: of(r.before)), ms(lambda r: of(r.after))
        ratio = median(of(r.after) / of(r.before) for r in rounds)
        return Figure(
            f"{fault}: {name} step after", after, "ms", "before", before,
            f"below {_GOAL:g} x before", ratio < _GOAL,
        )  # fmt: skip

    return [
        Figure(f"{fault}: longest step during", ms(lambda r: max(r.during)), "ms"),
        Figure(f"{fault}: all steps during", ms(lambda r: sum(r.during)), "ms"),
        Figure(f"{fault}: tries after", median(r.probes for r in rounds), "calls"),
        back("median", median),
        back("mean", mean),
    ]


def _digest(batch: Batch) -> bytes:
    return sha256(batch.ids.tobytes() + batch.tokens.tobytes()).digest()


if __name__ == "__main__":
    run(__doc__ or "", measure)
