"""The evaluation of a program with blocks of logits as `[rows, keys]`, window by window."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from ..._pairs import POINTWISE
from ..._sweep.differences import along_diagonals_p
from ..._sweep.products import dot_p
from ._products import product_of
from ._program import Evaluation
from ._windows import size_of, Window


class TurnedEvaluation(Evaluation):
    """An evaluation whose windows of blocks of logits are transposed: `[rows, keys]`.

    Whole values lie as in any `Evaluation`. Numbers that vary only with rows are computed as a row,
    and then copied as a column into each of the lanes, once.
    """

    turned = True

    def _block(self, v: Any, window: Window) -> Any:
        eqn, (keys, rows) = self.program.maker(v), window
        if v.aval.size == 1:
            return self.value(v)
        if min(v.aval.shape) == 1:
            return self.from_side(v, v.aval.shape[1] == 1, lambda flip: self.value(v, flip))
        if eqn is not None and eqn.primitive is dot_p:
            (a, b), (i, j) = eqn.invars, eqn.params["contract"]
            dtype = eqn.params["operand_dtype"]
            left, right = self.narrow(b, j == 0, dtype), self.narrow(a, i == 1, dtype)
            return product_of(left[rows], right[:, keys], (1, 0), eqn.params["precision"])
        if eqn is not None and eqn.primitive is along_diagonals_p:
            return self.repeated_diagonals(eqn)
        if eqn is not None and eqn.primitive is lax.select_n_p:
            return self._selected(eqn)
        if eqn is not None and eqn.primitive is lax.broadcast_in_dim_p:
            return self._broadcast(v, self.value(eqn.invars[0]), None)
        if eqn is not None and eqn.primitive in POINTWISE:
            return self.pointwise(eqn, self.block)
        x = self.value(v, True)
        if x.dtype == jnp.bool_:
            return x.astype(jnp.int32)[rows, keys] != 0
        return x[rows, keys]

    def _spread(self, v: Any, x: Any, factor: float) -> Any:
        return self._broadcast(v, x, factor)

    def _repeated(self, x: Any, shape: tuple[int, ...]) -> Any:
        assert self.window is not None
        sides = [min(n, size_of(w)) for n, w in zip(shape, self.window)]
        return lax.broadcast(x, sides[::-1])

    def _broadcast(self, v: Any, x: Any, factor: float | None) -> Any:
        """The window of a broadcast `v` of `x`: one number, or those of the rows or of the keys."""
        if x.size == 1:  # also if it has axes, which are those of neither keys nor rows
            return self._repeated(x.reshape(()), v.aval.shape)
        if x.ndim == 1:
            (axis,) = self.program.maker(v).params["broadcast_dimensions"]
            of_keys, row = bool(axis == 0), x.reshape(1, -1)
        else:
            of_keys = x.shape[1] == 1
            row = x.T if of_keys else x
        y = self.from_side((v, factor), of_keys, lambda _: row)
        assert self.window is not None
        keys, rows = map(size_of, self.window)
        return jnp.broadcast_to(y, (rows, keys))

    def turned_part(self, v: Any, flip: bool, dtype: Any, part: slice) -> Any:
        """The columns `part` of a value in the dtype that a product reads, transposed if `flip`.

        If that takes a transpose, each part is transposed separately, at the same time as the
        products of its windows.
        """
        if self.lies_flipped(v) == flip:
            return self.narrow(v, flip, dtype)[:, part]
        key = "part", v, dtype, part.start, part.stop
        if key not in self.done:
            self.done[key] = self.narrow(v, not flip, dtype)[part].T
        return self.done[key]
