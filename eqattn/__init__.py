"""Exact, memory-efficient attention as immutable Equinox modules."""

import importlib as _importlib
import typing as _typing

from . import masks as masks, scores as scores
from ._attention import attention as attention
from ._blockwise_attn import blockwise_attn as blockwise_attn
from ._carry import Carry as Carry
from ._dot_product import dot_product_attention as dot_product_attention
from ._dropout import dropout_mask as dropout_mask
from ._metadata import (
    AttentionMetadata as AttentionMetadata,
    Backend as Backend,
    Platform as Platform,
    RuntimeMode as RuntimeMode,
)
from ._mixed_batch import ragged_attention as ragged_attention
from ._output import AttentionOutput as AttentionOutput
from ._packed import packed_segments as packed_segments, PackedSegments as PackedSegments
from ._partition import PartitionAxis as PartitionAxis, PartitionManager as PartitionManager
from ._ragged_attention import (
    get_mha_cost_estimate as get_mha_cost_estimate,
    ragged_gqa as ragged_gqa,
    ragged_mha as ragged_mha,
    ragged_mqa as ragged_mqa,
    reference_gqa as reference_gqa,
    reference_mha as reference_mha,
    reference_mqa as reference_mqa,
)
from ._ragged_kernel import ragged_flash_attention_kernel as ragged_flash_attention_kernel
from ._registry import AttentionRegistry as AttentionRegistry
from ._ring_attention import (
    BwdParams as BwdParams,
    FwdParams as FwdParams,
    ring_attention as ring_attention,
)
from ._ring_layout import (
    AbstractRingLayout as AbstractRingLayout,
    Contiguous as Contiguous,
    ring_mesh as ring_mesh,
    Zigzag as Zigzag,
)
from ._ring_plan import ring_plan as ring_plan, RingPlan as RingPlan
from ._save import load as load, save as save
from .masks import (
    BlockCausal as BlockCausal,
    Causal as Causal,
    ChunkedCausal as ChunkedCausal,
    Dense as DenseMask,
    KeyPadding as KeyPadding,
    MaskFn as MaskFn,
    PrefixLM as PrefixLM,
    QueryPadding as QueryPadding,
    Segments as Segments,
    SlidingWindow as SlidingWindow,
    Tree as Tree,
)
from .scores import ALiBi as ALiBi, ScoreFn as ScoreFn, T5Bias as T5Bias
from .strategies import (
    AttentionImpl as AttentionImpl,
    Blockwise as Blockwise,
    Dense as Dense,
    Ragged as Ragged,
    Ring as Ring,
    Ring as RingAttn,
    Support as Support,
    Ulysses as Ulysses,
)


if _typing.TYPE_CHECKING:
    from . import cache as cache, nn as nn

__version__ = "0.1.0"


def __getattr__(name: str) -> _typing.Any:
    if name in ("cache", "nn"):  # when first used, so that they cost those nothing who need none
        return _importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
