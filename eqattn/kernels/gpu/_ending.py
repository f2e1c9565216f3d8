"""The end of a row in the fold: what the caller gets is made of a Carry that is in registers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..._sweep.fold_step import Finish
from ..._sweep.grid import GridLayout
from ._operands import Operand, ROWS
from ._operations import Native, PLAIN, Value
from ._program import BlockProgram, Run


_ROWS, _WIDTH = 2, 3  # It is traced for these two sizes, which only need to differ.


def kept(*accs: Any) -> list[Any]:
    """The ending of a row that is not complete: its numerator, denominator and maximum."""
    return list(accs)


class Ending(BlockProgram):
    """A function of a row's numerator, denominator and maximum, evaluated row by row.

    **Arguments:**

    - `finish`: the function, of blocks.
    - `operands`, `layout`: those of the visit.
    - `lengths`: as for `Operand`.

    `given` are the operands that it reads. `results` says of each result its dtype, whether it has
    the axis of values, and whether that axis is the last one.
    """

    def __init__(
        self,
        finish: Any,
        operands: Sequence,
        layout: GridLayout,
        lengths: dict[str, int],
        native: Native = PLAIN,
    ):
        reads = finish.reads if isinstance(finish, Finish) else ()
        axes = [layout.in_axes[i] for i in reads]
        blocks = [operands[i][..., None, :] for i in reads]
        self.given = [Operand(x, a, layout, ROWS, lengths) for x, a in zip(blocks, axes)]
        row = jax.ShapeDtypeStruct((_ROWS,), jnp.float32)
        accs = (jax.ShapeDtypeStruct((_WIDTH, _ROWS), jnp.float32), row, row)
        sizes = [_ROWS if x.kind == "r" else 1 for x in self.given]
        more = [jax.ShapeDtypeStruct((n,), jnp.float32) for n in sizes]
        trace = jax.make_jaxpr(lambda *xs: finish(xs[:3], *xs[3:]), return_shape=True)
        closed, results = trace(*accs, *more)
        super().__init__(closed, native)
        self.results = [
            (x.dtype, x.ndim == 2, x.shape == (_ROWS, _WIDTH)) for x in jax.tree.leaves(results)
        ]

    def __call__(
        self, accs: Sequence[Any], read: Callable[[int], Value], sizes: dict[str, int]
    ) -> list[Any]:
        """The results, `[rows, values]` or `[rows]`.

        **Arguments:**

        - `accs`: the numerator `[rows, values]`, the denominator and the maximum `[rows]`.
        - `read`: one of `given`.
        - `sizes`: the numbers of rows (`"r"`) and of values (`"v"`).
        """
        held = [Value(kind, x) for kind, x in zip(("rv", "r", "r"), accs)]
        argument = lambda i: held[i] if i < len(held) else read(i - len(held))
        run = Run(self, lambda _: None, argument, sizes)
        kinds = ["rv" if wide else "r" for _, wide, _ in self.results]
        return [run.value(v).spread(k, sizes) for v, k in zip(self.jaxpr.outvars, kinds)]
