"""Memory of a build and of loaders, over all their processes.

    python -m benchmarks.memory [--quick] [--json FILE]

Memory is the sum of the proportional set sizes (PSS) of a process and all that it started: what
several share counts once. It is looked at five times a second.

    build     100 MB of text in each of three domains, by `eagleray data build` in one process, and
              on a private Ray cluster, which counts with all its processes; the goal is 1.5 GB
    loaders   three that read at once, after their epochs 2 and 20, without a cache and with Redis;
              the goal is less than 5 % more

Ten minutes; with --quick 10 MB in each domain, and no cluster.
"""

import argparse
import contextlib
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
from benchmarks.record import Figure, run
from examples.sotu.corpus import write_corpus

from eagleray.actors.cache import open_cache
from eagleray.actors.data import BatchStream, Dataset, build_dataset
from eagleray.platform.config import DataConfig, FeatureCacheConfig, RedisConfig
from eagleray.platform.redis_server import RedisServer
from eagleray.platform.storage import Storage

_DOMAINS = ("news", "mail", "manuals")
_BUILD_GOAL = 1.5e9
_GROWTH_GOAL = 1.05
_NUM_LOADERS = 3
_EPOCHS = (2, 20)
_SMALL_BYTES = 2_000_000
_PAUSE_S = 0.2
# The verb, but for the way to a cluster.
_ALONE = """
import sys
from pathlib import Path
from eagleray.actors.data import build_dataset
from eagleray.platform.config import load_config
from eagleray.platform.storage import Storage
loaded = load_config(Path(sys.argv[1]))
build_dataset(loaded.config.data, loaded.resolve, Storage(loaded.storage_path))
"""


def measure(arguments: argparse.Namespace) -> list[Figure]:
    """All figures."""
    size = 10_000_000 if arguments.quick else 100_000_000
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as folder:
        root = Path(folder)
        corpus = write_corpus(root)
        figures = list(_builds(root, corpus, size, with_cluster=not arguments.quick))
        return figures + list(_loaders(root, corpus))


def _builds(root: Path, corpus: Path, size: int, *, with_cluster: bool) -> Iterator[Figure]:
    sources = [{"path": str(_grown(corpus, root, name, size)), "domain": name} for name in _DOMAINS]
    ways = {"in one process": [sys.executable, "-c", _ALONE]}
    if with_cluster:
        ways["on a cluster"] = [sys.executable, "-m", "eagleray", "data", "build", "--config"]
    for name, words in ways.items():
        folder = root / name.replace(" ", "-")
        folder.mkdir()
        config = {"name": "memory", "storage": {"uri": "store"}, "data": {"sources": sources}}
        (folder / "eagleray.yaml").write_text(json.dumps(config))
        peak, took_s = _peak([*words, str(folder / "eagleray.yaml")])
        yield Figure(
            f"build of {len(_DOMAINS)} x {size // 10**6} MB {name}: peak", peak / 1e6, "MB",
            goal=f"below {_BUILD_GOAL / 1e6:g}", holds=peak < _BUILD_GOAL,
        )  # fmt: skip
        yield Figure(f"build of {len(_DOMAINS)} x {size // 10**6} MB {name}: time", took_s, "s")


def _grown(corpus: Path, root: Path, name: str, size: int) -> Path:
    """Speeches over and over, each one with a number of its own."""
    path, written, number = root / f"{name}.jsonl", 0, 0
    speeches = [json.loads(line)["text"] for line in corpus.open(encoding="utf-8")]
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            text = f"{name} {number}: {speeches[number % len(speeches)]}"
            written += file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            number += 1
    return path


def _peak(words: list[str]) -> tuple[int, float]:
    """The most bytes that a program and all it started took at once, and its seconds."""
    started, peak = time.perf_counter(), 0
    process = psutil.Popen(words, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, sum(map(_pss, [process, *process.children(recursive=True)])))
        time.sleep(_PAUSE_S)
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}")
    return peak, time.perf_counter() - started


def _pss(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):  # It has just ended.
        return int(process.memory_full_info().pss)
    return 0


def _loaders(root: Path, corpus: Path) -> Iterator[Figure]:
    settings = {
        "sources": [{"path": str(_grown(corpus, root, "small", _SMALL_BYTES))}],
        "tokenizer": {"vocab_size": 4096},
        "seq_len": 128,
    }
    storage = Storage(root / "store")
    dataset = build_dataset(DataConfig.model_validate(settings), Path, storage)
    server = RedisServer.start(RedisConfig(), root / "redis")
    try:
        for name, url in (("no cache", None), ("Redis", server.url if server else None)):
            if name == "Redis" and url is None:
                continue
            early, late = _after_epochs(storage.root, dataset.digest, url)
            yield Figure(
                f"{_NUM_LOADERS} loaders, {name}: after epoch {_EPOCHS[1]}", late / 1e6, "MB",
                f"epoch {_EPOCHS[0]}", early / 1e6, f"below {_GROWTH_GOAL:g} x",
                late < _GROWTH_GOAL * early,
            )  # fmt: skip
    finally:
        if server:
            server.stop()


def _after_epochs(root: Path, digest: str, url: str | None) -> list[int]:
    """Bytes of all loaders after each of the epochs."""
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(_NUM_LOADERS)]
    processes = [
        context.Process(target=_read, args=(root, digest, url, seed, child), daemon=True)
        for seed, (_, child) in enumerate(ends)
    ]
    for process in processes:
        process.start()
    totals = []
    for _ in _EPOCHS:
        for ours, _ in ends:
            ours.recv()
        totals.append(sum(_pss(psutil.Process(process.pid)) for process in processes))
        for ours, _ in ends:
            ours.send("go on")
    for process in processes:
        process.join()
    return totals


def _read(root: Path, digest: str, url: str | None, seed: int, parent: Connection) -> None:
    cache = open_cache(FeatureCacheConfig(), url) if url else None
    dataset = Dataset.open(Storage(root), digest)
    with BatchStream(dataset, 32, seed=seed, cache=cache) as stream:
        for epoch in range(1, _EPOCHS[-1] + 1):
            for _ in stream:
                pass
            if epoch in _EPOCHS:
                parent.send(epoch)
                parent.recv()


if __name__ == "__main__":
    run(__doc__ or "", measure)
