r"""A Carry whose logsumexp is known before any block has been visited.

With the logsumexp $L$ of a row as the origin of its exponents, the denominator is 1. So nothing
must be visited for it. Its tangent is the sum that a fold's is,

    dden = sum_j p_j ds_j        with p_j = e^{s_j - L},

and one visit finds it or its transpose. Where the Carry was computed, that visit comes after
another. Statistics are such tangents and transposes, and a call of attention already knows `L`.

The numerator is not known, and is 0 here. Several Carries of the same `L` may be merged, as those
of parts of the keys are. The sum of their denominators is then their number, and each tangent
counts for so much less.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from .._jax import vary, varying_axes
from .attend import on_rows
from .fold import fold_arguments, operand_dtypes, tangent_arguments
from .grid import ROW
from .sweep import sweep_p


def recall(*args: Any, logsumexp: Array, axes: tuple[int, ...], **kw: Any) -> list:
    """The Carry of a grid from the logsumexp of its rows, with the derivatives of a fold.

    **Arguments:** those of `fold`, and

    - `logsumexp`: the logsumexp of each row, `[rows|1]` with grid axes in front.
    - `axes`: these grid axes.

    **Returns:** what `fold` returns. The numerator is 0, the denominator 1, or 0 where nothing is
    seen, and the maximum is the logsumexp.
    """
    arrays, static = fold_arguments(*args, **kw)
    layout, values = static["layout"], static["values"]
    read = operand_dtypes(static["visits"], values, layout)
    width = values[0][1].out_avals[0].shape[-1]
    mesh_axes = varying_axes(*arrays, logsumexp)
    # An origin has no derivative.
    rows = on_rows(vary(jax.lax.stop_gradient(logsumexp), mesh_axes), axes, layout)

    @jax.custom_jvp
    def carry(top, *arrays):
        del arrays
        shape = (*layout.shape((*layout.batch, ROW)), layout.block[1], width)
        den = (top != -jnp.inf).astype(top.dtype)
        return vary(jnp.zeros(shape, top.dtype), mesh_axes), den, top

    def jvp(primals, tangents):
        top, *arrays = primals
        table, operands = layout.split(arrays)
        _, tangents = layout.split(tangents[1:])
        moves = [(i, t) for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
        outs = carry(*primals)
        rates = [jnp.zeros_like(x) for x in outs]
        if moves:
            moved = {i: t.astype(read[i]) for i, t in moves}
            sweep_args, sums = tangent_arguments(operands, moved, top, table, **static)
            rates[1] = sweep_p.bind(*sweep_args, **sums)[1]
        # The tangent of the origin is 0, as that of a maximum is.
        return (outs[0], outs[1], outs[2]), (rates[0], rates[1], rates[2])

    carry.defjvp(jvp, symbolic_zeros=True)
    return list(carry(rows, *arrays))
