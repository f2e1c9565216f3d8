"""Interval rules: what a primitive does to bounds.

An `Interval` holds arrays `(lo, hi)` of rank `4 + n`: four grid axes (batch, head, row block, key
block), each of full size or 1, then the `n` axes of the value (size 1 where it does not vary).
A bool's bounds are (all, any). `lo is hi` marks a point: a value known exactly at each grid cell.
Every rule holds for numpy and jax arrays alike. A float whose bounds are not finite may be NaN.
"""

import math
import operator
from typing import Any, NamedTuple

import jax.extend.core.primitives as P
import jax.numpy as jnp
import numpy as np
from jax import lax


GRID = 4
_MAX_ELEMENTS = 2**20  # of a non-scalar intermediate; beyond it the value counts as unknown


class Interval(NamedTuple):
    lo: Any
    hi: Any

    @property
    def point(self) -> bool:
        return self.lo is self.hi

    def map(self, fn) -> "Interval":
        lo = fn(self.lo)
        return Interval(lo, lo if self.point else fn(self.hi))


def xp_of(*arrays) -> Any:
    return np if all(isinstance(a, np.ndarray) for a in arrays) else jnp


def kind(dtype) -> str | None:
    """`"b"` bool, `"i"` signed or unsigned integer, `"f"` float; None: no rules for this dtype."""
    if dtype == jnp.bool_:
        return "b"
    if getattr(dtype, "kind", "") in "iu" and not jnp.issubdtype(dtype, jnp.extended):
        return "i"
    return "f" if dtype in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64) else None


def carrier(dtype) -> Any:
    """The dtype that holds the bounds."""
    if kind(dtype) != "f":
        return np.dtype(dtype)
    return np.dtype(np.float64 if dtype == jnp.float64 else np.float32)


def limits(dtype) -> tuple[Any, Any]:
    k = kind(dtype)
    if k == "i":
        info = np.iinfo(dtype)
        return np.dtype(dtype).type(info.min), np.dtype(dtype).type(info.max)
    if k == "b":
        return np.bool_(False), np.bool_(True)
    scalar = carrier(dtype).type
    return scalar(-np.inf), scalar(np.inf)


