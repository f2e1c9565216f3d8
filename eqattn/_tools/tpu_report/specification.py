"""What there is to know of a kernel in order to measure it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


ROWS, LENGTH, QUERY_HEADS, KV_HEADS = 32, 8192, 32, 8  # of decoding, with head dim 128


@dataclasses.dataclass(frozen=True)
class Whole:
    """Of a causal kernel, what `whole.count` needs: `tokens`, `heads`, and the list's `kept` and
    `lag`.
    """

    tokens: int
    heads: int
    kept: tuple[int, ...]
    lag: int


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel, and the program that it is found in.

    **Arguments:**

    - `name`: in the report.
    - `call`: the name of its `pallas_call`, of which the program has one.
    - `build`: returns a function and its abstract arguments, a PyTree each.
    - `tile`: returns how many queries and keys a step of the grid has; called while the kernel is
        compiled.
    - `products`: multiplications for each pair of query and key: the sum, over the products that
        such a kernel cannot do without, of the size that they contract or add. 0 if the matrix
        units do not limit it.
    - `nbytes`: bytes that a step reads from main memory for each key of its tile, if that limits
        it.
    - `whole`: for the figure of the whole kernel.
    - `plain`: the name of the same kernel without its feature.
    - `innermost`: a step is a trip of the innermost loop around the products, not of the grid.
    """

    name: str
    call: str
    build: Callable[[], tuple[Callable[..., Any], Sequence[Any]]]
    tile: Callable[[], tuple[int, int]]
    products: int = 0
    nbytes: int = 0
    whole: Whole | None = None
    plain: str = ""
    innermost: bool = False
