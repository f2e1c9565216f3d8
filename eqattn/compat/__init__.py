"""Functions and classes with the names and signatures of other libraries."""

import typing as _typing
from collections.abc import Callable as _Callable

from .._misc import late_imports as _late_imports


if _typing.TYPE_CHECKING:
    from .._config.partition import (
        PartitionAxis as PartitionAxis,
        PartitionManager as PartitionManager,
    )
    from .._config.platform import RuntimeMode as RuntimeMode
    from .easydel import (
        get_mha_cost_estimate as get_mha_cost_estimate,
        ragged_flash_attention_kernel as ragged_flash_attention_kernel,
        ragged_gqa as ragged_gqa,
        ragged_mha as ragged_mha,
        ragged_mqa as ragged_mqa,
        reference_gqa as reference_gqa,
        reference_mha as reference_mha,
        reference_mqa as reference_mqa,
        RingAttn as RingAttn,
    )
    from .ejkernel import (
        blockwise_attn as blockwise_attn,
        BwdParams as BwdParams,
        FwdParams as FwdParams,
        ring_attention as ring_attention,
    )
    from .jax_nn import dot_product_attention as dot_product_attention


# A program that comes from one library asks for the names of no other.
__getattr__: _Callable[[str], _typing.Any]
__dir__: _Callable[[], list[str]]
__getattr__, __dir__ = _late_imports(
    __name__,
    {
        "dot_product_attention": "jax_nn",
        **dict.fromkeys("blockwise_attn BwdParams FwdParams ring_attention".split(), "ejkernel"),
        **dict.fromkeys(
            (
                "get_mha_cost_estimate ragged_flash_attention_kernel ragged_gqa ragged_mha "
                "ragged_mqa reference_gqa reference_mha reference_mqa RingAttn"
            ).split(),
            "easydel",
        ),
        "PartitionAxis": "._config.partition",
        "PartitionManager": "._config.partition",
        "RuntimeMode": "._config.platform",
    },
)
