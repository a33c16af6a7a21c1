"""The feature cache: values by content key, in Redis or in memory, evicted by LRU-K."""

from eagleray.actors.cache.feature_cache import CacheStats, FeatureCache, ValueStore, open_cache
from eagleray.actors.cache.touches import TouchBatch, TouchSink

__all__ = ["CacheStats", "FeatureCache", "TouchBatch", "TouchSink", "ValueStore", "open_cache"]
