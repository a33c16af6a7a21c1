"""Batches by step: read ahead in a thread, through the feature cache, the same whatever happens.

    B = batch_size, T = seq_len

A batch is a pure function of (dataset, seed, mixture, step, B). The loader keeps no position: to
resume is to ask for another step, and the read-ahead follows. At most prefetch + 2 batches behind
it are held.
"""

import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Self

import numpy as np

from eagleray.actors.cache import FeatureCache
from eagleray.actors.cache.levels import LevelStats
from eagleray.actors.data.batch import Batch, LoaderStats
from eagleray.actors.data.dataset import Dataset, IntArray, SampleArray, Split
from eagleray.actors.data.mixing import stratified
from eagleray.actors.data.mixture import Mixture
from eagleray.actors.data.order import mixed_batch_ids, slice_bounds
from eagleray.actors.data.shards import TokenArray

logger = logging.getLogger(__name__)

_KEEP_BEHIND = 2
_CHUNK_STEPS = 64
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
        prefetch_batches: Steps read ahead; 0: none, and no thread.
        mixture: Of the dataset's domains; None: in the ratio of their sizes.
        rank: With `world_size`, which part of each batch is read; evaluation batches are whole.
        world_size: Into how many equal parts batches are cut; 1: they are read whole.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: Split,
        order_seed: int,
        batch_size: int,
        cache: FeatureCache | None = None,
        prefetch_batches: int = 4,
        mixture: Mixture | None = None,
        rank: int = 0,
        world_size: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.dataset, self.split = dataset, split
        self.order_seed, self.batch_size = order_seed, batch_size
        self._part = slice(*slice_bounds(batch_size, rank, world_size))
        self._cache, self._clock = cache, clock
        self._mixture = mixture or stratified(dataset.sizes(split))
        self._held_out = stratified(dataset.sizes("eval"))
        self._prefetch = prefetch_batches
        self._reading = threading.Lock()
        self._changed = threading.Condition()
        self._batches: dict[int, Batch] = {}
        self._in_hand: int | None = None
        self._aim: int | None = None
        self._is_closed = False
        self._stats = LoaderStats()
        self._known_ids: tuple[tuple[Split, int, int], Mixture, IntArray] | None = None
        self._thread = threading.Thread(target=self._read_ahead, name="read-ahead", daemon=True)
        if prefetch_batches:
            self._thread.start()

    def batch(self, step: int, mixture: Mixture | None = None) -> Batch:
        """The global batch of a step, counted from 0; its arrays are shared: do not write to them.

        Args:
            step: Counted from 0.
            mixture: What has been decided by now, where that follows the losses: from a little
                before this step on, at least up to its end. None: what was given before.

        Raises:
            ValueError: The step is negative, or not decided yet.
            IntegrityError: A block of a shard is damaged; names shard and block.
        """
        started = self._clock()
        with self._changed:
            if mixture is not None:
                self._follow(mixture, step)
            mixture = self._mixture
            self._re_aim(step + 1)
            self._changed.wait_for(lambda: self._in_hand != step)
            batch = self._batches.get(step)
        is_ready = batch is not None
        if batch is None:
            batch = self._read_part(step, mixture)
            with self._changed:
                self._keep(batch)
        self._count(1, int(is_ready), self._clock() - started)
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
        with self._changed:
            return replace(
                self._stats,
                cache_hits=cache.hits if cache else 0,
                cache_misses=cache.misses if cache else 0,
            )

    def level_stats(self) -> tuple[LevelStats, ...]:
        """Figures of the cache's levels since the start, if it has any."""
        cache = self._cache
        return cache.level_stats() if cache else ()

    def close(self) -> None:
        """Stop reading ahead and let go of the cache. Repeatable."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        with self._reading:
            if self._cache:
                self._cache.close()
            self._cache = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _follow(self, mixture: Mixture, step: int) -> None:
        """Go by what a caller knows of the mixture, if it knows more, or other things."""
        known = self._mixture
        if not known.agrees_with(mixture):
            # Another attempt decided otherwise: what was read ahead is not its future.
            self._batches.clear()
            self._aim = None
        elif known.first <= step * self.batch_size and (
            known.end is None or (mixture.end is not None and mixture.end <= known.end)
        ):
            # A rank that lags knows less, and nothing else.
            return
        self._mixture = mixture
        self._changed.notify_all()

    def _re_aim(self, step: int) -> None:
        """Read on from here, unless this is a rank that lags a little behind the others."""
        aim = self._aim
        if aim is None or step > aim or step < aim - _KEEP_BEHIND:
            self._aim = step
            self._drop_far()
            self._changed.notify_all()

    def _keep(self, batch: Batch) -> None:
        self._batches[batch.step] = batch
        self._drop_far()

    def _drop_far(self) -> None:
        aim = self._aim or 0
        wanted = range(aim - 1 - _KEEP_BEHIND, aim + self._prefetch)
        for step in [step for step in self._batches if step not in wanted]:
            del self._batches[step]

    def _next(self) -> int | None:
        if self._aim is None:
            return None
        end = self._mixture.end
        last = self._aim + self._prefetch
        ahead = range(self._aim, last if end is None else min(last, end // self.batch_size))
        return next((step for step in ahead if step not in self._batches), None)

    def _read_ahead(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._next() is not None)
                step = self._next()
                if self._is_closed or step is None:
                    return
                self._in_hand, mixture = step, self._mixture
            batch: Batch | None = None
            try:
                batch = self._read_part(step, mixture)
            except Exception:  # Here the thread must live; who asks for this step meets the error.
                logger.debug("reading ahead failed step=%d", step, exc_info=True)
            with self._changed:
                self._in_hand = None
                if batch is None:
                    self._aim = None
                elif mixture.agrees_with(self._mixture):
                    self._keep(batch)
                self._changed.notify_all()

    def _read_part(self, step: int, mixture: Mixture) -> Batch:
        ids = self._ids(self.split, step, self.order_seed, mixture)
        return self._read(self.split, step, ids[self._part])

    def _read(self, split: Split, step: int, ids: IntArray) -> Batch:
        with self._reading:
            started = self._clock()
            tokens = self._tokens(split, ids)
            took_s = self._clock() - started
        with self._changed:
            self._stats = replace(self._stats, read_s=self._stats.read_s + took_s)
        return Batch(step, ids, tokens, self.dataset.layout)

    def _ids(self, split: Split, step: int, seed: int, mixture: Mixture) -> IntArray:
        """The sample ids of a step; those of many steps are computed together, which is cheaper."""
        sizes, batch_size = self.dataset.sizes(split), self.batch_size
        chunk, place = divmod(step, _CHUNK_STEPS)
        known = self._known_ids
        if known is None or known[0] != (split, chunk, seed) or known[1] is not mixture:
            first, count = chunk * _CHUNK_STEPS * batch_size, _CHUNK_STEPS * batch_size
            if mixture.first > first or (mixture.end is not None and mixture.end < first + count):
                # Not all of them are decided.
                return mixed_batch_ids(seed, sizes, mixture, step, batch_size)
            ids = mixed_batch_ids(seed, sizes, mixture, chunk, count)
            # One assignment: the thread that reads ahead and callers may both get here.
            known = self._known_ids = ((split, chunk, seed), mixture, ids)
        return known[2][place * batch_size : (place + 1) * batch_size]

    def _tokens(self, split: Split, ids: IntArray) -> SampleArray:
        cache = self._cache
        if cache is None:
            return self.dataset.read(split, ids)
        stream = self.dataset.split(split)

        def fetch(blocks: list[int]) -> list[TokenArray]:
            keys = [f"{self.dataset.digest}:{split}:{block}".encode() for block in blocks]
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

    def _count(self, batches: int, ready: int, wait_s: float) -> None:
        with self._changed:
            self._stats = replace(
                self._stats,
                batches=self._stats.batches + batches,
                ready=self._stats.ready + ready,
                wait_s=self._stats.wait_s + wait_s,
            )