def top(aval) -> Interval | None:
    """Nothing is known: the dtype's whole range, or None for a dtype without bounds."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or kind(dtype) is None:
        return None
    shape = (1,) * (GRID + aval.ndim)
    return Interval(*(np.full(shape, v, carrier(dtype)) for v in limits(dtype)))


def source(lo, hi, dtype) -> Interval:
    """Bounds of stored data: point when `lo is hi`."""
    if kind(dtype) != "f":
        return Interval(lo, hi)
    # A subnormal may or may not be flushed to zero, so it is known only up to the smallest normal.
    xp, c = xp_of(lo, hi), carrier(dtype)
    tiny = c.type(jnp.finfo(dtype).smallest_normal)
    bits = np.dtype(f"uint{8 * c.itemsize}")

    def subnormal(x):
        raw = x.view(bits) if xp is np else lax.bitcast_convert_type(x, bits)
        return (abs(x) < tiny) & ((raw << bits.type(1)) != bits.type(0))

    low, high = subnormal(lo), subnormal(hi)
    if xp is np and not (low.any() or high.any()):
        return Interval(lo, hi)
    return Interval(xp.where(low, -tiny, lo), xp.where(high, tiny, hi))


def guard(ok, lo, hi, dtype) -> Interval:
    """The bounds where `ok`, else the whole range."""
    if isinstance(ok, np.ndarray) and ok.all():
        return Interval(lo, hi)
    xp, (least, most) = xp_of(ok, lo, hi), limits(dtype)
    return Interval(xp.where(ok, lo, least), xp.where(ok, hi, most))


def finite(*ins: Interval):
    ok = True
    for i in ins:
        xp = xp_of(i.lo, i.hi)
        ok = ok & xp.isfinite(i.lo) & xp.isfinite(i.hi)
    return ok


def rounded(ins, lo, hi, dtype, exact=None) -> Interval:
    """Float bounds of a result that may be rounded, fused or flushed by the compiler."""
    c, info, xp = carrier(dtype), jnp.finfo(dtype), xp_of(lo, hi)
    eps, tiny, most = (c.type(float(v)) for v in (info.eps, info.smallest_normal, info.max))
    four, two = c.type(4), c.type(2)
    low = lo - (abs(lo) * eps * four + two * tiny)
    high = hi + (abs(hi) * eps * four + two * tiny)
    if exact is not None:  # no rounding takes place up to this magnitude
        low = xp.where(abs(lo) <= c.type(exact), lo, low)
        high = xp.where(abs(hi) <= c.type(exact), hi, high)
    ok = finite(*ins) if kind(ins[0].lo.dtype) == "f" else True
    return guard(ok & (low >= -most) & (high <= most), low, high, dtype)


# Arithmetic. Each integer rule asks whether a bound could wrap; if so, nothing is known.


def _add(dtype, a, b):
    if kind(dtype) == "f":
        return rounded((a, b), a.lo + b.lo, a.hi + b.hi, dtype)
    least, most = limits(dtype)
    zero = least.dtype.type(0)

    def fits(x, y):
        return xp_of(x, y).where(y >= zero, x <= most - y, x >= least - y)

    return guard(fits(a.lo, b.lo) & fits(a.hi, b.hi), a.lo + b.lo, a.hi + b.hi, dtype)


def _sub(dtype, a, b):
    if kind(dtype) == "f":
        return rounded((a, b), a.lo - b.hi, a.hi - b.lo, dtype)
    least, most = limits(dtype)
    zero = least.dtype.type(0)

    def fits(x, y):
        return xp_of(x, y).where(y >= zero, x >= least + y, x <= most + y)

    return guard(fits(a.lo, b.hi) & fits(a.hi, b.lo), a.lo - b.hi, a.hi - b.lo, dtype)


def _hull(corners):
    lo = hi = corners[0]
    for c in corners[1:]:
        xp = xp_of(lo, c)
        lo, hi = xp.minimum(lo, c), xp.maximum(hi, c)
    return lo, hi


def _product_fits(x, y, dtype):
    # In float32, with room for its rounding where the dtype has more than 24 bits.
    least, most = (float(v) for v in limits(dtype))
    slack = 1.0 if most < 2**24 else 1 - 2**-20
    p = x.astype(np.float32) * y.astype(np.float32)
    return (p <= np.float32(most * slack)) & (p >= np.float32(least * slack))


def _mul(dtype, a, b):
    pairs = [(x, y) for x in a for y in b]
    lo, hi = _hull([x * y for x, y in pairs])
    if kind(dtype) == "f":
        return rounded((a, b), lo, hi, dtype)
    ok = True
    for x, y in pairs:
        ok = ok & _product_fits(x, y, dtype)
    return guard(ok, lo, hi, dtype)


def _square(dtype, a):
    zero = carrier(dtype).type(0)
    xp = xp_of(*a)
    lo, hi = _hull([a.lo * a.lo, a.hi * a.hi])
    lo = xp.where((a.lo <= zero) & (a.hi >= zero), zero, lo)
    if kind(dtype) == "f":
        return rounded((a,), lo, hi, dtype)
    return guard(_product_fits(a.lo, a.lo, dtype) & _product_fits(a.hi, a.hi, dtype), lo, hi, dtype)


def _neg(dtype, a):
    if kind(dtype) == "f":
        return Interval(-a.hi, -a.lo)
    least = limits(dtype)[0]
    ok = a.lo != least if least < 0 else a.hi == least
    return guard(ok, -a.hi, -a.lo, dtype)


def _abs(dtype, a):
    least, zero = limits(dtype)[0], carrier(dtype).type(0)
    if least == 0:
        return a
    xp = xp_of(*a)
    lo, hi = _hull([abs(a.lo), abs(a.hi)])
    lo = xp.where((a.lo <= zero) & (a.hi >= zero), zero, lo)
    ok = finite(a) if kind(dtype) == "f" else a.lo != least
    return guard(ok, lo, hi, dtype)


def _monotone(fn):
    """A function that never decreases in any argument, exact and NaN only for NaN."""

    def rule(dtype, *ins):
        lo, hi = fn(*(i.lo for i in ins)), fn(*(i.hi for i in ins))
        return guard(finite(*ins), lo, hi, dtype) if kind(dtype) == "f" else Interval(lo, hi)

    return rule


def _sign(dtype, a):
    return a.map(lambda x: xp_of(x).sign(x)) if kind(dtype) == "i" else None


def _maximum(x, y):
    return xp_of(x, y).maximum(x, y)


def _minimum(x, y):
    return xp_of(x, y).minimum(x, y)


# Division and bits.


def _by_constant(dtype, a, n, fn):
    """`fn(a, n) -> (lo, hi)` for a positive divisor known at each grid cell."""
    if kind(dtype) != "i" or not n.point:
        return None
    one = np.dtype(dtype).type(1)
    lo, hi = fn(a, xp_of(n.lo).maximum(n.lo, one))
    if a.point and isinstance(n.lo, np.ndarray) and (n.lo >= one).all():
        return Interval(lo, lo)
    return guard(n.lo >= one, lo, hi, dtype)


def floor_divide(dtype, a, n):
    return _by_constant(dtype, a, n, lambda a, n: (a.lo // n, a.hi // n))


def remainder(dtype, a, n):
    def fn(a, n):
        first, xp = a.lo // n, xp_of(a.lo, a.hi, n)
        one_period = first == a.hi // n
        lo = xp.where(one_period, a.lo - first * n, np.dtype(dtype).type(0))
        return lo, xp.where(one_period, a.hi - first * n, n - np.dtype(dtype).type(1))

    return _by_constant(dtype, a, n, fn)


def _truncate_divide(dtype, a, n):
    zero, one = np.dtype(dtype).type(0), np.dtype(dtype).type(1)

    def fn(a, n):
        def trunc(x):
            f = x // n
            return xp_of(f).where((x < zero) & (x - f * n != zero), f + one, f)

        return trunc(a.lo), trunc(a.hi)

    if kind(dtype) == "f":
        lo, hi = _hull([x / y for x in a for y in n])
        v = rounded((a, n), lo, hi, dtype)
        return guard((n.lo > zero) | (n.hi < zero), v.lo, v.hi, dtype)
    return _by_constant(dtype, a, n, fn)


def _truncate_remainder(dtype, a, n):
    zero, one = np.dtype(dtype).type(0), np.dtype(dtype).type(1)

    def fn(a, n):
        xp = xp_of(a.lo, a.hi, n)

        def parts(x):  # quotient and remainder that round towards zero
            f = x // n
            up = (x < zero) & (x - f * n != zero)
            return xp.where(up, f + one, f), xp.where(up, x - f * n - n, x - f * n)

        (q0, r0), (q1, r1) = parts(a.lo), parts(a.hi)
        same = (q0 == q1) & ((a.lo >= zero) | (a.hi <= zero))
        wide_lo = xp.where(a.lo >= zero, zero, xp.maximum(a.lo, one - n))
        wide_hi = xp.where(a.hi <= zero, zero, xp.minimum(a.hi, n - one))
        return xp.where(same, r0, wide_lo), xp.where(same, r1, wide_hi)

    return _by_constant(dtype, a, n, fn) if kind(dtype) == "i" else None


def _and(dtype, a, b):
    if kind(dtype) == "b":
        return Interval(a.lo & b.lo, a.hi & b.hi)
    zero, one = np.dtype(dtype).type(0), np.dtype(dtype).type(1)
    for x, m in ((a, b), (b, a)):  # a low-bits mask is a remainder
        if m.point and isinstance(m.lo, np.ndarray):
            n = m.lo + one
            if (n > zero).all() and ((n & m.lo) == zero).all():
                return remainder(dtype, x, Interval(n, n))
    least, most = limits(dtype)
    xp = xp_of(*a, *b)
    hi = xp.minimum(xp.where(a.lo >= zero, a.hi, most), xp.where(b.lo >= zero, b.hi, most))
    return guard((a.lo >= zero) | (b.lo >= zero), xp.zeros_like(hi), hi, dtype)


def _or(dtype, a, b):
    if kind(dtype) == "b":
        return Interval(a.lo | b.lo, a.hi | b.hi)
    zero, most = np.dtype(dtype).type(0), limits(dtype)[1]
    xp = xp_of(*a, *b)
    hi = xp.where(a.hi <= most - xp.maximum(b.hi, zero), a.hi + b.hi, most)
    return guard((a.lo >= zero) & (b.lo >= zero), xp.maximum(a.lo, b.lo), hi, dtype)


def _xor(dtype, a, b):
    if kind(dtype) == "b":
        known, odd = (a.lo == a.hi) & (b.lo == b.hi), a.lo ^ b.lo
        return Interval(known & odd, ~known | odd)
    v = _or(dtype, a, b)
    least, zero = limits(dtype)[0], np.dtype(dtype).type(0)
    lo = xp_of(v.lo).where(v.lo >= zero, zero, least)
    return Interval(lo, v.hi)


def _not(dtype, a):
    return Interval(~a.hi, ~a.lo)


def _shift(fits, op):
    def rule(dtype, a, n):
        if kind(dtype) != "i" or not n.point:
            return None
        zero, bits = np.dtype(dtype).type(0), np.dtype(dtype).type(8 * np.dtype(dtype).itemsize)
        ok = (n.lo >= zero) & (n.lo < bits)
        n0 = xp_of(n.lo).where(ok, n.lo, zero)
        lo, hi = op(a.lo, n0), op(a.hi, n0)
        sure = ok & fits(a, n0, dtype)
        if a.point and isinstance(sure, np.ndarray) and sure.all():
            return Interval(lo, lo)
        return guard(sure, lo, hi, dtype)

    return rule


def _left_fits(a, n, dtype):
    least, most = limits(dtype)
    return (a.hi <= (most >> n)) & (a.lo >= (least >> n))


def _arithmetic_fits(a, n, dtype):
    return np.asarray(limits(dtype)[0] < 0).reshape((1,) * a.lo.ndim)


# Comparisons: (certainly, possibly).


def _compare(certainly, possibly):
    def rule(dtype, a, b):
        lo, hi = certainly(a, b), possibly(a, b)
        if kind(dtype) == "f":
            ok = finite(a, b)
            return Interval(ok & lo, ~ok | hi)
        return Interval(lo, hi)

    return rule


def _equal(a, b):
    return (a.lo == a.hi) & (b.lo == b.hi) & (a.lo == b.lo)


def _meet(a, b):
    return (a.lo <= b.hi) & (b.lo <= a.hi)


def expand(i: Interval, ndim: int) -> Interval:
    """A scalar's interval beside values with `ndim` axes."""
    extra = ndim - (i.lo.ndim - GRID)
    return i.map(lambda x: x.reshape(*x.shape, *(1,) * extra)) if extra else i


