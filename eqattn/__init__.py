"""Exact, memory-efficient attention as immutable Equinox modules."""

import importlib as _importlib
import sys as _sys
import typing as _typing

from ._misc import late_imports as _late_imports
from ._version import __version__ as __version__


if _typing.TYPE_CHECKING:
    from . import cache, masks, nn, scores, stats, strategies
    from ._calls.attention import attention as attention
    from ._calls.cascade import cascade_attention as cascade_attention
    from ._calls.ragged import ragged_attention as ragged_attention
    from ._carry import Carry as Carry
    from ._config.metadata import AttentionMetadata as AttentionMetadata
    from ._config.partition import (
        PartitionAxis as PartitionAxis,
        PartitionManager as PartitionManager,
    )
    from ._config.platform import (
        Backend as Backend,
        Platform as Platform,
        RuntimeMode as RuntimeMode,
    )
    from ._output import AttentionOutput as AttentionOutput
    from ._ring.balanced import Balanced as Balanced
    from ._ring.choice import (
        Sharding as Sharding,
        sharding_plan as sharding_plan,
        ShardingPlan as ShardingPlan,
    )
    from ._ring.layout import (
        AbstractRingLayout as AbstractRingLayout,
        Contiguous as Contiguous,
        ring_mesh as ring_mesh,
        Zigzag as Zigzag,
    )
    from ._ring.plan import ring_plan as ring_plan, RingPlan as RingPlan
    from ._save import load as load, save as save
    from .compat.easydel import (
        get_mha_cost_estimate as get_mha_cost_estimate,
        ragged_flash_attention_kernel as ragged_flash_attention_kernel,
        ragged_gqa as ragged_gqa,
        ragged_mha as ragged_mha,
        ragged_mqa as ragged_mqa,
        reference_gqa as reference_gqa,
        reference_mha as reference_mha,
        reference_mqa as reference_mqa,
    )
    from .compat.ejkernel import (
        blockwise_attn as blockwise_attn,
        BwdParams as BwdParams,
        FwdParams as FwdParams,
        ring_attention as ring_attention,
    )
    from .compat.jax_nn import dot_product_attention as dot_product_attention
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
    )
    from .masks._neighbourhood import Neighbourhood as Neighbourhood, TileOrder as TileOrder
    from .masks._segments import (
        packed_segments as packed_segments,
        PackedSegments as PackedSegments,
    )
    from .masks._selected import Selected as Selected
    from .masks._tree import Tree as Tree
    from .scores import ALiBi as ALiBi, ScoreFn as ScoreFn
    from .scores._dropout import dropout_mask as dropout_mask
    from .scores._positional import T5Bias as T5Bias
    from .stats._top_keys import top_keys as top_keys, TopKeys as TopKeys
    from .strategies import (
        AllGather as AllGather,
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


# A name is imported when it is first asked for. So a program that uses one mask makes no classes of
# rings. These are the names, by the module that defines them. Type checkers read the imports above,
# and `tests/unit/test_import.py` compares the two.
_ROOMS = ("cache", "masks", "nn", "scores", "stats", "strategies")
_LATE = {
    "_calls.attention": "attention",
    "_calls.cascade": "cascade_attention",
    "_calls.ragged": "ragged_attention",
    "_carry": "Carry",
    "_config.metadata": "AttentionMetadata",
    "_config.partition": "PartitionAxis PartitionManager",
    "_config.platform": "Backend Platform RuntimeMode",
    "_output": "AttentionOutput",
    "_ring.balanced": "Balanced",
    "_ring.choice": "Sharding sharding_plan ShardingPlan",
    "_ring.layout": "AbstractRingLayout Contiguous ring_mesh Zigzag",
    "_ring.plan": "ring_plan RingPlan",
    "_save": "load save",
    "compat.easydel": (
        "get_mha_cost_estimate ragged_flash_attention_kernel ragged_gqa ragged_mha ragged_mqa "
        "reference_gqa reference_mha reference_mqa"
    ),
    "compat.ejkernel": "blockwise_attn BwdParams FwdParams ring_attention",
    "compat.jax_nn": "dot_product_attention",
    "masks": (
        "BlockCausal Causal ChunkedCausal KeyPadding MaskFn PrefixLM QueryPadding Segments "
        "SlidingWindow"
    ),
    "masks._neighbourhood": "Neighbourhood TileOrder",
    "masks._segments": "packed_segments PackedSegments",
    "masks._selected": "Selected",
    "masks._tree": "Tree",
    "scores": "ALiBi ScoreFn",
    "scores._dropout": "dropout_mask",
    "scores._positional": "T5Bias",
    "stats._top_keys": "top_keys TopKeys",
    "strategies": "AllGather AttentionImpl Blockwise Dense Ragged Ring Support Ulysses",
    "strategies._registry": "AttentionRegistry",
}
_MODULE_OF = {name: module for module, names in _LATE.items() for name in names.split()}
_MODULE_OF |= {"DenseMask": "masks:Dense", "RingAttn": "strategies:Ring"}


_late_name, _late_dir = _late_imports(__name__, _MODULE_OF)


def __getattr__(name: str) -> _typing.Any:
    if name in _ROOMS:
        return _importlib.import_module(f".{name}", __name__)
    return _late_name(name)


def __dir__() -> list[str]:
    return sorted({*_late_dir(), *_ROOMS})


# Without it, a star would import late names only if something had asked for them before. A type
# checker takes what a star imports from the imports above, as it could not read this list.
if not _typing.TYPE_CHECKING:
    __all__ = [*_ROOMS, *_MODULE_OF]


# The hook of jaxtyping has types checked in what is imported while it is installed, which may be
# no longer than this import. So then nothing is late.
if any(type(finder).__module__.startswith("jaxtyping.") for finder in _sys.meta_path):
    for _name in (*_ROOMS, *_MODULE_OF):
        __getattr__(_name)
