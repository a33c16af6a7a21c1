"""Tells the cache which blocks a loader will look up, as its order is known long before.

It runs ahead by chunks of steps, at most two per call, so that no batch waits for it.
"""

from collections.abc import Callable

from eagleray.actors.cache import FeatureCache

CHUNK_STEPS = 64
MAX_KEYS_AHEAD = 65_536
_CHUNKS_PER_CALL = 2

KeysOf = Callable[[int], list[bytes] | None]
"""Keys that a step looks up; None: not decided yet."""


class Announcer:
    """What one loader has told. Not for several threads.

    Args:
        cache: Whom it tells.
        keys_of: What a step will look up.
    """

    def __init__(self, cache: FeatureCache, keys_of: KeysOf) -> None:
        self._cache, self._keys_of = cache, keys_of
        # Chunks from `_from` up to `_told` have been announced, with so many keys.
        self._from, self._told = 0, 0
        self._counts: dict[int, int] = {}

    def at(self, step: int) -> None:
        """Note that a step is read; announce what comes."""
        chunk = step // CHUNK_STEPS
        if not self._from <= chunk <= self._told:
            # Another place: a run that was resumed, or begins.
            self._from = self._told = chunk
            self._counts.clear()
        for old in range(self._from, chunk):
            self._counts.pop(old, None)
        self._from = chunk
        for _ in range(_CHUNKS_PER_CALL):
            if sum(self._counts.values()) >= MAX_KEYS_AHEAD or not self._tell(step):
                return

    def _tell(self, now: int) -> bool:
        first = self._told * CHUNK_STEPS
        uses = []
        for step in range(max(first, now), first + CHUNK_STEPS):
            keys = self._keys_of(step)
            if keys is None:
                return False
            uses.append((step, keys))
        self._cache.expect(now, uses)
        self._counts[self._told] = sum(len(keys) for _, keys in uses)
        self._told += 1
        return True
