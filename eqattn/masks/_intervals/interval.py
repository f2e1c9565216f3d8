"""Intervals: bounds of a value over a grid of blocks, as NumPy or JAX arrays.

All rules keep one invariant. For each grid cell, every value that the compiled mask may compute for
a pair in that cell lies in `[lo, hi]`. It holds for the bounds of the inputs, and each rule
preserves it. So it holds for the bounds of the result.

- Wider bounds are always sound. `guard` gives up, cell by cell, by widening to the whole range.
- Integer bounds must hold in the arithmetic modulo 2^n that XLA computes in. A rule therefore gives
  up wherever an exact result might not fit the dtype.
- Float bounds are rounded outwards, see `rounded`. NaN compares with nothing and so is in no
  interval of finite ends: finite bounds promise that there is none, infinite ones promise nothing.
- Variables are bounded one by one, and relations between them are lost: `x - x` over `[0, 3]` is
    bounded by `[-3, 3]`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax


GRID = 4  # the number of grid axes: batch, head, row block, key block
_INTEGERS = {np.dtype(f"{u}int{n}") for u in ("", "u") for n in (8, 16, 32, 64)}
_FLOATS = {np.dtype(t) for t in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)}


class Interval(NamedTuple):
    """Every value lies in `[lo, hi]`; a bool's bounds are (all, any), since False < True.

    Both are arrays of rank `4 + n`: the four grid axes (each of full size or 1), then the `n` axes
    of the value itself. If `lo is hi`, the interval is a point: the value is known exactly at each
    grid cell. A float whose bounds are not finite may be NaN. float16 and bfloat16 have float32
    bounds.
    """

    lo: Any
    hi: Any

    @property
    def point(self) -> bool:
        """Whether the value is known exactly at each grid cell."""
        return self.lo is self.hi

    def map(self, fn) -> "Interval":
        """The bounds through `fn`, which never decreases or only rearranges entries."""
        lo = fn(self.lo)
        return Interval(lo, lo if self.point else fn(self.hi))


def xp_of(*arrays) -> Any:
    """The module to compute with: NumPy while all arrays are NumPy's, else `jax.numpy`."""
    return np if all(isinstance(a, np.ndarray) for a in arrays) else jnp


def kind(dtype) -> str:
    """`"b"` bool, `"i"` signed or unsigned integer, `"f"` float; `""`: no rules for this dtype."""
    if dtype in _INTEGERS:
        return "i"
    if dtype in _FLOATS:
        return "f"
    return "b" if dtype == np.bool_ else ""


def carrier(dtype) -> np.dtype:
    """The dtype of the bounds."""
    if kind(dtype) == "f":
        return np.dtype(np.float64 if dtype == np.float64 else np.float32)
    return np.dtype(dtype)


def limits(dtype) -> tuple[Any, Any]:
    """The least and the greatest bound, as scalars of the bounds' dtype."""
    c = carrier(dtype)
    if kind(dtype) == "i":
        return c.type(np.iinfo(c).min), c.type(np.iinfo(c).max)
    return (c.type(0), c.type(1)) if kind(dtype) == "b" else (c.type(-np.inf), c.type(np.inf))


def top(aval) -> Interval | None:
    """The interval of which nothing is known: the dtype's whole range, or None without rules."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or not kind(dtype):
        return None
    return Interval(*(np.full((1,) * (GRID + aval.ndim), v) for v in limits(dtype)))


def source(lo, hi, dtype) -> Interval:
    """Bounds of stored data (a point when `lo is hi`), already in the bounds' dtype."""
    if kind(dtype) != "f":
        return Interval(lo, hi)
    # A subnormal may or may not be flushed to zero. So any value between 0 and the smallest normal
    # of its sign may stand for it. The bits tell it from 0: compared as a float, it would equal 0
    # wherever the device that compares flushes it. The shift drops the sign bit.
    xp, c = xp_of(lo, hi), carrier(dtype)
    tiny = c.type(jnp.finfo(dtype).smallest_normal)
    bits = np.dtype(f"uint{8 * c.itemsize}")

    def subnormal(x):
        raw = x.view(bits) if xp is np else lax.bitcast_convert_type(x, bits)
        return (abs(x) < tiny) & ((raw << bits.type(1)) != bits.type(0))

    low, high = subnormal(lo), subnormal(hi)
    if isinstance(low, np.ndarray) and not (low.any() or high.any()):
        return Interval(lo, hi)
    return Interval(xp.where(low, -tiny, lo), xp.where(high, tiny, hi))


def guard(ok, lo, hi, dtype) -> Interval:
    """The bounds in the cells where `ok`, and the dtype's whole range elsewhere."""
    if isinstance(ok, np.ndarray) and ok.all():
        return Interval(lo, hi)
    xp, (least, most) = xp_of(ok, lo, hi), limits(dtype)
    return Interval(xp.where(ok, lo, least), xp.where(ok, hi, most))


def finite(*ins: Interval) -> Any:
    """Where all bounds are finite, and so no value can be NaN or infinite."""
    ok = np.ones((1,) * ins[0].lo.ndim, np.bool_)
    for a in (b for i in ins for b in i):
        ok = ok & xp_of(a).isfinite(a)
    return ok


def rounded(ins, lo, hi, dtype, exact_up_to: float = -1.0) -> Interval:
    """Float bounds of a result that may be rounded, fused, or flushed to zero by the compiler.

    `lo` and `hi` are computed bounds of the exact result. They move outwards by `4 eps |x| + 2
    tiny`, where `eps` is the distance from 1 to the next number and `tiny` the smallest normal.
    This covers

    - the device's rounding, at most `eps / 2` relative, or about `eps` where it divides by
      multiplying with a rounded reciprocal;
    - the rounding of the computed bound, `eps / 2`, and of moving it, `eps` at most;
    - flushing to zero, less than `tiny` on the device and again here, under a trace.

    A fused multiply-add skips the rounding of its product. It stays inside since the product's
    interval, widened on both sides, also holds the exact product. The same holds for narrow floats
    that XLA keeps in float32 between two operations.

    **Arguments:**

    - `ins`: the operands; the result may be NaN or infinite where a bound of theirs is not finite.
    - `lo`, `hi`: the bounds before rounding, in the carrier of `dtype`.
    - `dtype`: the dtype of the result.
    - `exact_up_to`: results of at most this magnitude are exact, and not widened.
    """
    c, info, xp = carrier(dtype), jnp.finfo(dtype), xp_of(lo, hi)
    eps, tiny, most = (c.type(float(v)) for v in (info.eps, info.smallest_normal, info.max))
    low = lo - (abs(lo) * (eps * c.type(4)) + tiny * c.type(2))
    high = hi + (abs(hi) * (eps * c.type(4)) + tiny * c.type(2))
    if exact_up_to >= 0:
        low = xp.where(abs(lo) <= c.type(exact_up_to), lo, low)
        high = xp.where(abs(hi) <= c.type(exact_up_to), hi, high)
    ok = (low >= -most) & (high <= most)  # beyond it, the device may have overflowed
    if kind(ins[0].lo.dtype) == "f":
        ok = ok & finite(*ins)
    return guard(ok, low, high, dtype)