def select(aval, which: Interval, *cases: Interval) -> Interval | None:
    """The hull of the cases that `which` (bool or int) may choose."""
    if which.lo.dtype == np.bool_:
        f, t = cases
        xp = xp_of(*which, *f, *t)
        if which.point and f.point and t.point:
            v = xp.where(which.lo, t.lo, f.lo)
            return Interval(v, v)
        lo = xp.where(which.hi, xp.where(which.lo, t.lo, xp.minimum(f.lo, t.lo)), f.lo)
        hi = xp.where(which.hi, xp.where(which.lo, t.hi, xp.maximum(f.hi, t.hi)), f.hi)
        return Interval(lo, hi)
    least, most = limits(aval.dtype)
    lo, hi = most, least
    for n, case in enumerate(cases):
        n = which.lo.dtype.type(n)
        xp = xp_of(*which, *case)
        chosen = (which.lo <= n) & (n <= which.hi)
        lo = xp.minimum(xp.where(chosen, case.lo, most), lo)
        hi = xp.maximum(xp.where(chosen, case.hi, least), hi)
    zero, last = (which.lo.dtype.type(n) for n in (0, len(cases) - 1))
    return guard((which.lo >= zero) & (which.hi <= last), lo, hi, aval.dtype)


def convert(old, new, a) -> Interval | None:
    k0, k1, c = kind(old), kind(new), carrier(new) if kind(new) else None
    if c is None or old == new:
        return None if c is None else a
    if k0 in "bi" and k1 in "bi" and a.point:
        return a.map(lambda x: x.astype(c))  # modular
    if k1 == "b":
        zero = carrier(old).type(0)
        lo, hi = (a.lo > zero) | (a.hi < zero), ~((a.lo == zero) & (a.hi == zero))
        ok = finite(a) if k0 == "f" else True
        return Interval(ok & lo, ~finite(a) | hi) if k0 == "f" else Interval(lo, hi)
    if k1 == "f":
        v = a.map(lambda x: x.astype(c))
        if k0 == "b":
            return v
        if k0 == "i":
            return rounded((a,), v.lo, v.hi, new, exact=2.0 ** (jnp.finfo(new).nmant + 1))
        wider = jnp.finfo(new).nmant >= jnp.finfo(old).nmant
        if wider and jnp.finfo(new).nexp >= jnp.finfo(old).nexp:
            return v
        w = rounded((a,), v.lo, v.hi, new)
        most = carrier(old).type(min(float(jnp.finfo(new).max), float(jnp.finfo(old).max)))
        return guard((a.lo >= -most) & (a.hi <= most), w.lo, w.hi, new)
    if k0 == "b":
        return a.map(lambda x: x.astype(c))
    least, most = np.iinfo(new).min, np.iinfo(new).max
    if k0 == "f":
        t = carrier(old).type
        ok = finite(a) & (a.lo >= t(least * (1 - 2**-20))) & (a.hi <= t(most * (1 - 2**-20)))
    else:
        info = np.iinfo(old)
        t = np.dtype(old).type
        ok = (a.lo >= t(max(least, info.min))) & (a.hi <= t(min(most, info.max)))
    return guard(ok, a.lo.astype(c), a.hi.astype(c), new)


