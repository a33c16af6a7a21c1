"""Eviction policies: which key goes next. They hold no values and do no I/O."""

from eagleray.actors.cache.policies.lru_k import LruK

__all__ = ["LruK"]
