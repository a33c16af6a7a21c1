"""LRU-K whose window and history are those that would have hit most.

What is right for one kind of reference is wrong for another: bursts want a window as large as the
cache, which is LRU; lasting popularity a small one; and where everything is read once per epoch,
remembering what left does harm, as what came last is needed last. So a few settings are tried in
miniature: each runs over those references whose keys have a small hash, with as small a share of
the room, and the one with the most hits is used for all.

    setting  window, as a share of the room; keys in the history for each resident key
    rate     share of the keys that are sampled; it is halved whenever a miniature outgrows its
             bound, so large caches cost little more than LRU-K and small ones are tried as they are

Source: Waldspurger et al., "Cache modeling and optimization using miniature simulations", USENIX
ATC 2017; the falling rate: Waldspurger et al., "Efficient MRC construction with SHARDS", FAST 2015.
"""

import zlib
from dataclasses import dataclass, field

from eagleray.actors.cache.policies.lru_k import LruK

_MAX_HISTORY = 1 << 20
_HASHES = 1 << 32
# Measured: python -m benchmarks.eviction
_MAX_SAMPLED = 256
_REFERENCES_PER_CHOICE = 512
_DECAY = 0.9
_LEAD = 0.5  # standard deviations of the number of hits


@dataclass
class _Setting:
    window_share: float
    history_share: float
    miniature: LruK = field(init=False)
    hits: float = 0.0


class AdaptiveLruK(LruK):
    """LRU-K under the setting that its miniatures find best.

    Args:
        max_bytes: The budget.
        k: References that decide.
    """

    def __init__(self, max_bytes: int, k: int = 2) -> None:
        self._settings = [
            _Setting(0.1, 1),
            _Setting(1, 0),
            _Setting(0.3, 1),
            _Setting(0.01, 1),
            _Setting(0.01, 0),
        ]
        self._used = self._settings[0]
        super().__init__(k, _MAX_HISTORY, *self._limits(self._used, max_bytes))
        self._max_bytes = max_bytes
        self._hash_limit = _HASHES
        self._sampled = 0
        for one in self._settings:
            one.miniature = LruK(k, _MAX_HISTORY, *self._limits(one, max_bytes))

    def touch(self, key: bytes, size: int) -> None:
        """Note a reference; the key is resident from now on, with this size in bytes."""
        if zlib.crc32(key) < self._hash_limit:
            self._sample(key, size)
        super().touch(key, size)

    def _sample(self, key: bytes, size: int) -> None:
        room = self._room()
        for one in self._settings:
            one.hits += key in one.miniature
            one.miniature.touch(key, size)
            while one.miniature.total_bytes > room:
                victim = one.miniature.victim()
                assert victim is not None, "what is over the budget is resident"
                one.miniature.remove(victim)
        while max(len(one.miniature) for one in self._settings) > _MAX_SAMPLED:
            self._halve_rate()
        self._sampled += 1
        if self._sampled == _REFERENCES_PER_CHOICE:
            self._choose()

    def _halve_rate(self) -> None:
        self._hash_limit //= 2
        for one in self._settings:
            one.miniature.forget(lambda key: zlib.crc32(key) >= self._hash_limit)
            one.miniature.adjust(*self._limits(one, self._room()))

    def _choose(self) -> None:
        """Use the best setting, if it is ahead by more than chance would have it."""
        best = max(self._settings, key=lambda one: one.hits)
        if best.hits > self._used.hits + _LEAD * self._used.hits**0.5:
            self._used = best
            self.adjust(*self._limits(best, self._max_bytes))
        for one in self._settings:
            one.hits *= _DECAY
        self._sampled = 0

    def _room(self) -> float:
        """Bytes of a miniature."""
        return self._max_bytes * self._hash_limit / _HASHES

    @staticmethod
    def _limits(setting: _Setting, room: float) -> tuple[float, float]:
        return setting.window_share * room, setting.history_share
