"""The share of its time that a trainer waits for data, over a source that is slow.

A real loader over a small dataset of the State of the Union addresses. Each read of a block takes
as long as a lognormal law of sigma 1 has it, 40 or 80 ms on average, and a step takes 50 ms; all
times are scaled down by 10. A batch is one sample, which lies in one block, or now and then in two.
    waits  seconds in `Loader.batch`, of those and the steps together
    less   how much less waiting there is, in seconds per step, than with nothing read ahead
Every round draws its delays anew, from a fixed seed, and all settings get the same ones; figures
are medians over the rounds.

With a cache in shared memory (L1) an epoch is read twice: a block that was read once is not read
again, so that the second epoch waits for the cache alone.
"""

import itertools
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from benchmarks.record import Figure
from examples.sotu.corpus import write_corpus

from eagleray.actors.cache import FeatureCache
from eagleray.actors.cache.segment_folder import PREFIX
from eagleray.actors.cache.segments import SegmentStore
from eagleray.actors.data import Dataset, build_dataset
from eagleray.actors.data.dataset import IntArray, SampleArray, Split, TokenSplit
from eagleray.actors.data.loader import Loader
from eagleray.actors.data.shards import TokenArray
from eagleray.platform.config import DataConfig
from eagleray.platform.storage import Storage

_SCALE = 10
_STEP_S = 0.050 / _SCALE
_READS_S = (0.040 / _SCALE, 0.080 / _SCALE)
_SIGMA = 1.0
_DEPTHS = (0, 1, 2, 4, 8, 16)
_GOAL = 0.8
_CORPUS_BYTES = 750_000
_CACHE_BYTES = 64 << 20


class ThrottledDataset(Dataset):
    """A dataset of which each block that is read takes a while.

    Set `delays_s` before it is used: seconds, one for each read of a block, in the order of reads.
    """

    delays_s: Iterator[float] = iter(())

    def split(self, split: Split) -> Any:
        """The split's samples and blocks."""
        return _ThrottledSplit(super().split(split), self._wait)

    def _wait(self) -> None:
        time.sleep(next(self.delays_s))


class _ThrottledSplit:
    def __init__(self, source: TokenSplit, wait: Callable[[], None]) -> None:
        self._source, self._wait = source, wait

    def read(self, ids: IntArray) -> SampleArray:
        return self._source.read_through(ids, lambda blocks: [self.read_block(b) for b in blocks])

    def read_block(self, block: int) -> TokenArray:
        self._wait()
        return self._source.read_block(block)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def waiting(folder: Path, is_quick: bool) -> Iterator[Figure]:
    """Waiting by depth of the read-ahead, then with the cache."""
    dataset = _dataset(folder)
    steps = 60 if is_quick else dataset.num_samples("train")
    rounds = 1 if is_quick else 3
    for read_s in _READS_S:
        name = f"{1000 * read_s * _SCALE:.0f} ms reads"
        waits: dict[int, list[float]] = {depth: [] for depth in _DEPTHS}
        for seed, depth in itertools.product(range(rounds), _DEPTHS):
            dataset.delays_s = _delays_s(read_s, seed)
            with _loader(dataset, depth) as loader:
                waits[depth].append(_wait_s(loader, 0, steps))
        yield from _curve(name, {depth: median(found) for depth, found in waits.items()})
        for depth in (0, 4):
            epochs = [_cached(dataset, depth, read_s, seed, steps) for seed in range(rounds)]
            for number, found in enumerate(zip(*epochs, strict=True), 1):
                yield Figure(
                    f"{name}, L1, depth {depth}, epoch {number}: waits",
                    _share(median(found)), "%", "no cache, depth 0", _share(median(waits[0])),
                )  # fmt: skip


def _dataset(folder: Path) -> ThrottledDataset:
    """Some 200 samples of 1,024 tokens."""
    texts, num_bytes = [], 0
    for line in write_corpus(folder).open(encoding="utf-8"):
        texts.append(json.dumps({"text": json.loads(line)["text"]}) + "\n")
        num_bytes += len(texts[-1])
        if num_bytes > _CORPUS_BYTES:
            break
    (folder / "some.jsonl").write_text("".join(texts), encoding="utf-8")
    config = {
        "sources": [{"path": "some.jsonl"}],
        "tokenizer": {"vocab_size": 1024},
        "seq_len": 1024,
        "eval_fraction": 0.1,
    }
    storage = Storage(folder / "storage")
    built = build_dataset(DataConfig.model_validate(config), lambda path: folder / path, storage)
    return ThrottledDataset.open(storage, built.digest)


def _loader(dataset: Dataset, depth: int, cache: FeatureCache | None = None) -> Loader:
    return Loader(dataset, "train", order_seed=0, batch_size=1, cache=cache, prefetch_batches=depth)


def _delays_s(mean_s: float, seed: int) -> Iterator[float]:
    """Lognormal delays without end."""
    draw, lock = np.random.default_rng(seed), threading.Lock()
    mu = np.log(mean_s) - _SIGMA**2 / 2
    while True:
        with lock:
            delay_s = float(draw.lognormal(mu, _SIGMA))
        yield delay_s


def _wait_s(loader: Loader, first: int, steps: int) -> float:
    """Seconds that a trainer waits per step."""
    waited_s = 0.0
    for step in range(first, first + steps):
        started = time.perf_counter()
        loader.batch(step)
        waited_s += time.perf_counter() - started
        time.sleep(_STEP_S)
    return waited_s / steps


def _cached(
    dataset: ThrottledDataset, depth: int, read_s: float, seed: int, steps: int
) -> tuple[float, float]:
    """Seconds of waiting per step in a first and in a second epoch."""
    dataset.delays_s = _delays_s(read_s, seed)
    path = Path(f"/dev/shm/{PREFIX}bench-{secrets.token_hex(8)}")
    cache = FeatureCache(SegmentStore(path, _CACHE_BYTES))
    with _loader(dataset, depth, cache) as loader:
        first = _wait_s(loader, 0, steps)
        return first, _wait_s(loader, dataset.num_samples("train"), steps)


def _curve(name: str, waits_s: dict[int, float]) -> Iterator[Figure]:
    alone_s = waits_s[0]
    for depth, wait_s in waits_s.items():
        title = f"{name}, depth {depth}"
        yield Figure(f"{title}: waits", _share(wait_s), "%", "depth 0", _share(alone_s))
        if depth:
            less = 1 - wait_s / alone_s
            yield Figure(
                f"{title}: less", 100 * less, "%", goal=f"at least {_GOAL:.0%}", holds=less >= _GOAL
            )


def _share(wait_s: float) -> float:
    return 100 * wait_s / (wait_s + _STEP_S)
