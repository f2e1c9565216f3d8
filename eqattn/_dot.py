"""Matrix products of a block: float32 accumulation, one rounding, fast orientations.

`lax.dot_general` transposes to products that round their result to the operand's dtype, and to a
product with a large transposed left side. `dot` fixes both: operands and cotangents are float32
(float64 under x64), `operand_dtype` says what the multiplier reads, and each transpose is written
in the orientation that needs no transposed copy of the logits.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ._compat import ad, batching, mlir, Primitive


dot_p = Primitive("attention_dot")


def dot(a: Array, b: Array, contract: tuple[int, int], *, precision=None, operand_dtype=None):
    """`a` and `b` are matrices; `contract` names the axis of each that is summed over.

    One of them may be `[n, groups, m]`: a matrix `[n, m]` for each group of the other's free axis.

    **Returns:** `[free axis of a, free axis of b]` in the dtype of `a`.
    """
    fixed = dict(contract=contract, lead=0, precision=precision, operand_dtype=operand_dtype)
    product = lambda a, b: dot_p.bind(a, b, **fixed)
    if a.ndim == b.ndim == 2:
        return product(a, b)
    # One product for each group: XLA:CPU transposes the whole operand of a batched one, slowly.
    wide, other, axis = (a, b, 1 - contract[1]) if a.ndim == 3 else (b, a, 1 - contract[0])
    groups = wide.shape[1]
    wides = [x[:, 0] for x in jnp.split(wide, groups, 1)]
    others = jnp.split(other, groups, axis)
    if a.ndim == 3:
        return jnp.concatenate([product(x, y) for x, y in zip(wides, others)], 1)
    return jnp.concatenate([product(y, x) for x, y in zip(wides, others)], 0)


def _dot_general(a, b, *, contract, lead, precision, operand_dtype):
    batch = tuple(range(lead))
    dims = (((contract[0] + lead,), (contract[1] + lead,)), (batch, batch))
    out = a.dtype
    if operand_dtype is not None:
        a, b = a.astype(operand_dtype), b.astype(operand_dtype)
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=out)


def _transpose_a(ct, a, b, *, contract, **kw):
    ca, free = contract[0], 1 - contract[1]
    operands, axes = ((ct, b), (1, free)) if ca == 1 else ((b, ct), (free, 1))
    return dot_p.bind(*operands, contract=axes, **kw)


def _transpose_b(ct, a, b, *, contract, **kw):
    cb, free = contract[1], 1 - contract[0]
    operands, axes = ((a, ct), (free, 0)) if cb == 0 else ((ct, a), (0, free))
    return dot_p.bind(*operands, contract=axes, **kw)


def _batch(args, dims, *, lead, **kw):
    size = next(x.shape[d] for x, d in zip(args, dims) if d is not None)
    args = [
        jnp.broadcast_to(x[None], (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(args, dims)
    ]
    return dot_p.bind(*args, lead=lead + 1, **kw), 0


def _abstract(a, b, **kw):
    return jax.make_jaxpr(lambda a, b: _dot_general(a, b, **kw))(a, b).out_avals[0]


dot_p.def_impl(lambda a, b, **kw: _dot_general(a, b, **kw))
dot_p.def_abstract_eval(_abstract)
ad.defbilinear(dot_p, _transpose_a, _transpose_b)
batching.primitive_batchers[dot_p] = _batch
mlir.register_lowering(dot_p, mlir.lower_fun(_dot_general, multiple_results=False))
