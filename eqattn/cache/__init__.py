"""Caches hold the keys and values of earlier tokens, as immutable modules, for decoding."""

from .._problem.storage import (
    AbstractStored as AbstractStored,
    Bitcast as Bitcast,
    LatentKV as LatentKV,
    Pages as Pages,
    Quantized as Quantized,
)
from ._base import AbstractCache as AbstractCache
from ._contiguous import (
    KVCache as KVCache,
    QuantizedKVCache as QuantizedKVCache,
    RingBufferCache as RingBufferCache,
)
from ._latent import LatentKVCache as LatentKVCache
from ._paged import PagedKVCache as PagedKVCache, StackedPagedKVCache as StackedPagedKVCache
from ._stacked import LayerCache as LayerCache, StackedKVCache as StackedKVCache
