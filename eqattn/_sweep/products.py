"""Matrix products of a block: float32 accumulation, one rounding, fast orientations.

`lax.dot_general` transposes to products that round their result to the operand's dtype, and to a
product with a large transposed left side. `dot` avoids both. Operands and cotangents are float32
(float64 under x64), and `operand_dtype` says what the multiplier reads. Each transpose is written
in the orientation that needs no transposed copy of the logits.
"""

import functools as ft

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._jax import ad, batching, compile_eagerly, mlir, Primitive


dot_p = Primitive("attention_dot")
grouped_dot_p = Primitive("attention_grouped_dot")


def dot(a: Array, b: Array, contract: tuple[int, int], *, precision=None, operand_dtype=None):
    """The product of two matrices, either of which may be transposed.

    **Arguments:**

    - `a`, `b`: matrices. One of them may be `[n, groups, m]`: a matrix `[n, m]` for each group of
        the entries on the other's free axis.
    - `contract`: the axis of `a` and the axis of `b` that are summed over.
    - `precision`: as for `lax.dot_general`.
    - `operand_dtype`: the dtype that both are rounded to before they are multiplied, or None.

    **Returns:** `[free axis of a, free axis of b]` in the dtype of `a`.
    """
    p = dot_p if a.ndim == b.ndim == 2 else grouped_dot_p
    return p.bind(a, b, contract=contract, lead=0, precision=precision, operand_dtype=operand_dtype)


# Both are for products with a transposed left side on a CPU, in `_dot_on_cpu`.
#
# Where one side of many products has at most `_FEW` columns, that side is turned, so that no left
# side is transposed. The bound was chosen by trial, and no measurement is recorded. The benchmarks
# `cpu-decode-*` and `cpu-f32-causal-128-*` show the effect.
#
# A single product is added up in pieces of `PIECE` keys. With blocks of 256 keys,
# `cpu-f32-causal-2048-fwd` was 2% faster by that. For values of mean 10, the error of outputs was
# 1.7 instead of 2.45, in the units of docs/pages/benchmarks.md. Blocks of 128 keys had 1.8.
# `python tests/measure bench --accuracy` measures the errors again. On one core of an AMD EPYC,
# sums of 2048 keys took 0.80 of the time so with 16 rows of 64 features, and 0.89 with 64 rows.
_FEW = 32
PIECE = 128


def _dot_general(a, b, *, contract, lead, precision, operand_dtype):
    batch = tuple(range(lead))
    dims = (((contract[0] + lead,), (contract[1] + lead,)), (batch, batch))
    out = a.dtype
    if operand_dtype is not None:
        a, b = a.astype(operand_dtype), b.astype(operand_dtype)
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=out)


def _rounded(x, dtype):
    """Rounds to a narrow dtype, but stays wide. Exponents are not rounded. Otherwise numbers that
    are subnormal in float16 would become 0, although units that multiply float16 read them as they
    are.
    """
    info = jnp.finfo(dtype)
    exponent = max(info.nexp, jnp.finfo(jnp.float32).nexp)
    return lax.reduce_precision(x, exponent, info.nmant)


# XLA:GPU gives products to tensor cores, or sums them in float32, only if they are not very small.
# Otherwise a loop multiplies narrow numbers in their own dtype, so that each product is rounded.
# XLA does so where the three sizes of a product have a sum below 25. That was found by trial with
# the XLA of jaxlib 0.12.0, and the loop's instruction `HMUL2` in its machine code. On an H200, a
# logsumexp over vectors of 4 numbers was off by 54 times the bound. The limit here is higher, as
# versions may differ.
_LOOPED = 64


def _dot_on_gpu(a, b, *, contract, lead, precision, operand_dtype):
    sizes = *a.shape[lead:], b.shape[lead + 1 - contract[1]]
    if operand_dtype is not None and sum(sizes) < _LOOPED:
        a, b = (_rounded(x, operand_dtype) for x in (a, b))
        operand_dtype, precision = None, lax.Precision.HIGHEST
    more = dict(precision=precision, operand_dtype=operand_dtype)
    return _dot_general(a, b, contract=contract, lead=lead, **more)


