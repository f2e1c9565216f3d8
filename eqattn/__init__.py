"""Exact, memory-efficient attention as immutable Equinox modules."""

import importlib as _importlib
import typing as _typing

from . import masks as masks, scores as scores
from ._attention import attention as attention
from ._carry import Carry as Carry
from ._config.metadata import AttentionMetadata as AttentionMetadata
from ._config.partition import PartitionAxis as PartitionAxis, PartitionManager as PartitionManager
from ._config.platform import Backend as Backend, Platform as Platform, RuntimeMode as RuntimeMode
from ._output import AttentionOutput as AttentionOutput
from ._ragged_attention import ragged_attention as ragged_attention
from ._ring.layout import (
    AbstractRingLayout as AbstractRingLayout,
    Contiguous as Contiguous,
    ring_mesh as ring_mesh,
    Zigzag as Zigzag,
)
from ._ring.plan import ring_plan as ring_plan, RingPlan as RingPlan
from ._save.save import load as load, save as save
from .compat.blockwise import blockwise_attn as blockwise_attn
from .compat.dot_product import dot_product_attention as dot_product_attention
from .compat.ragged import (
    get_mha_cost_estimate as get_mha_cost_estimate,
    ragged_gqa as ragged_gqa,
    ragged_mha as ragged_mha,
    ragged_mqa as ragged_mqa,
    reference_gqa as reference_gqa,
    reference_mha as reference_mha,
    reference_mqa as reference_mqa,
)
from .compat.ragged_kernel import ragged_flash_attention_kernel as ragged_flash_attention_kernel
from .compat.ring import (
    BwdParams as BwdParams,
    FwdParams as FwdParams,
    ring_attention as ring_attention,
)
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
    Selected as Selected,
    SlidingWindow as SlidingWindow,
    Tree as Tree,
)
from .masks._packed import packed_segments as packed_segments, PackedSegments as PackedSegments
from .scores import ALiBi as ALiBi, ScoreFn as ScoreFn, T5Bias as T5Bias
from .scores._dropout import dropout_mask as dropout_mask
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
from .strategies._registry import AttentionRegistry as AttentionRegistry


if _typing.TYPE_CHECKING:
    from . import cache as cache, nn as nn

from ._version import __version__ as __version__


def __getattr__(name: str) -> _typing.Any:
    if name in ("cache", "nn"):  # when first used, so that they cost those nothing who need none
        return _importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
