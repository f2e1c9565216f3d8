"""Matrix products of a block: float32 accumulation, one rounding, fast orientations.

`lax.dot_general` transposes to products that round their result to the operand's dtype, and to a
product with a large transposed left side. `dot` fixes both: operands and cotangents are float32
(float64 under x64), `operand_dtype` says what the multiplier reads, and each transpose is written
in the orientation that needs no transposed copy of the logits.
"""

import functools as ft

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ._compat import abstract, ad, batching, mlir, partitioned_automatically, Primitive


dot_p = Primitive("attention_dot")
grouped_dot_p = Primitive("attention_grouped_dot")


def dot(a: Array, b: Array, contract: tuple[int, int], *, precision=None, operand_dtype=None):
    """`a` and `b` are matrices; `contract` names the axis of each that is summed over.

    One of them may be `[n, groups, m]`: a matrix `[n, m]` for each group of the other's free axis.

    **Returns:** `[free axis of a, free axis of b]` in the dtype of `a`.
    """
    p = dot_p if a.ndim == b.ndim == 2 else grouped_dot_p
    return p.bind(a, b, contract=contract, lead=0, precision=precision, operand_dtype=operand_dtype)


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


def _batch(primitive, args, dims, *, lead, **kw):
    size = next(x.shape[d] for x, d in zip(args, dims) if d is not None)
    args = [
        jnp.broadcast_to(x[None], (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(args, dims)
    ]
    return primitive.bind(*args, lead=lead + 1, **kw), 0


def _group_by_group(a, b, *, contract, lead, **kw):
    """One product for each group: XLA:CPU transposes the whole operand of a batched one, slowly."""
    wide, other, axis = (a, b, 1 - contract[1]) if a.ndim > b.ndim else (b, a, 1 - contract[0])
    groups = wide.shape[lead + 1]
    wides = [jnp.squeeze(x, lead + 1) for x in jnp.split(wide, groups, lead + 1)]
    pairs = zip(wides, jnp.split(other, groups, lead + axis))
    product = ft.partial(dot_p.bind, contract=contract, lead=lead, **kw)
    if a.ndim > b.ndim:
        return jnp.concatenate([product(x, y) for x, y in pairs], lead + 1)
    return jnp.concatenate([product(y, x) for x, y in pairs], lead)


def _groups_at_once(a, b, *, contract, lead, precision, operand_dtype):
    """One batched product, which the compiler can split over devices by groups."""
    first = a.ndim > b.ndim
    (wide, c), (other, d) = sorted([(a, contract[0]), (b, contract[1])], key=lambda x: -x[0].ndim)
    groups, out = wide.shape[lead + 1], wide.dtype
    shape = list(other.shape)
    shape[lead + 1 - d : lead + 2 - d] = [groups, shape[lead + 1 - d] // groups]
    other = other.reshape(shape)
    if operand_dtype is not None:
        wide, other = wide.astype(operand_dtype), other.astype(operand_dtype)
    names = "...cgf" if c == 0 else "...fgc", "...cgr" if d == 0 else "...grc"
    kw = dict(precision=precision, preferred_element_type=out)
    y = jnp.einsum(f"{','.join(names)}->{'...fgr' if first else '...grf'}", wide, other, **kw)
    merge = lead + first
    return y.reshape(*y.shape[:merge], -1, *y.shape[merge + 2 :])


def _lower_groups(ctx, *args, **kw):
    one = tuple(ctx.module_context.platforms) == ("cpu",) and not partitioned_automatically(ctx)
    f = _group_by_group if one else _groups_at_once
    return mlir.lower_fun(f, multiple_results=False)(ctx, *args, **kw)


def _transpose_groups(which, ct, a, b, **kw):
    x, other = (a, b) if which == 0 else (b, a)
    f = lambda y: _group_by_group(*((y, other) if which == 0 else (other, y)), **kw)
    return jax.linear_transpose(f, abstract(x.aval, x.aval.shape, x.aval.dtype))(ct)[0]


def _abstract(f, a, b, **kw):
    return jax.make_jaxpr(lambda a, b: f(a, b, **kw))(a, b).out_avals[0]


def _define(primitive, f, transposes, lowering):
    primitive.def_impl(jax.jit(primitive.bind, static_argnames=_STATIC))
    primitive.def_abstract_eval(ft.partial(_abstract, f))
    ad.defbilinear(primitive, *transposes)
    batching.primitive_batchers[primitive] = ft.partial(_batch, primitive)
    mlir.register_lowering(primitive, lowering)


_STATIC = ("contract", "lead", "precision", "operand_dtype")
_lower_dot = mlir.lower_fun(_dot_general, multiple_results=False)
_define(dot_p, _dot_general, (_transpose_a, _transpose_b), _lower_dot)
_both = tuple(ft.partial(_transpose_groups, i) for i in (0, 1))
_define(grouped_dot_p, _group_by_group, _both, _lower_groups)
