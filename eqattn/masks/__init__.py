"""Masks: which key a query may see, as functions of one (query, key) pair.

A mask is a PyTree of call-time data: its arrays are leaves, and its sizes and functions are static.
So a mask without arrays has no leaves, and equal masks have equal treedefs. Masks combine with `&`,
`|` and `~`, and a bool array that is combined with a mask becomes a `Dense`.
"""

import typing as _typing
from collections.abc import Callable as _Callable

from .._misc import late_imports as _late_imports
from .._pairs import Operand as Operand
from ._base import (
    AbstractMask as AbstractMask,
    And as And,
    Dense as Dense,
    Not as Not,
    Or as Or,
    Sparsity as Sparsity,
)
from ._causal import (
    BlockCausal as BlockCausal,
    Causal as Causal,
    ChunkedCausal as ChunkedCausal,
    PrefixLM as PrefixLM,
    SlidingWindow as SlidingWindow,
)
from ._function import MaskFn as MaskFn
from ._segments import (
    KeyPadding as KeyPadding,
    packed_segments as packed_segments,
    PackedSegments as PackedSegments,
    QueryPadding as QueryPadding,
    Segments as Segments,
)


if _typing.TYPE_CHECKING:
    from ._neighbourhood import Neighbourhood as Neighbourhood, TileOrder as TileOrder
    from ._selected import Selected as Selected
    from ._tree import Tree as Tree


# Few programs use these, and making their classes takes a tenth of the time of an import.
__getattr__: _Callable[[str], _typing.Any]
__dir__: _Callable[[], list[str]]
__getattr__, __dir__ = _late_imports(
    __name__,
    {
        "Neighbourhood": "_neighbourhood",
        "Selected": "_selected",
        "TileOrder": "_neighbourhood",
        "Tree": "_tree",
    },
)
