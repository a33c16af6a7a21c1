"""Batches by step: read ahead, through the feature cache, the same whatever happens.

    B = batch_size, T = seq_len

A batch is a pure function of (dataset, seed, mixture, step, B). The loader keeps no position: to
resume is to ask for another step, and the read-ahead follows.
"""

import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Self

import numpy as np

from eagleray.actors.cache import FeatureCache
from eagleray.actors.cache.levels import LevelStats
from eagleray.actors.data.announcer import CHUNK_STEPS, Announcer
from eagleray.actors.data.batch import Batch, LoaderStats
from eagleray.actors.data.dataset import Dataset, IntArray, SampleArray, Split
from eagleray.actors.data.mixing import stratified
from eagleray.actors.data.mixture import Mixture
from eagleray.actors.data.order import mixed_batch_ids, slice_bounds
from eagleray.actors.data.pace import Pace
from eagleray.actors.data.read_ahead import ReadAhead
from eagleray.actors.data.shards import TokenArray

# Evaluation goes over the held-out samples in one fixed order, whatever the training seed.
_EVAL_SEED = 0


class Loader:
    """Reads batches of one split. Safe for several threads; close it, or use it in a `with`.

    Args:
        dataset: Where samples come from.
        split: Which of its splits `batch` reads.
        order_seed: Seeds the sample order.
        batch_size: Global batch in samples.
        cache: Looked up before the shards are read; owned by the loader from now on.
        prefetch_batches: Steps read ahead; 0: none; None: as many as pays, perhaps none.
        mixture: Of the dataset's domains; None: in the ratio of their sizes.
        rank: With `world_size`, which part of each batch is read; evaluation batches are whole.
        world_size: Into how many equal parts batches are cut; 1: they are read whole.
        clock: Seconds that only grow.
        fetchers: Threads that read ahead; None: as many as pays.
        timeout_s: How long `batch` waits at most; a thread reads every batch then. None: no limit.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: Split,
        order_seed: int,
        batch_size: int,
        cache: FeatureCache | None = None,
        prefetch_batches: int | None = None,
        mixture: Mixture | None = None,
        rank: int = 0,
        world_size: int = 1,
        clock: Callable[[], float] = time.perf_counter,
        *,
        fetchers: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.dataset, self.split = dataset, split
        self.order_seed, self.batch_size = order_seed, batch_size
        self._part = slice(*slice_bounds(batch_size, rank, world_size))
        self._cache, self._clock = cache, clock
        self._mixture = mixture or stratified(dataset.sizes(split))
        self._held_out = stratified(dataset.sizes("eval"))
        self._counting = threading.Lock()
        self._batches = self._ready = 0
        self._wait_s = self._read_s = 0.0
        self._known_ids: tuple[tuple[Split, int, int], Mixture, IntArray] | None = None
        self._announcer = Announcer(cache, self._keys_of) if cache and cache.is_planned else None
        self._announcing = threading.Lock()
        self._ahead = ReadAhead(
            lambda step: self._read_by(self._mixture, step),
            Pace(prefetch_batches, fetchers),
            self._end,
            timeout_s,
            clock,
        )

    def batch(self, step: int, mixture: Mixture | None = None) -> Batch:
        """The global batch of a step, counted from 0; its arrays are shared: do not write to them.

        Args:
            step: Counted from 0.
            mixture: What has been decided by now, where that follows the losses: from a little
                before this step on, at least up to its end. None: what was given before.

        Raises:
            ValueError: The step is negative, or not decided yet.
            IntegrityError: A block of a shard is damaged; names shard and block.
            DeadlineExceededError: It did not come within `timeout_s`; names the shard.
        """
        started = self._clock()
        known, generation = self._follow(mixture, step)
        batch, was_ready = self._ahead.get(
            step, lambda step: self._read_by(known, step), generation
        )
        wait_s = self._clock() - started
        with self._counting:
            self._batches += 1
            self._ready += was_ready
            self._wait_s += wait_s
        return batch

    def eval_batch(self, index: int) -> Batch:
        """A batch of held-out samples; the same for the same index, whatever the training seed.

        Batches go through the split without a gap and start over at its end, so each is full.
        """
        return self._read("eval", index, self._ids("eval", index, _EVAL_SEED, self._held_out))

    def eval_batches(self, num_batches: int) -> Iterator[Batch]:
        """The first batches of held-out samples."""
        return (self.eval_batch(index) for index in range(num_batches))

    def stats(self) -> LoaderStats:
        """Figures since the start."""
        cache = self._cache.stats if self._cache else None
        with self._counting:
            return LoaderStats(
                self._batches,
                self._ready,
                self._wait_s,
                self._read_s,
                cache_hits=cache.hits if cache else 0,
                cache_misses=cache.misses if cache else 0,
            )

    def level_stats(self) -> tuple[LevelStats, ...]:
        """Figures of the cache's levels since the start, if it has any."""
        cache = self._cache
        return cache.level_stats() if cache else ()

    def close(self) -> None:
        """Stop reading ahead and let go of the cache. Repeatable."""
        self._ahead.close()
        if self._cache:
            self._cache.close()
        self._cache = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _follow(self, mixture: Mixture | None, step: int) -> tuple[Mixture, int]:
        """Go by what a caller knows of the mixture, if it knows more, or other things."""
        with self._ahead.lock:
            if mixture is not None and not self._mixture.agrees_with(mixture):
                # Another attempt decided otherwise: what was read ahead is not its future.
                self._mixture = mixture
                self._ahead.clear()
            elif mixture is not None and not self._knows(mixture, step):
                self._mixture = mixture
                self._ahead.look()
            return self._mixture, self._ahead.generation

    def _knows(self, mixture: Mixture, step: int) -> bool:
        """Whether a rank that lags knows less, and nothing else."""
        known = self._mixture
        return known.first <= step * self.batch_size and (
            known.end is None or (mixture.end is not None and mixture.end <= known.end)
        )

    def _end(self) -> int | None:
        """The first step that is not decided yet."""
        end = self._mixture.end
        return None if end is None else end // self.batch_size

    def _read_by(self, mixture: Mixture, step: int) -> tuple[Batch, int]:
        # One thread at a time; the others go on.
        if self._announcer and self._announcing.acquire(blocking=False):
            try:
                self._announcer.at(step)
            finally:
                self._announcing.release()
        ids = self._ids(self.split, step, self.order_seed, mixture)
        batch = self._read(self.split, step, ids[self._part])
        return batch, batch.samples.nbytes

    def _read(self, split: Split, step: int, ids: IntArray) -> Batch:
        started = self._clock()
        samples = self._samples(split, ids)
        took_s = self._clock() - started
        with self._counting:
            self._read_s += took_s
        return Batch(step, ids, samples, self.dataset.layout)

    def _ids(self, split: Split, step: int, seed: int, mixture: Mixture) -> IntArray:
        """The sample ids of a step; those of many steps are computed together, which is cheaper."""
        sizes, batch_size = self.dataset.sizes(split), self.batch_size
        chunk, place = divmod(step, CHUNK_STEPS)
        known = self._known_ids
        if known is None or known[0] != (split, chunk, seed) or known[1] is not mixture:
            first, count = chunk * CHUNK_STEPS * batch_size, CHUNK_STEPS * batch_size
            if mixture.first > first or (mixture.end is not None and mixture.end < first + count):
                # Not all of them are decided.
                return mixed_batch_ids(seed, sizes, mixture, step, batch_size)
            ids = mixed_batch_ids(seed, sizes, mixture, chunk, count)
            # One assignment: threads that read ahead and callers may all get here.
            known = self._known_ids = ((split, chunk, seed), mixture, ids)
        return known[2][place * batch_size : (place + 1) * batch_size]

    def _samples(self, split: Split, ids: IntArray) -> SampleArray:
        cache = self._cache
        if cache is None:
            return self.dataset.read(split, ids)
        stream = self.dataset.split(split)

        def fetch(blocks: list[int]) -> list[TokenArray]:
            keys = [self._key(split, block) for block in blocks]
            values = cache.get_or_compute_many(
                keys, lambda missing: [stream.read_block(blocks[i]).tobytes() for i in missing]
            )
            return [
                # The cache checks that it gives back what it was given; this, that it was the
                # block.
                np.frombuffer(value, dtype=stream.dtype)
                if zlib.crc32(value) == stream.block_crc(block)
                else stream.read_block(block)
                for block, value in zip(blocks, values, strict=True)
            ]

        return stream.read_through(ids, fetch)

    def _key(self, split: Split, block: int) -> bytes:
        return f"{self.dataset.digest}:{split}:{block}".encode()

    def _keys_of(self, step: int) -> list[bytes] | None:
        """What the cache will be asked for at a step; None if that is not decided."""
        end = self._end()
        if end is not None and step >= end:
            return None
        ids = self._ids(self.split, step, self.order_seed, self._mixture)[self._part]
        blocks = self.dataset.split(self.split).blocks_of(ids)
        return [self._key(self.split, block) for block in blocks]
