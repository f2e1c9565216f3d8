"""Caches hold the keys and values of earlier tokens, as immutable modules, for decoding."""

from .._problem.bits import Bits as Bits
from .._problem.joined import Joined as Joined
from .._problem.storage import (
    AbstractStored as AbstractStored,
    Pages as Pages,
    Quantized as Quantized,
)
from ._base import AbstractCache as AbstractCache
from ._contiguous import KVCache as KVCache
from ._latent import LatentKVCache as LatentKVCache
from ._paged import PagedKVCache as PagedKVCache
from ._quantized import QuantizedKVCache as QuantizedKVCache
from ._ring_buffer import RingBufferCache as RingBufferCache
from ._stacked import LayerCache as LayerCache, StackedKVCache as StackedKVCache
from ._stacked_paged import (
    PagedLayerCache as PagedLayerCache,
    StackedPagedKVCache as StackedPagedKVCache,
)
