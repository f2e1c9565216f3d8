"""Exact, memory-efficient attention as immutable Equinox modules."""

import importlib as _importlib
import sys as _sys
import typing as _typing

from ._misc import late_imports as _late_imports
from ._version import __version__ as __version__


if _typing.TYPE_CHECKING:
    from . import cache, compat, masks, nn, scores, stats, strategies
    from ._calls.attention import attention as attention
    from ._calls.cascade import cascade_attention as cascade_attention
    from ._calls.ragged import ragged_attention as ragged_attention
    from ._carry import Carry as Carry
    from ._config.metadata import AttentionMetadata as AttentionMetadata
    from ._config.platform import Backend as Backend, Platform as Platform
    from ._output import AttentionOutput as AttentionOutput
    from .compat import (
        blockwise_attn as blockwise_attn,
        BwdParams as BwdParams,
        dot_product_attention as dot_product_attention,
        FwdParams as FwdParams,
        get_mha_cost_estimate as get_mha_cost_estimate,
        PartitionAxis as PartitionAxis,
        PartitionManager as PartitionManager,
        ragged_flash_attention_kernel as ragged_flash_attention_kernel,
        ragged_gqa as ragged_gqa,
        ragged_mha as ragged_mha,
        ragged_mqa as ragged_mqa,
        reference_gqa as reference_gqa,
        reference_mha as reference_mha,
        reference_mqa as reference_mqa,
        ring_attention as ring_attention,
        RingAttn as RingAttn,
        RuntimeMode as RuntimeMode,
    )
    from .masks import (
        BlockCausal as BlockCausal,
        Causal as Causal,
        ChunkedCausal as ChunkedCausal,
        Dense as DenseMask,
        KeyPadding as KeyPadding,
        MaskFn as MaskFn,
        Neighbourhood as Neighbourhood,
        packed_segments as packed_segments,
        PackedSegments as PackedSegments,
        PrefixLM as PrefixLM,
        QueryPadding as QueryPadding,
        Segments as Segments,
        Selected as Selected,
        SlidingWindow as SlidingWindow,
        TileOrder as TileOrder,
        Tree as Tree,
    )
    from .scores import (
        ALiBi as ALiBi,
        dropout_mask as dropout_mask,
        ScoreFn as ScoreFn,
        T5Bias as T5Bias,
    )
    from .stats import top_keys as top_keys, TopKeys as TopKeys
    from .strategies import (
        AbstractRingLayout as AbstractRingLayout,
        AllGather as AllGather,
        AttentionImpl as AttentionImpl,
        AttentionRegistry as AttentionRegistry,
        Balanced as Balanced,
        Blockwise as Blockwise,
        Contiguous as Contiguous,
        Dense as Dense,
        Ragged as Ragged,
        Ring as Ring,
        ring_mesh as ring_mesh,
        ring_plan as ring_plan,
        RingPlan as RingPlan,
        Sharding as Sharding,
        sharding_plan as sharding_plan,
        ShardingPlan as ShardingPlan,
        Support as Support,
        Ulysses as Ulysses,
        Zigzag as Zigzag,
    )


# The public names by category, each with the module that it is imported from when it is first asked
# for. So a program that uses one mask makes no classes of rings. Type checkers read the imports
# above, and `tests/unit/test_import.py` compares the two.
_ROOMS = ("cache", "compat", "masks", "nn", "scores", "stats", "strategies")
_LISTED = {
    # Functions
    "attention": "_calls.attention",
    "ragged_attention": "_calls.ragged",
    "cascade_attention": "_calls.cascade",
    "top_keys": "stats",
    # What they take and return
    "AttentionMetadata": "_config.metadata",
    "Platform": "_config.platform",
    "Backend": "_config.platform",
    "AttentionOutput": "_output",
    "Carry": "_carry",
    # Strategies, and the layouts of rings
    **dict.fromkeys(
        (
            "AllGather AttentionImpl AttentionRegistry Blockwise Dense Ragged Ring Ulysses "
            "Balanced Contiguous Zigzag"
        ).split(),
        "strategies",
    ),
    # Masks
    **dict.fromkeys(
        (
            "BlockCausal Causal ChunkedCausal KeyPadding MaskFn Neighbourhood PrefixLM "
            "QueryPadding Segments Selected SlidingWindow Tree"
        ).split(),
        "masks",
    ),
    "DenseMask": "masks:Dense",
    # Scores
    **dict.fromkeys("ALiBi ScoreFn T5Bias".split(), "scores"),
}
# These are at home in a room, where the documentation has them. They are found here too.
_UNLISTED = {
    **dict.fromkeys(
        (
            "blockwise_attn BwdParams dot_product_attention FwdParams get_mha_cost_estimate "
            "PartitionAxis PartitionManager ragged_flash_attention_kernel ragged_gqa ragged_mha "
            "ragged_mqa reference_gqa reference_mha reference_mqa ring_attention RingAttn "
            "RuntimeMode"
        ).split(),
        "compat",
    ),
    **dict.fromkeys("packed_segments PackedSegments TileOrder".split(), "masks"),
    "dropout_mask": "scores",
    "TopKeys": "stats",
    **dict.fromkeys(
        (
            "AbstractRingLayout ring_mesh ring_plan RingPlan Sharding sharding_plan ShardingPlan "
            "Support"
        ).split(),
        "strategies",
    ),
}
_GONE = dict.fromkeys(
    ("load", "save"),
    "use eqx.tree_serialise_leaves and tree_deserialise_leaves, with AttentionMetadata.to_json for "
    "what is static",
)

_MODULE_OF = _LISTED | _UNLISTED
_late_name = _late_imports(__name__, _MODULE_OF)[0]


def __getattr__(name: str) -> _typing.Any:
    if name in _ROOMS:
        return _importlib.import_module(f".{name}", __name__)
    if name in _GONE:
        raise AttributeError(f"eqattn.{name} is gone: {_GONE[name]}.")
    return _late_name(name)


def __dir__() -> list[str]:
    # The module has the names that were asked for, whether they are listed or not.
    return sorted({*globals(), *_ROOMS, *_LISTED} - {*_UNLISTED})


# Without it, a star would import late names only if something had asked for them before. A type
# checker takes what a star imports from the imports above, as it could not read this list.
if not _typing.TYPE_CHECKING:
    __all__ = [*_ROOMS, *_LISTED]


# The hook of jaxtyping has types checked in what is imported while it is installed, which may be
# no longer than this import. So then nothing is late.
if any(type(finder).__module__.startswith("jaxtyping.") for finder in _sys.meta_path):
    for _name in (*_ROOMS, *_MODULE_OF):
        __getattr__(_name)
