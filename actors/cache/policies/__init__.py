"""Eviction policies: which key goes next. They hold no values and do no I/O."""

from typing import Literal

from eagleray.actors.cache.policies.adaptive_lru_k import AdaptiveLruK
from eagleray.actors.cache.policies.lru import Lru
from eagleray.actors.cache.policies.lru_k import LruK
from eagleray.actors.cache.policies.no_evict import NoEvict
from eagleray.actors.cache.policies.policy import EvictionPolicy
from eagleray.actors.cache.policies.s3_fifo import S3Fifo
from eagleray.actors.cache.policies.scheduled import Scheduled
from eagleray.actors.cache.policies.w_tinylfu import WTinyLfu

PolicyName = Literal["lru-k", "lru", "s3-fifo", "w-tinylfu", "no-evict", "auto"]


def make_policy(name: PolicyName, max_bytes: int, k: int = 2) -> EvictionPolicy:
    """A policy by the name that the configuration gives it.

    Args:
        name: As in `data.cache.policy`.
        max_bytes: The budget.
        k: K of LRU-K, which `auto` uses for what nobody expects.

    Raises:
        ValueError: There is no policy of this name.
    """
    match name:
        case "lru-k":
            return AdaptiveLruK(max_bytes, k)
        case "lru":
            return Lru()
        case "s3-fifo":
            return S3Fifo(max_bytes)
        case "w-tinylfu":
            return WTinyLfu(max_bytes)
        case "no-evict":
            return NoEvict(max_bytes)
        case "auto":
            return Scheduled(max_bytes, k)
    raise ValueError(f"there is no eviction policy {name!r}")


__all__ = [
    "AdaptiveLruK",
    "EvictionPolicy",
    "Lru",
    "LruK",
    "NoEvict",
    "PolicyName",
    "S3Fifo",
    "Scheduled",
    "WTinyLfu",
    "make_policy",
]
