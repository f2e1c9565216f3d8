"""Which block pairs of a mask are empty, partial or full, for any mask function.

The mask's scalar jaxpr is interpreted over intervals: each of its inputs is replaced by its bounds
over a block of rows or columns. By induction over its equations, each value of each pair of the
block lies within the bounds of its variable (see `interval.py`). The result is a bool with bounds:

    bounds of `visible`   what it says of the pairs of a block   class
    [False, False]        none is visible                        0, empty
    [False, True]         nothing                                1, partial
    [True, True]          all are visible                        2, full

So it is sound for every function. An operation without a rule has the whole range of its dtype as
bounds, and at worst the block counts as partial. It is exact for the masks in use.
"""

import functools as ft
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax import CALLS, interpret, Literal, only_varies, primitives as P
from ..._misc import at_most, iota, is_known, unfolded
from ..._pairs import canonical, Operand
from .elementwise import clamp, EXACT, floor_divide, REFLEXIVE, remainder, RULES
from .interval import carrier, finite, GRID, Interval, kind, source, top, xp_of
from .structural import ARRAY_RULES, block_ends, convert, expand, select, too_large, unknown


# The primitives that evaluate a jaxpr once, and the parameter that holds it.
_INLINE = CALLS | {P.closed_call_p: "call_jaxpr", P.remat_p: "jaxpr"}
# What `//` and `%` of `jnp` call their jitted definitions. The equations inside correct a quotient
# that was rounded towards zero, by comparisons of variables that intervals bound one by one. The
# rule of the whole is exact instead.
_DIVISIONS = {
    "floor_divide": (jnp.floor_divide, floor_divide),
    "remainder": (jnp.remainder, remainder),
}
_POSITION = np.dtype(np.int32)

# Under a trace, NumPy computes results of up to this number of elements, and the device larger
# ones. What NumPy computes while tracing becomes a constant of the program: 2^14 of int32 are 64
# KiB. Chosen by trial: a larger limit means larger constants, a smaller one more operations on
# small arrays. Both can be seen in `jax.make_jaxpr` of `classify` at traced positions.
_HOST_ELEMENTS = 2**14


