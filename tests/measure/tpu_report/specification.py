"""`Kernel`: what must be known of a kernel in order to measure it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


ROWS, LENGTH, QUERY_HEADS, KV_HEADS = 32, 8192, 32, 8  # of decoding, with head dim 128


@dataclasses.dataclass(frozen=True)
class Whole:
    """The arguments of `whole.count` for a causal kernel, and `once`, as for `Count.cycles`."""

    tokens: int
    heads: int
    kept: tuple[int, ...]
    lag: int
    once: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel, and the program that contains it.

    **Arguments:**

    - `name`: the name in the report.
    - `call`: the name of its `pallas_call`. The program must have exactly one of that name.
    - `build`: a function that returns a function to compile, and its abstract arguments, which are
        PyTrees.
    - `tile`: a function that returns how many queries and keys a step of the grid has. It is called
        after the kernel has been compiled.
    - `products`: how many multiplications each pair of query and key needs. It is the sum, over the
        products that such a kernel cannot do without, of the size that they contract or add. It is
        0 if the matrix units do not limit the kernel.
    - `nbytes`: how many bytes a step reads from main memory for each key of its tile; 0 if memory
        does not limit the kernel.
    - `whole`: what the figure of the whole kernel needs; None leaves that figure out.
    - `plain`: the name of the same kernel without its feature.
    - `innermost`: whether a step is a trip of the innermost loop around the products. Otherwise it
        is a trip of the outermost loop, the grid.
    - `heads_per_step`: a function that returns how many such tiles a step has, one for each head that it
        visits. It is called as `tile` is.
    - `masked`: which of the `Steps` is that of a masked pair: `"masked"`, `"corner"` where all
        masked pairs lie on a causal diagonal, or `"edge"` where the others skip something, too.
    - `cleans`: as for `Steps`.
    - `sized`: a function that gets how many queries and keys a block has, and returns the kernel
        with such blocks. It is None if no others are compared.
    - `sizes`: those that `tpu-report --tune` compares.
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
    heads_per_step: Callable[[], int] = lambda: 1
    masked: str = "masked"
    cleans: bool = False
    sized: Callable[[int, int], "Kernel"] | None = None
    sizes: tuple[tuple[int, int], ...] = ()
