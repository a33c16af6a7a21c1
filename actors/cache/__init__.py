"""The feature cache: values by content key, in node memory, in Redis and on a disk."""

from eagleray.actors.cache.feature_cache import CacheStats, FeatureCache, open_cache
from eagleray.actors.cache.touches import TouchBatch, TouchSink
from eagleray.actors.cache.transforms import TransformCache
from eagleray.actors.cache.value_store import ValueStore

__all__ = [
    "CacheStats",
    "FeatureCache",
    "TouchBatch",
    "TouchSink",
    "TransformCache",
    "ValueStore",
    "open_cache",
]