def classify(  # noqa: PLR0913 (the options of a table of blocks)
    mask: Any,
    *,
    batch_shape: Sequence[int],
    heads: int,
    kv_heads: int,
    q_positions: Any,
    kv_positions: Any,
    block_q: int,
    block_k: int,
    indices: tuple[Any, Any] = (None, None),
) -> Any:
    """The class of every block pair: 0 empty, 1 partial, 2 full.

    A block pair that is classed empty holds no visible (query, key) pair, and one that is classed
    full only visible ones. This holds for every mask.

    **Arguments:**

    - `mask`: an [`eqattn.AbstractMask`][].
    - `batch_shape`: the leading axes of the query, of `B` elements in total.
    - `heads`, `kv_heads`: query and key heads; the former a multiple of the latter.
    - `q_positions`, `kv_positions`: int32 `[B|1, T]` and `[B|1, S]`, of NumPy or JAX, which may be
        traced.
    - `block_q`, `block_k`: rows and columns per block; the last block may be short.
    - `indices`: int32 `[B|1]` and `[heads|1]` or `[B, heads]`, what the mask gets as `b` and `h`;
        None means `0, 1, ...`

    **Returns:**

    int8 `[B|1, kv_heads|1, ceil(T/block_q), ceil(S/block_k)]`; a leading axis is 1 when the result
    does not depend on it. It is a NumPy array if nothing involved is traced, else a JAX array.

    **Raises:** `ValueError` if an operand of the mask does not broadcast to
    `[*batch_shape, heads, T, S]` or `heads` is no multiple of `kv_heads`; `TypeError` if the mask
    does not give one bool.
    """
    t, s = q_positions.shape[-1], kv_positions.shape[-1]
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"heads ({heads}) must be a positive multiple of kv_heads ({kv_heads}).")
    if block_q < 1 or block_k < 1:
        raise ValueError(f"block sizes must be positive, got {block_q} and {block_k}.")
    operands = mask.operands()
    dtypes = [jax.dtypes.canonicalize_dtype(o.array.dtype) for o in operands]
    closed = _scalar_jaxpr(mask, [(o.feature_shape, d) for o, d in zip(operands, dtypes)])
    if t == 0 or s == 0:
        return np.zeros((1, 1, -(-t // block_q), -(-s // block_k)), np.int8)

    consts, arrays = _parts(closed)[1], [o.array for o in operands]
    counts = math.prod(batch_shape), heads
    batch, head = (iota(n) if x is None else x for x, n in zip(indices, counts))
    traced = not all(map(is_known, [q_positions, kv_positions, batch, head, *arrays, *consts]))

    batch = _known(batch, _POSITION, traced).reshape(-1, 1, 1, 1)
    head = _known(head, _POSITION, traced)
    head = head.reshape(head.shape[0] if head.ndim == 2 else 1, -1, 1, 1)
    with np.errstate(all="ignore"):  # rules test for overflow by themselves
        ins: list[Interval | None] = [Interval(batch, batch), Interval(head, head)]
        for x, shape in ((q_positions, (-1, 1, t, 1)), (kv_positions, (-1, 1, 1, s))):
            x = _known(x, _POSITION, traced).reshape(shape)
            ins.append(_block_bounds(x, _POSITION, block_q, block_k))
        for o, dtype in zip(operands, dtypes):
            if o.feature_shape:  # What a mask does with vectors is not known.
                ins.append(None)
                continue
            array = _known(o.array, carrier(dtype), traced) if kind(dtype) else o.array
            full = canonical(Operand(array, o.axes), batch_shape, heads, t, s)
            ins.append(_block_bounds(full, dtype, block_q, block_k))
        constants = [_constant(v, c, traced) for v, c in zip(closed.jaxpr.constvars, consts)]
        (visible,) = _interpret(closed.jaxpr, constants, ins, traced)
    assert visible is not None  # it is a bool
    out = _class_table(visible, heads, kv_heads, (-(-t // block_q), -(-s // block_k)))
    return jnp.asarray(out) if traced else out


def _scalar_jaxpr(mask, operands):
    """The jaxpr of a mask for one pair, given the shapes and dtypes of what it reads there."""
    scalars = [jax.ShapeDtypeStruct(*x) for x in (*[((), _POSITION)] * 4, *operands)]
    # JAX would keep a bound method as a key, and compare it by the mask's arrays, perhaps traced.
    visible = lambda *xs: mask.visible(*xs)  # noqa: E731
    closed, result = jax.make_jaxpr(visible, return_shape=True)(*scalars)
    if [(x.shape, x.dtype) for x in jax.tree.leaves(result)] != [((), np.bool_)]:
        got = [str(v.aval) for v in closed.jaxpr.outvars] or None
        raise TypeError(f"a mask must return one bool scalar per pair, {mask!r} returns {got}.")
    return closed


def _known(x, dtype, traced: bool):
    """An array of a dtype: NumPy's, but under a trace a JAX array stays one."""
    if traced and not isinstance(x, np.ndarray | np.generic | int | float):
        return unfolded(x).astype(dtype)
    return np.asarray(x).astype(dtype)


def _block_bounds(x, dtype, block_q: int, block_k: int) -> Interval | None:
    """The bounds over each block of an array `[B|1, H|1, T|1, S|1]`; None without rules."""
    if not kind(dtype):
        return None
    lo, hi = block_ends(x, 2, block_q)
    if lo is hi:
        lo, hi = block_ends(x, 3, block_k)
    else:
        lo, hi = block_ends(lo, 3, block_k)[0], block_ends(hi, 3, block_k)[1]
    if lo.shape == x.shape:  # each block has one entry, which is known exactly
        return source(x, x, dtype)
    if kind(dtype) == "f":
        # A minimum may or may not skip NaN. An infinite bound says that the block may hold one.
        nan = block_ends(block_ends(xp_of(x).isnan(x), 2, block_q)[1], 3, block_k)[1]
        lo = xp_of(nan, lo).where(nan, lo.dtype.type(-np.inf), lo)
    return source(lo, hi, dtype)


def _constant(var, x, traced: bool) -> Interval | None:
    """An array that the mask function closes over, which is the same for all pairs."""
    dtype, shape = var.aval.dtype, (1,) * GRID + var.aval.shape
    if not kind(dtype):
        return None
    x = _known(x, carrier(dtype), traced).reshape(shape)
    return source(x, x, dtype)


def _class_table(visible: Interval, heads: int, kv_heads: int, shape: tuple[int, int]):
    """Classes from bounds: `every + some` is 0 where no pair is visible, 2 where all are, else 1.

    The query heads that share a key head share a block. Every pair of the block is visible if this
    holds for all of these heads. Some pair is visible if this holds for any head.
    """
    every, some = visible
    if every.shape[1] > 1:
        split = (every.shape[0], kv_heads, heads // kv_heads, *every.shape[2:])
        every = every.reshape(split).all(axis=2)
        some = some.reshape(some.shape[0], *split[1:3], *some.shape[2:]).any(axis=2)
    xp = xp_of(every, some)
    every, some = (
        xp.broadcast_to(x, (*x.shape[:2], *shape)).astype(np.int8) for x in (every, some)
    )
    return every + some


def _parts(jaxpr) -> tuple[Any, Sequence]:
    """The open jaxpr and the constants of a jaxpr, which may be open or closed."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def _interpret(jaxpr, consts, args, traced: bool) -> list[Interval | None]:
    """The intervals of a jaxpr's results, from those of its arguments."""
    return interpret(jaxpr, consts, args, ft.partial(_evaluate, traced=traced), _literal)


def _literal(v: Literal) -> Interval | None:
    """The interval of a constant that a jaxpr holds in place of a variable."""
    aval: Any = v.aval
    if not kind(aval.dtype):
        return None
    x = np.asarray(v.val, aval.dtype).astype(carrier(aval.dtype))
    x = x.reshape((1,) * GRID + aval.shape)
    return source(x, x, aval.dtype)


def _evaluate(eqn, ins, traced: bool) -> list[Interval | None]:
    """The intervals of an equation's results: by its own jaxpr, by a rule, or unknown."""
    prim = eqn.primitive
    if prim in _INLINE:
        name = eqn.params.get("name")
        if prim is P.jit_p and name in _DIVISIONS and None not in ins:
            v = _division(eqn, ins, *_DIVISIONS[name])
            if v is not None:
                return [v]
        inner, consts = _parts(eqn.params[_INLINE[prim]])
        if consts or len(inner.invars) != len(ins):
            return unknown(eqn)
        return _interpret(inner, (), ins, traced)
    if prim is P.cond_p and ins[0] is not None:
        return _cond(eqn, ins, traced)
    shapes = [getattr(v.aval, "shape", ()) for v in (*eqn.invars, *eqn.outvars)]
    if only_varies(eqn):
        return ins
    open_sizes = any(not isinstance(n, int) for s in shapes for n in s)  # of `jax.export`
    if None in ins or open_sizes or any(0 in s for s in shapes):
        return unknown(eqn)
    if prim in ARRAY_RULES:
        v = ARRAY_RULES[prim](eqn, *ins)
    elif prim in RULES or prim in (P.select_n_p, P.clamp_p):
        v = _elementwise(eqn, ins, traced)
    else:
        v = None
    return unknown(eqn) if v is None else [v]


def _elementwise(eqn, ins, traced: bool) -> Interval | None:
    """The interval of an elementwise result, by the sharpest rule that applies."""
    prim, aval = eqn.primitive, eqn.outvars[0].aval
    ins = [expand(i, aval.ndim) for i in ins]
    shape = jax.lax.broadcast_shapes(*(i.lo.shape for i in ins))
    if aval.ndim and too_large(shape, *ins):
        return None
    if traced and not at_most(math.prod(shape), _HOST_ELEMENTS):
        ins = [i.map(lambda x: x if at_most(x.size, 1) else jnp.asarray(x)) for i in ins]
    dtype = eqn.invars[-1].aval.dtype
    if prim is P.select_n_p:
        return select(dtype, *ins)
    if prim is P.clamp_p:
        return clamp(dtype, *ins)
    # `x <= x` holds unless x is NaN; the rule of `<=` sees two intervals and cannot know.
    if prim in REFLEXIVE and eqn.invars[0] is eqn.invars[1]:
        holds = np.full((1,) * (GRID + aval.ndim), REFLEXIVE[prim])
        ok = finite(ins[0]) if kind(dtype) == "f" else True
        return Interval(holds & ok, holds | (not ok if ok is True else ~ok))
    if prim in EXACT and kind(dtype) != "f" and all(i.point for i in ins):
        v = EXACT[prim](*(i.lo for i in ins))
        return Interval(v, v)
    return RULES[prim](dtype, *ins)


def _cond(eqn, ins, traced: bool) -> list[Interval | None]:
    """The hull of the results of those branches that may run."""
    outs = []
    for branch in eqn.params["branches"]:
        inner, consts = _parts(branch)
        if consts:
            return unknown(eqn)
        outs.append(_interpret(inner, (), ins[1:], traced))
    joined = []
    for var, cases in zip(eqn.outvars, zip(*outs)):
        full = top(var.aval)  # a case without an interval says nothing
        if full is not None and None not in cases:
            full = select(var.aval.dtype, expand(ins[0], var.aval.ndim), *cases)
        joined.append(full)
    return joined


def _division(eqn, ins, function, rule) -> Interval | None:
    """The interval of `//` or `%`, if this jit holds what `jnp` defines them to be.

    A user's function may have the same name as these functions of JAX. So the definition is traced
    again, for the same types, and compared with what the equation holds.
    """
    inner, (out,) = eqn.params["jaxpr"], eqn.outvars
    avals = [v.aval for v in _parts(inner)[0].invars]
    if len(avals) != 2 or kind(out.aval.dtype) != "i":
        return None
    if any(kind(a.dtype) != "i" or a.ndim not in (0, out.aval.ndim) for a in avals):
        return None
    shaped = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
    reference = jax.make_jaxpr(function)(*shaped).jaxpr.eqns[0].params.get("jaxpr")
    if reference is None or not _same(inner, reference):
        return None
    a, n = (expand(i, out.aval.ndim) for i in ins)
    a, n = (convert(v.dtype, out.aval.dtype, i) for v, i in zip(avals, (a, n)))
    return None if a is None or n is None else rule(out.aval.dtype, a, n)


def _same(left, right) -> bool:  # noqa: C901 (one branch for each kind of value)
    """Whether two jaxprs are the same computation, up to the names of their variables.

    `twin` maps each variable of the left one to its partner on the right. Both are walked through
    together: definitions add to the map, and uses must agree with it.
    """
    if left is right:
        return True
    (a, a_consts), (b, b_consts) = _parts(left), _parts(right)
    if a_consts or b_consts or len(a.eqns) != len(b.eqns):
        return False
    twin = {}

    def bind(xs, ys):
        twin.update(zip(xs, ys))
        return len(xs) == len(ys) and all(map(alike, xs, ys))

    def alike(x, y):  # mesh axes that a value varies over do not matter here
        x, y = x.aval, y.aval
        return (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, y.weak_type)

    def read(x, y):
        if isinstance(x, Literal) or isinstance(y, Literal):
            both = isinstance(x, Literal) and isinstance(y, Literal)
            return both and alike(x, y) and bool(np.array_equal(x.val, y.val))
        return twin.get(x) is y

    def equal(x, y):
        return _same(x, y) if hasattr(x, "eqns") or hasattr(x, "jaxpr") else bool(x == y)

    def reads(xs, ys):
        return len(xs) == len(ys) and all(map(read, xs, ys))

    if not bind(a.invars, b.invars):
        return False
    for d, e in zip(a.eqns, b.eqns):
        if d.primitive is not e.primitive or d.params.keys() != e.params.keys():
            return False
        if not reads(d.invars, e.invars) or not bind(d.outvars, e.outvars):
            return False
        if not all(equal(d.params[k], e.params[k]) for k in d.params):
            return False
    return reads(a.outvars, b.outvars)
