"""Bounds of a scalar over a grid of blocks, as numpy or jax arrays."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax


GRID = 4  # batch, head, row block, key block
_INTEGERS = {np.dtype(f"{u}int{n}") for u in ("", "u") for n in (8, 16, 32, 64)}
_FLOATS = {np.dtype(t) for t in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)}


class Interval(NamedTuple):
    """Every value lies in `[lo, hi]`; a bool's bounds are (all, any).

    Both are arrays of rank `4 + n`: the four grid axes (each of full size or 1), then the `n` axes
    of the value itself. `lo is hi` marks a point: a value known exactly at each grid cell. A float
    whose bounds are not finite may be NaN. float16 and bfloat16 have float32 bounds.
    """

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
    """Nothing is known: the dtype's whole range, or None for a dtype without rules."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or not kind(dtype):
        return None
    return Interval(*(np.full((1,) * (GRID + aval.ndim), v) for v in limits(dtype)))


def source(lo, hi, dtype) -> Interval:
    """Bounds of stored data (a point when `lo is hi`), already in the bounds' dtype."""
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
    if isinstance(low, np.ndarray) and not (low.any() or high.any()):
        return Interval(lo, hi)
    return Interval(xp.where(low, -tiny, lo), xp.where(high, tiny, hi))


def guard(ok, lo, hi, dtype) -> Interval:
    """The bounds where `ok`, else the whole range."""
    if isinstance(ok, np.ndarray) and ok.all():
        return Interval(lo, hi)
    xp, (least, most) = xp_of(ok, lo, hi), limits(dtype)
    return Interval(xp.where(ok, lo, least), xp.where(ok, hi, most))


def finite(*ins: Interval) -> Any:
    ok = np.ones((1,) * ins[0].lo.ndim, np.bool_)
    for a in (b for i in ins for b in i):
        ok = ok & xp_of(a).isfinite(a)
    return ok


def rounded(ins, lo, hi, dtype, exact_up_to: float = -1.0) -> Interval:
    """Float bounds of a result that may be rounded, fused, or flushed to zero by the compiler."""
    c, info, xp = carrier(dtype), jnp.finfo(dtype), xp_of(lo, hi)
    eps, tiny, most = (c.type(float(v)) for v in (info.eps, info.smallest_normal, info.max))
    low = lo - (abs(lo) * (eps * c.type(4)) + tiny * c.type(2))
    high = hi + (abs(hi) * (eps * c.type(4)) + tiny * c.type(2))
    if exact_up_to >= 0:
        low = xp.where(abs(lo) <= c.type(exact_up_to), lo, low)
        high = xp.where(abs(hi) <= c.type(exact_up_to), hi, high)
    ok = (low >= -most) & (high <= most)
    if kind(ins[0].lo.dtype) == "f":
        ok = ok & finite(*ins)
    return guard(ok, low, high, dtype)
