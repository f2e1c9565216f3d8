"""What is visible: masks as functions of one (query, key) pair, with `&`, `|` and `~`."""

from ._masks import (
    AbstractMask as AbstractMask,
    And as And,
    BlockCausal as BlockCausal,
    Causal as Causal,
    ChunkedCausal as ChunkedCausal,
    Dense as Dense,
    KeyPadding as KeyPadding,
    MaskFn as MaskFn,
    Not as Not,
    Or as Or,
    PrefixLM as PrefixLM,
    QueryPadding as QueryPadding,
    Segments as Segments,
    SlidingWindow as SlidingWindow,
    Sparsity as Sparsity,
    Tree as Tree,
)
from ._pairs import Operand as Operand