RULES = {  # (dtype of the first operand, *intervals) -> interval, None if unknown
    P.add_p: _add,
    P.sub_p: _sub,
    P.mul_p: _mul,
    P.square_p: _square,
    P.neg_p: _neg,
    P.abs_p: _abs,
    P.sign_p: _sign,
    P.max_p: _monotone(_maximum),
    P.min_p: _monotone(_minimum),
    P.floor_p: _monotone(lambda x: xp_of(x).floor(x)),
    P.ceil_p: _monotone(lambda x: xp_of(x).ceil(x)),
    P.div_p: _truncate_divide,
    P.rem_p: _truncate_remainder,
    P.and_p: _and,
    P.or_p: _or,
    P.xor_p: _xor,
    P.not_p: _not,
    P.shift_left_p: _shift(_left_fits, operator.lshift),
    P.shift_right_arithmetic_p: _shift(_arithmetic_fits, operator.rshift),
    P.shift_right_logical_p: _shift(
        lambda a, n, dtype: a.lo >= np.dtype(dtype).type(0), operator.rshift
    ),
    P.lt_p: _compare(lambda a, b: a.hi < b.lo, lambda a, b: a.lo < b.hi),
    P.le_p: _compare(lambda a, b: a.hi <= b.lo, lambda a, b: a.lo <= b.hi),
    P.gt_p: _compare(lambda a, b: a.lo > b.hi, lambda a, b: a.hi > b.lo),
    P.ge_p: _compare(lambda a, b: a.lo >= b.hi, lambda a, b: a.hi >= b.lo),
    P.eq_p: _compare(_equal, _meet),
    P.ne_p: _compare(lambda a, b: ~_meet(a, b), lambda a, b: ~_equal(a, b)),
}

REFLEXIVE = {  # x op x where x is not NaN
    P.le_p: True,
    P.ge_p: True,
    P.eq_p: True,
    P.lt_p: False,
    P.gt_p: False,
    P.ne_p: False,
}

EXACT = {  # what integers and bools known exactly give, wraparound included
    P.add_p: operator.add,
    P.sub_p: operator.sub,
    P.mul_p: operator.mul,
    P.neg_p: operator.neg,
    P.square_p: lambda a: a * a,
    P.max_p: _maximum,
    P.min_p: _minimum,
    P.and_p: operator.and_,
    P.or_p: operator.or_,
    P.xor_p: operator.xor,
    P.not_p: operator.invert,
    P.lt_p: operator.lt,
    P.le_p: operator.le,
    P.gt_p: operator.gt,
    P.ge_p: operator.ge,
    P.eq_p: operator.eq,
    P.ne_p: operator.ne,
}


def too_large(shape, *ins: Interval) -> bool:
    return math.prod(shape) > max(_MAX_ELEMENTS, *(i.lo.size for i in ins))
