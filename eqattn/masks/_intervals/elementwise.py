"""Interval rules of elementwise primitives, for NumPy and JAX arrays alike.

A rule takes the dtype of the first operand and an interval for each operand. It gives the interval
of the result, or None where nothing is known. Most follow from one fact: a function that is
monotone in each argument takes its extremes over a box at the box's corners. `_monotone` and `_add`
need two corners, `_sub` two crossed ones, and `_mul`, whose direction in one argument is the sign
of the other, all four. The invariant that each rule keeps is in `interval.py`.
"""

import operator

import jax.numpy as jnp
import numpy as np

from ..._jax import primitives as P
from .interval import carrier, finite, guard, Interval, kind, limits, rounded, xp_of


# Arithmetic. Each integer rule asks whether a bound could wrap around; if so, nothing is known. If
# the exact extremes fit the dtype, so does every exact result between them, and none wraps.


def _add(dtype, a, b):
    if kind(dtype) == "f":
        return rounded((a, b), a.lo + b.lo, a.hi + b.hi, dtype)
    least, most = limits(dtype)
    zero = least.dtype.type(0)

    def fits(x, y):
        # `x + y` can overflow only upwards for `y >= 0`, and only downwards for `y < 0`. The limits
        # minus `y` are themselves in range, so that the test cannot wrap around.
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
    """The least and the greatest of some values, cell by cell."""
    lo = hi = corners[0]
    for c in corners[1:]:
        xp = xp_of(lo, c)
        lo, hi = xp.minimum(lo, c), xp.maximum(hi, c)
    return lo, hi


def _product_fits(x, y, dtype):
    # The product is tested in float32, which cannot wrap around. With 31 bits or more, four
    # roundings of 2^-24 each (two factors, product, limit) stay below the slack of 2^-20. With 16
    # bits or less, a product out of range is at least as far out as `most + 1` or `least - 1`.
    # These are exact in float32 and rounding is monotone, so that the rounded product is out of
    # range too.
    least, most = (float(v) for v in limits(dtype))
    slack = 1.0 if most < 2**24 else 1 - 2**-20
    p = x.astype(np.float32) * y.astype(np.float32)
    return (p <= np.float32(most * slack)) & (p >= np.float32(least * slack))


def _mul(dtype, a, b):
    # For a fixed y, `x * y` is linear in x, so that its extremes are at the ends of x; likewise for
    # y. Over the box, the extremes are therefore among the four corners.
    pairs = [(x, y) for x in a for y in b]
    lo, hi = _hull([x * y for x, y in pairs])
    if kind(dtype) == "f":
        return rounded((a, b), lo, hi, dtype)
    ok = True
    for x, y in pairs:
        ok = ok & _product_fits(x, y, dtype)
    return guard(ok, lo, hi, dtype)


def _square(dtype, a):
    # One value is squared, so that the result is never negative, unlike that of `_mul(a, a)`. The
    # extremes are at the ends of `a`, and at 0 where `a` contains it.
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
    # The signed minimum is its own negative. Unsigned numbers have no negatives but that of 0.
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
    """The rule of a function that never decreases in any argument.

    The function must be exact, and NaN only for NaN. Then its values at all lower bounds and at all
    upper bounds are the extremes, without rounding.
    """

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


clamp = _monotone(lambda least, x, most: _minimum(_maximum(x, least), most))


# Division and bits.


def _by_constant(dtype, a, n, fn):
    """The bounds `fn(a, n) -> (lo, hi)`, for a divisor that is known at each grid cell.

    Cells where it is not positive are unknown. Positive divisors exclude both division by zero and
    the one quotient that wraps around, that of the minimum by -1.
    """
    if kind(dtype) != "i" or not n.point:
        return None
    one = carrier(dtype).type(1)
    lo, hi = fn(a, xp_of(n.lo).maximum(n.lo, one))
    if a.point and isinstance(n.lo, np.ndarray) and (n.lo >= one).all():
        return Interval(lo, lo)
    return guard(n.lo >= one, lo, hi, dtype)


