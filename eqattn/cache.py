"""Keys and values of earlier tokens, as immutable modules: for decoding and serving."""

from ._cache_base import AbstractCache as AbstractCache
from ._caches import (
    KVCache as KVCache,
    QuantizedKVCache as QuantizedKVCache,
    RingBufferCache as RingBufferCache,
)
from ._paged_cache import PagedKVCache as PagedKVCache
from ._stacked_cache import LayerCache as LayerCache, StackedKVCache as StackedKVCache
from ._stored import AbstractStored as AbstractStored, Pages as Pages, Quantized as Quantized
