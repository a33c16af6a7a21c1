"""The share of its time that a trainer waits for data, over a source that is slow.

A real loader over a small dataset of the State of the Union addresses. Each read of a block takes
as long as a lognormal law of sigma 1 has it, 40 or 80 ms on average, and a step takes 50 ms; all
times are scaled down by 10, so what a read costs by itself counts tenfold. A batch is one sample,
which lies in one block, or now and then in two.

    D/F    batches read ahead, by so many threads; "tuned" is what the loader does by itself
    L1 E   through a cache in shared memory, which is empty before epoch 1
    waits  time in `Loader.batch`, of that and the steps together
    less   how much less waiting there is than with nothing read ahead; the goal is 80 % less

Every round draws its delays anew, from a fixed seed, and all settings get the same ones; figures
are medians over the rounds. One thread cannot reach the goal where reads take longer than steps.
A block that was read once comes from the cache, also within its epoch: the second epoch waits for
the cache alone.
"""

import itertools
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

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


class Setting(NamedTuple):
    """How a loader reads ahead; None: as it sees fit."""

    depth: int | None
    fetchers: int | None

    def __str__(self) -> str:
        if self == _TUNED:
            return "tuned"
        return f"{self.depth}/{self.fetchers}"


_SCALE = 10
_STEP_S = 0.050 / _SCALE
_READS_S = (0.040 / _SCALE, 0.080 / _SCALE)
_SIGMA = 1.0
_ALONE = Setting(0, 0)
_TUNED = Setting(None, None)
_SETTINGS = (
    _ALONE,
    *(Setting(depth, 1) for depth in (1, 2, 4, 8, 16)),
    *(Setting(depth, 2) for depth in (2, 4, 8)),
    Setting(8, 4),
    Setting(16, 8),
    _TUNED,
)
_GOAL = 0.8
_CORPUS_BYTES = 750_000
_CACHE_BYTES = 64 << 20


class ThrottledDataset(Dataset):
    """A dataset of which each block that is read takes a while; set `wait` before it is used."""

    wait: Callable[[], None] = lambda: None

    def split(self, split: Split) -> Any:
        """The split's samples and blocks."""
        return _ThrottledSplit(super().split(split), self.wait)


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
    """Waiting by depth of the read-ahead and number of fetchers, then with the cache."""
    dataset = _dataset(folder)
    steps = 60 if is_quick else dataset.num_samples("train")
    rounds = 1 if is_quick else 3
    for read_s in _READS_S:
        name = f"{1000 * read_s * _SCALE:.0f} ms reads"
        waits: dict[Setting, list[float]] = {setting: [] for setting in _SETTINGS}
        for seed, setting in itertools.product(range(rounds), _SETTINGS):
            dataset.wait = _Delay(read_s, seed)
            with _loader(dataset, setting) as loader:
                waits[setting].append(_wait_s(loader, 0, steps))
        alone_s = median(waits[_ALONE])
        for setting, found in waits.items():
            yield from _figures(f"{name}, {setting}", median(found), alone_s)
        for setting in (_ALONE, _TUNED):
            epochs = [_cached(dataset, setting, read_s, seed, steps) for seed in range(rounds)]
            for number, waited in enumerate(zip(*epochs, strict=True), 1):
                yield from _figures(f"{name}, {setting}, L1 {number}", median(waited), alone_s)


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
    return ThrottledDataset(built.folder, built.digest, built.manifest)


def _loader(dataset: Dataset, setting: Setting, cache: FeatureCache | None = None) -> Loader:
    return Loader(
        dataset, "train", order_seed=0, batch_size=1, cache=cache,
        prefetch_batches=setting.depth, fetchers=setting.fetchers,
    )  # fmt: skip


class _Delay:
    """Waits for as long as a lognormal law has it. Safe for several threads."""

    def __init__(self, mean_s: float, seed: int) -> None:
        self._draw, self._lock = np.random.default_rng(seed), threading.Lock()
        self._mu = np.log(mean_s) - _SIGMA**2 / 2

    def __call__(self) -> None:
        with self._lock:
            delay_s = float(self._draw.lognormal(self._mu, _SIGMA))
        time.sleep(delay_s)


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
    dataset: ThrottledDataset, setting: Setting, read_s: float, seed: int, steps: int
) -> tuple[float, float]:
    """Seconds of waiting per step in a first and in a second epoch."""
    dataset.wait = _Delay(read_s, seed)
    path = Path(f"/dev/shm/{PREFIX}bench-{secrets.token_hex(8)}")
    cache = FeatureCache(SegmentStore(path, _CACHE_BYTES))
    with _loader(dataset, setting, cache) as loader:
        first = _wait_s(loader, 0, steps)
        return first, _wait_s(loader, dataset.num_samples("train"), steps)


def _figures(name: str, wait_s: float, alone_s: float) -> Iterator[Figure]:
    yield Figure(f"{name}: waits", _share(wait_s), "%", f"{_ALONE}", _share(alone_s))
    if wait_s != alone_s:
        less = 1 - wait_s / alone_s
        goal = f"at least {_GOAL:.0%}"
        yield Figure(f"{name}: less", 100 * less, "%", goal=goal, holds=less >= _GOAL)


def _share(wait_s: float) -> float:
    return 100 * wait_s / (wait_s + _STEP_S)