def floor_divide(dtype, a, n):
    """`a // n`, which never decreases in `a`."""
    return _by_constant(dtype, a, n, lambda a, n: (a.lo // n, a.hi // n))


def remainder(dtype, a, n):
    """`a % n`, of the sign of `n`.

    Where both ends have one quotient, `a % n = a - n * (a // n)` is `a` less a constant. Elsewhere
    the range passes a multiple of `n`, where the remainder falls from `n - 1` to 0.
    """

    def fn(a, n):
        first, xp = a.lo // n, xp_of(a.lo, a.hi, n)
        one_period = first == a.hi // n
        lo = xp.where(one_period, a.lo - first * n, carrier(dtype).type(0))
        return lo, xp.where(one_period, a.hi - first * n, n - carrier(dtype).type(1))

    return _by_constant(dtype, a, n, fn)


def _truncate_divide(dtype, a, n):
    # XLA rounds quotients of integers towards zero: the floor, plus one where a negative dividend
    # is no multiple. Like the floor, it does not decrease when the dividend grows.
    zero, one = carrier(dtype).type(0), carrier(dtype).type(1)

    def fn(a, n):
        def trunc(x):
            f = x // n
            return xp_of(f).where((x < zero) & (x - f * n != zero), f + one, f)

        return trunc(a.lo), trunc(a.hi)

    if kind(dtype) == "f":
        # Over divisors of one sign, `x / y` is monotone in each, so that the corners bound it.
        lo, hi = _hull([x / y for x in a for y in n])
        v = rounded((a, n), lo, hi, dtype)
        # XLA may multiply by the reciprocal, and take it for zero where it is subnormal.
        most = one / carrier(dtype).type(jnp.finfo(dtype).smallest_normal)
        positive, negative = (n.lo > zero) & (n.hi <= most), (n.hi < zero) & (n.lo >= -most)
        return guard(positive | negative, v.lo, v.hi, dtype)
    return _by_constant(dtype, a, n, fn)


def _truncate_remainder(dtype, a, n):
    # The remainder has the sign of the dividend `x`, and its magnitude is at most `n - 1` and at
    # most `|x|`. Where all dividends have one sign and one quotient, it is `x` less a constant.
    zero, one = carrier(dtype).type(0), carrier(dtype).type(1)

    def fn(a, n):
        xp = xp_of(a.lo, a.hi, n)

        def parts(x):  # the quotient rounded towards zero, and its remainder
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
    zero, one = carrier(dtype).type(0), carrier(dtype).type(1)
    for x, m in ((a, b), (b, a)):
        # In two's complement, `x & (2^j - 1)` is `x % 2^j`, for negative `x` too. A mask of low
        # bits is recognised by `m & (m + 1) == 0`, as in 0b0111 & 0b1000.
        if m.point and isinstance(m.lo, np.ndarray):
            n = m.lo + one
            if (n > zero).all() and ((n & m.lo) == zero).all():
                return remainder(dtype, x, Interval(n, n))
    # Clearing bits of `x >= 0` gives a number from 0 to `x`. Any negative number may do the
    # clearing.
    least, most = limits(dtype)
    xp = xp_of(*a, *b)
    hi = xp.minimum(xp.where(a.lo >= zero, a.hi, most), xp.where(b.lo >= zero, b.hi, most))
    return guard((a.lo >= zero) | (b.lo >= zero), xp.zeros_like(hi), hi, dtype)


def _or(dtype, a, b):
    if kind(dtype) == "b":
        return Interval(a.lo | b.lo, a.hi | b.hi)
    # For numbers that are not negative, `x | y` is at least either, as bits are only set. It is at
    # most `x + y`, which is `(x | y) + (x & y)`.
    zero, most = carrier(dtype).type(0), limits(dtype)[1]
    xp = xp_of(*a, *b)
    hi = xp.where(a.hi <= most - xp.maximum(b.hi, zero), a.hi + b.hi, most)
    return guard((a.lo >= zero) & (b.lo >= zero), xp.maximum(a.lo, b.lo), hi, dtype)


def _xor(dtype, a, b):
    if kind(dtype) == "b":
        known, odd = (a.lo == a.hi) & (b.lo == b.hi), a.lo ^ b.lo
        return Interval(known & odd, ~known | odd)
    # `x ^ y` has only bits that `x | y` has, and may have none of them.
    v = _or(dtype, a, b)
    least, zero = limits(dtype)[0], carrier(dtype).type(0)
    lo = xp_of(v.lo).where(v.lo >= zero, zero, least)
    return Interval(lo, v.hi)


def _not(dtype, a):
    # `~x` is `-1 - x` (unsigned: `most - x`; bool: `not x`), which decreases and never wraps
    # around.
    return Interval(~a.hi, ~a.lo)


def _shift(fits, op):
    """The rule of a shift by a known number of bits, which never decreases where `fits` holds.

    A left shift multiplies by 2^n, until a bit is lost; a right shift divides by 2^n and rounds
    down. Shifts by a negative number of bits, or by all bits, are unknown.
    """

    def rule(dtype, a, n):
        if kind(dtype) != "i" or not n.point:
            return None
        zero, bits = carrier(dtype).type(0), carrier(dtype).type(8 * carrier(dtype).itemsize)
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
    # It copies the sign bit. In an unsigned number, that bit has the weight 2^(bits - 1) instead.
    return np.asarray(limits(dtype)[0] < 0).reshape((1,) * a.lo.ndim)


# Comparisons. The bounds of the result are two booleans. One says whether it holds for all pairs of
# values in the two intervals (certainly), the other whether it holds for any (possibly).


def _compare(certainly, possibly):
    def rule(dtype, a, b):
        lo, hi = certainly(a, b), possibly(a, b)
        if kind(dtype) == "f":
            ok = finite(a, b)  # NaN makes all comparisons false but `!=`, which it makes true
            return Interval(ok & lo, ~ok | hi)
        return Interval(lo, hi)

    return rule


def _equal(a, b):
    return (a.lo == a.hi) & (b.lo == b.hi) & (a.lo == b.lo)


def _meet(a, b):
    return (a.lo <= b.hi) & (b.lo <= a.hi)


# Each rule is called as `(dtype of the operands, *intervals)`. It returns None for what is unknown.
RULES = {
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
        lambda a, n, dtype: a.lo >= carrier(dtype).type(0), operator.rshift
    ),
    P.lt_p: _compare(lambda a, b: a.hi < b.lo, lambda a, b: a.lo < b.hi),
    P.le_p: _compare(lambda a, b: a.hi <= b.lo, lambda a, b: a.lo <= b.hi),
    P.gt_p: _compare(lambda a, b: a.lo > b.hi, lambda a, b: a.hi > b.lo),
    P.ge_p: _compare(lambda a, b: a.lo >= b.hi, lambda a, b: a.hi >= b.lo),
    P.eq_p: _compare(_equal, _meet),
    P.ne_p: _compare(lambda a, b: ~_meet(a, b), lambda a, b: ~_equal(a, b)),
}

# The result of `x op x` where x is not NaN. Intervals alone do not know that both are one value.
REFLEXIVE = {
    P.le_p: True,
    P.ge_p: True,
    P.eq_p: True,
    P.lt_p: False,
    P.gt_p: False,
    P.ne_p: False,
}

# What integers and bools that are known exactly give. NumPy wraps around as XLA does, so that these
# need no test of overflow.
EXACT = {
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