def _dot_on_cpu(a, b, *, contract, lead, precision, operand_dtype):
    # XLA:CPU lacks products of narrow numbers for some shapes. Wide operands give the same
    # products.
    if operand_dtype is not None:
        a, b = (_rounded(x, operand_dtype) for x in (a, b))
    product = ft.partial(_dot_general, lead=lead, precision=precision, operand_dtype=None)
    if contract != (0, 0):
        return product(a, b, contract=contract)
    # Both operands are summed over their first axis: the left side is transposed. Many small
    # products of that kind are slow. A large one is fastest in pieces, and more accurate so.
    if lead and a.shape[-1] <= _FEW:
        return product(_transposed(a), b, contract=(1, 0))
    if lead and b.shape[-1] <= _FEW:
        return jnp.swapaxes(product(_transposed(b), a, contract=(1, 0)), -1, -2)
    if not lead and a.shape[0] > PIECE and a.shape[0] % PIECE == 0:
        a, b = (lax.reshape(x, (len(x) // PIECE, PIECE, x.shape[1])) for x in (a, b))
        return lax.reduce_sum(product(a, b, contract=contract, lead=1), (0,))
    return product(a, b, contract=contract)


def _transposed(x):
    """Transposes with an additional axis of size 1, as XLA would undo a plain transpose."""
    return jnp.moveaxis(x[..., None, :, :], -1, -3).squeeze(-2)


# The transposes. Let `y` be `a b`, summed over the axes `contract`. The cotangent of `a` is then
# the product of `ct` and `b` over the free axis of `b`, which is axis 1 of `ct`. Its axes must come
# out in the order of `a`. So where `a` is summed over its axis 0, the operands change places:
#
#     y = a b       contract (1, 0)        ct a = ct b^T,  ct b = a^T ct
#     y = a^T b     contract (0, 0)        ct a = b ct^T,  ct b = a ct.
#
# Neither writes a transpose out. Each is a product again, with the same rounding of its operands.


def _transpose_a(ct, a, b, *, contract, **kw):
    ca, free = contract[0], 1 - contract[1]
    operands, axes = ((ct, b), (1, free)) if ca == 1 else ((b, ct), (free, 1))
    return dot_p.bind(*operands, contract=axes, **kw)


def _transpose_b(ct, a, b, *, contract, **kw):
    cb, free = contract[1], 1 - contract[0]
    operands, axes = ((a, ct), (free, 0)) if cb == 0 else ((ct, a), (0, free))
    return dot_p.bind(*operands, contract=axes, **kw)


def batch_in_front(primitive, args, dims, *, lead, **kw):
    """The batching rule of a primitive that is vectorised over `lead` axes in front."""
    size = next(x.shape[d] for x, d in zip(args, dims) if d is not None)
    args = [
        jnp.broadcast_to(x[None], (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(args, dims)
    ]
    return primitive.bind(*args, lead=lead + 1, **kw), 0


def _apart(x, lead, axis, groups):
    """Splits a matrix `[lead, n, m]` into one for each of the groups on its axis `axis`."""
    n = lead + axis
    x = x.reshape(*x.shape[:n], groups, x.shape[n] // groups, *x.shape[n + 1 :])
    return jnp.moveaxis(x, n, lead)


def _merged(x, lead, axis):
    """Undoes `_apart`."""
    n = lead + axis
    x = jnp.moveaxis(x, lead, n)
    return x.reshape(*x.shape[:n], x.shape[n] * x.shape[n + 1], *x.shape[n + 2 :])


def _grouped(a, b, *, contract, lead, **kw):
    """Evaluates one product whose batch is the groups, which the compiler can split over devices.

    The operand with groups comes first if it is summed over its last axis, else second. The other
    orders are slow on XLA:CPU.
    """
    first = a.ndim > b.ndim
    (wide, c), (other, d) = sorted([(a, contract[0]), (b, contract[1])], key=lambda x: -x[0].ndim)
    other = _apart(other, lead, 1 - d, wide.shape[lead + 1])
    wide = jnp.moveaxis(wide, lead + 1, lead)
    product = ft.partial(dot_p.bind, lead=lead + 1, **kw)
    if c == 1:
        y = product(wide, other, contract=(1, d))
    else:
        y = product(other, wide, contract=(d, 0))
    y = y if (c == 1) == first else jnp.swapaxes(y, -1, -2)
    return _merged(y, lead, 1 if first else 0)


def _transpose_grouped(which, ct, a, b, *, contract, lead, **kw):
    """The cotangent of `a` (`which` is 0) or of `b` (1)."""
    axis = 1 - which  # The axis of the cotangent that is summed over.
    c, d = contract[which], contract[1 - which]
    linear, known = (a, b) if which == 0 else (b, a)
    kw = dict(lead=lead, **kw)
    if known.ndim - lead == 3:
        if c == 0:
            return grouped_dot_p.bind(known, ct, contract=(1 - d, axis), **kw)
        return grouped_dot_p.bind(ct, known, contract=(axis, 1 - d), **kw)
    groups = linear.aval.shape[lead + 1]
    ct, known = _apart(ct, lead, axis, groups), _apart(known, lead, 1 - d, groups)
    kw["lead"] += 1
    if c == 1:
        y = dot_p.bind(ct, known, contract=(axis, 1 - d), **kw)
    else:
        y = dot_p.bind(known, ct, contract=(1 - d, axis), **kw)
    return jnp.moveaxis(y, lead, lead + 1)


def _abstract(f, a, b, **kw):
    return jax.make_jaxpr(lambda a, b: f(a, b, **kw))(a, b).out_avals[0]


def _define(primitive, f, transposes, lowering):
    compile_eagerly(primitive, _STATIC)
    primitive.def_abstract_eval(ft.partial(_abstract, f))
    ad.defbilinear(primitive, *transposes)
    batching.primitive_batchers[primitive] = ft.partial(batch_in_front, primitive)
    mlir.register_lowering(primitive, lowering)


_STATIC = ("contract", "lead", "precision", "operand_dtype")
_lower_dot = mlir.lower_fun(_dot_general, multiple_results=False)
_define(dot_p, _dot_general, (_transpose_a, _transpose_b), _lower_dot)
_lower_on_cpu = mlir.lower_fun(_dot_on_cpu, multiple_results=False)
mlir.register_lowering(dot_p, _lower_on_cpu, platform="cpu")
_lower_on_gpu = mlir.lower_fun(_dot_on_gpu, multiple_results=False)
for _platform in ("cuda", "rocm"):
    mlir.register_lowering(dot_p, _lower_on_gpu, platform=_platform)
_lower_grouped = mlir.lower_fun(_grouped, multiple_results=False)
_both = tuple(ft.partial(_transpose_grouped, i) for i in (0, 1))
_define(grouped_dot_p, _grouped, _both, _lower_grouped)
