"""Evaluates operations on the numbers of a pair in kernels.

Mosaic GPU, the compiler of kernels, uses the fast instructions of the chip. For exponentials and
logarithms these are accurate enough. But the instruction for tanh has 11 bits, and those for sine
and cosine are right for small angles only. So these three are written here with operations that are
exact to a few units of the last place of float32.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._jax import only_varies
from ..._sweep.differences import cut_diagonals_p
from ..._sweep.products import dot_p
from .._program import calls, equations, LOG2E


_SAME = {lax.broadcast_in_dim_p, lax.reshape_p, lax.squeeze_p, lax.transpose_p, lax.copy_p}


def named(names: str) -> set:
    """Operations by their names."""
    return {getattr(lax, f"{name}_p") for name in names.split()}


_OF_A_PAIR = named(
    "abs add and clamp convert_element_type div eq exp exp2 ge gt is_finite le log lt max min mul "
    "ne neg not or rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical "
    "sign sqrt square sub xor"
)
"""Operations that Mosaic GPU, the compiler of these kernels, lowers in jax 0.12."""

_EIGHT_BITS = (jnp.int8, jnp.uint8)
"""Integers whose pairs Mosaic GPU does not compute with."""


def tanh_of(e: Any, inverse: Callable[[Any], Any] = lambda x: 1 / x) -> Any:
    """The hyperbolic tangent of a number `x`, from `e = exp(2 x)`. Its absolute error is some
    2^-23, also where the result is small.

    **Arguments:**

    - `inverse`: the device's function for `1 / x`, for `x` of 1 or more.
    """
    return 1 - 2 * inverse(1 + e)


def _tanh(x: Any) -> Any:
    return tanh_of(jnp.exp(x + x))


_HALF_PI = 1.5625, 0.00830078125, -4.4544551033807686e-06
"""Half of pi in three parts. The first two have few bits, so that products with them are exact."""

_SINE = 1.0, -0.16666658, 0.0083330511, -0.00019809075, 2.6052249e-06
"""The coefficients of the odd polynomial that is nearest to a sine up to half of pi, the lowest
first.
"""


def _sine_of(x: Any, quarters: Any) -> Any:
    """The sine of what remains of an angle `x` after `quarters` quarter turns, with the sign that
    these give it.

    **Arguments:**

    - `quarters`: the number of quarter turns, even for a sine and odd for a cosine.
    """
    for part in _HALF_PI:
        x = x - quarters * np.float32(part)
    square, y = x * x, np.float32(_SINE[-1])
    for c in _SINE[-2::-1]:
        y = y * square + np.float32(c)
    whole = quarters.astype(jnp.int32)
    transposed = (whole + (whole & 1)) & 2
    return jnp.where(transposed == 0, x * y, -(x * y))


def _sin(x: Any) -> Any:
    return _sine_of(x, 2 * jnp.round(x * np.float32(1 / np.pi)))


def _cos(x: Any) -> Any:
    return _sine_of(x, 2 * jnp.round(x * np.float32(1 / np.pi) - np.float32(0.5)) + 1)


def _floor(x: Any) -> Any:
    whole = jnp.round(x)
    return jnp.where(whole > x, whole - 1, whole)


def _integer_pow(x: Any, y: int) -> Any:
    """Multiplies powers out. The compiler lacks the power 1, which derivatives have, and most
    negative powers.
    """
    if y == 0:
        return jnp.ones_like(x)
    power: Any = None
    for digit in f"{abs(y):b}":
        power = None if power is None else power * power
        power = power if digit == "0" else x if power is None else power * x
    return power if y > 0 else 1 / power


_WRITTEN: dict[str, Callable] = {
    "add_any": lax.add,
    "integer_pow": _integer_pow,
    "one_minus_square": lambda x: (1 - x) * (1 + x),
    "tanh": _tanh,
    "sin": _sin,
    "cos": _cos,
    "floor": _floor,
    "ceil": lambda x: -_floor(-x),
    "log1p": lambda x: jnp.log(1 + x),
    "log2": lambda x: jnp.log(x) * np.float32(LOG2E),
    "logistic": lambda x: 1 / (1 + jnp.exp(-x)),
}
"""Operations that the compiler lacks, or for which it uses an instruction that is too inexact."""

_KNOWN = _SAME | {lax.slice_p, dot_p, cut_diagonals_p}
_DTYPES = jnp.float32, jnp.int32, jnp.bool_


def unsupported(jaxpr: Any, of_a_pair: set = _OF_A_PAIR) -> str:
    """The name of an operation in a block function that a kernel cannot hold; empty if there is
    none.

    **Arguments:**

    - `of_a_pair`: the operations of one pair that the compiler has.
    """
    for eqn in equations(jaxpr):
        if not (is_known(eqn, of_a_pair) or calls(eqn)):
            return eqn.primitive.name
    return ""


def unsupported_of_users(jaxpr: Any, is_mask: bool, of_a_pair: set = _OF_A_PAIR) -> str:
    """Why a kernel cannot hold a user's function; empty if it can.

    **Arguments:**

    - `is_mask`: whether it is a mask. These may compute with narrow numbers.
    - `of_a_pair`: as for `unsupported`.
    """
    for eqn in equations(jaxpr):
        if calls(eqn) is not None:
            continue
        if eqn.primitive in (lax.slice_p, dot_p) or not is_known(eqn, of_a_pair):
            return f"has a {eqn.primitive.name}, which the compiler of kernels does not know"
        for aval in (v.aval for v in eqn.outvars):
            if aval.dtype not in _DTYPES and not is_mask:
                return f"has numbers of {aval.dtype}: kernels compute in float32 and int32"
    return ""


def is_known(eqn: Any, of_a_pair: set = _OF_A_PAIR) -> bool:
    """Whether a kernel can hold an operation."""
    if of_a_pair is _OF_A_PAIR and any(v.aval.dtype in _EIGHT_BITS for v in eqn.invars):
        return False
    if eqn.primitive is lax.rem_p and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
        return False
    known = eqn.primitive in of_a_pair | _KNOWN
    return known or eqn.primitive.name in _WRITTEN or is_identity(eqn)


def is_identity(eqn: Any) -> bool:
    """Whether an operation only annotates a value: how it is sharded or differentiated."""
    return eqn.primitive.name in ("reshard", "stop_gradient") or only_varies(eqn)


def is_same(eqn: Any) -> bool:
    """Whether an operation changes the shape of a value, but not its number at a pair."""
    return eqn.primitive in _SAME or is_identity(eqn)


@dataclasses.dataclass(frozen=True)
class Native:
    """The operations that a compiler has itself, so that they need not be written here.

    **Arguments:**

    - `names`: operations that the compiler has, and that are accurate enough.
    - `exp2`: the function for powers of two.
    - `inverse`: the function for `1 / x`, for `x` of 1 or more.
    - `both`: the function for `and` of two predicates on blocks of pairs.
    """

    names: frozenset[str] = frozenset()
    exp2: Callable[[Any], Any] = jnp.exp2
    inverse: Callable[[Any], Any] = lambda x: 1 / x
    both: Callable[[Any, Any], Any] = lax.bitwise_and


PLAIN = Native()
"""The operations of the interpreter, which has no faster ones."""


@dataclasses.dataclass(frozen=True)
class Value:
    """An array with one axis for each letter of its kind. A vector that no pair indexes has its
    numbers in `parts` instead.
    """

    kind: str
    array: Any
    parts: tuple = ()

    def spread(self, kind: str, sizes: dict[str, int]) -> Any:
        """The array, repeated over the axes of a larger kind."""
        if self.kind == kind:
            return self.array
        if jnp.result_type(self.array) == jnp.bool_:  # the compiler does not repeat these
            return Value(self.kind, _as_number(self.array, jnp.int32)).spread(kind, sizes) != 0
        shape, own = tuple(sizes[a] for a in kind), [kind.index(a) for a in self.kind]
        return lax.broadcast_in_dim(jnp.asarray(self.array), shape, own)


def _as_number(x: Any, dtype: Any) -> Any:
    """1 where a boolean holds, else 0."""
    if isinstance(x, bool | np.bool_):
        return jnp.asarray(int(x), dtype)
    one = jnp.asarray(1, dtype)
    return jnp.where(x, one, one * 0)


def joined(xs: Sequence[Value], sizes: dict[str, int]) -> str:
    """The kind of a result of several values: it varies with all that some of them vary with."""
    return "".join(a for a in sizes if any(a in x.kind for x in xs))


def in_range(x: Any, factor: Any) -> Any:
    """A known number times a factor, which is finite if both are."""
    info = np.finfo(np.float32)
    if np.isinf(x):
        return x * factor
    xp = np if isinstance(factor, float | np.floating) else jnp
    return xp.clip(np.float32(x) * factor, info.min, info.max)


def evaluated(
    eqn: Any, xs: Sequence[Value], sizes: dict[str, int], native: Native = PLAIN
) -> Value:
    """Evaluates an operation of one pair on its arguments."""
    if eqn.primitive is lax.slice_p:
        (start,), (limit,) = eqn.params["start_indices"], eqn.params["limit_indices"]
        parts = xs[0].parts[start : limit : (eqn.params["strides"] or (1,))[0]]
        return Value("", None, parts)
    if is_same(eqn):
        (x, *_) = xs
        return Value("", x.parts[0]) if len(x.parts) == 1 else x
    if eqn.primitive is lax.reduce_sum_p:  # it sums the values of a row
        return Value(xs[0].kind[:1], xs[0].array.sum(1))
    kind = joined(xs, sizes)
    arrays = [x.spread(kind, sizes) for x in xs] if kind else [x.array for x in xs]
    params = eqn.params | ({"sharding": None} if "sharding" in eqn.params else {})
    if eqn.primitive is lax.is_finite_p:
        return Value(kind, jnp.abs(arrays[0]) < jnp.inf)
    if eqn.primitive is lax.not_p and eqn.invars[0].aval.dtype == jnp.bool_:
        return Value(kind, _as_number(arrays[0], jnp.int32) == 0)
    if eqn.primitive is lax.convert_element_type_p and params["new_dtype"] == jnp.bool_:
        # A boolean that JAX calls weakly typed is converted, too.
        known = eqn.invars[0].aval.dtype == jnp.bool_
        return Value(kind, arrays[0] if known else arrays[0] != 0)
    if eqn.primitive is lax.convert_element_type_p and eqn.invars[0].aval.dtype == jnp.bool_:
        return Value(kind, _as_number(arrays[0], params["new_dtype"]))
    if eqn.primitive.name in _WRITTEN and eqn.primitive.name not in native.names:
        power = {"y": params["y"]} if eqn.primitive is lax.integer_pow_p else {}
        return Value(kind, _WRITTEN[eqn.primitive.name](*arrays, **power))
    return Value(kind, eqn.primitive.bind(*arrays, **params))
