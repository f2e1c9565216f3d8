"""Strategies say where and in which order (query, key) pairs are visited."""

import typing as _typing
from collections.abc import Callable as _Callable

from .._misc import late_imports as _late_imports
from .._problem.problem import Problem as Problem
from .._ring.layout import (
    AbstractRingLayout as AbstractRingLayout,
    Contiguous as Contiguous,
    ring_mesh as ring_mesh,
    Zigzag as Zigzag,
)
from .._ring.plan import ring_plan as ring_plan, RingPlan as RingPlan
from ._base import AttentionImpl as AttentionImpl, Support as Support
from ._fold_strategy import AbstractFoldStrategy as AbstractFoldStrategy
from ._on_device import accumulate_in_fp32 as accumulate_in_fp32, fold as fold
from ._registry import AttentionRegistry as AttentionRegistry
from .all_gather import AllGather as AllGather
from .blockwise import Blockwise as Blockwise
from .dense import Dense as Dense
from .ragged import Ragged as Ragged
from .ring import Ring as Ring
from .ulysses import Ulysses as Ulysses


if _typing.TYPE_CHECKING:
    from .._ring.balanced import Balanced as Balanced
    from .._ring.choice import (
        Sharding as Sharding,
        sharding_plan as sharding_plan,
        ShardingPlan as ShardingPlan,
    )


AbstractExact = AbstractFoldStrategy
"""`AbstractFoldStrategy` had this name in version 0.1."""


# Few programs use these.
__getattr__: _Callable[[str], _typing.Any]
__dir__: _Callable[[], list[str]]
__getattr__, __dir__ = _late_imports(
    __name__,
    {
        "Balanced": "._ring.balanced",
        **dict.fromkeys("Sharding sharding_plan ShardingPlan".split(), "._ring.choice"),
    },
)
