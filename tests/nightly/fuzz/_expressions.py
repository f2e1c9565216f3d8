"""Drawn functions of a pair: as JAX traces them, and in float64 with their derivatives.

An `Expression` is a graph of operations, some of which are shared. `Algebra` evaluates one on JAX
scalars. `Noisy` evaluates it with NumPy for all pairs, several times: each time it disturbs what
float32 would round. What these times differ by is the condition of the result. Where a disturbance
changes a comparison or a whole number, they differ by much, and the result cannot be judged.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True, eq=False)
class Expression:
    """An operation on other expressions. A leaf has the name of what it reads, or a constant, as
    its `value`.
    """

    op: str
    args: tuple["Expression", ...] = ()
    value: Any = None

    def __str__(self) -> str:
        return self.written({})

    def written(self, seen: dict["Expression", str]) -> str:
        """The expression as text; what was written before has a name."""
        if not self.args:
            return str(self.value)
        if self in seen:
            return seen[self]
        inner = ", ".join(x.written(seen) for x in self.args)
        seen[self] = f"_{len(seen)}"
        return f"{seen[self]}:={self.op}({inner})"

    def evaluate(self, leaf: Callable[[Any], Any], apply: Callable, done: dict) -> Any:
        """The value, given functions for leaves and for operations.

        **Arguments:**

        - `done`: the values of expressions that were evaluated.
        """
        if self not in done:
            xs = [x.evaluate(leaf, apply, done) for x in self.args]
            done[self] = apply(self.op, *xs) if self.args else leaf(self.value)
        return done[self]


_TRACED: dict[str, Callable] = {
    "neg": lambda x: -x,
    "abs": jnp.abs,
    "sign": jnp.sign,
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "round": jnp.round,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "log": jnp.log,
    "log1p": jnp.log1p,
    "tanh": jnp.tanh,
    "logistic": jax.nn.sigmoid,
    "relu": jax.nn.relu,
    "sqrt": jnp.sqrt,
    "rsqrt": lax.rsqrt,
    "square": jnp.square,
    "cube": lambda x: x**3,
    "inverse": lambda x: x**-1,
    "over_square": lambda x: x**-2,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "pow": lambda x, y: x**y,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "clamp": lambda low, x, high: jnp.clip(x, low, high),
    "where": jnp.where,
    "quotient": lambda x, y: x // y,
    "remainder": lambda x, y: x % y,
    "truncated": lambda x, y: lax.rem(x, jnp.int32(y)),
    "shl": lambda x, y: lax.shift_left(x, jnp.int32(y)),
    "shr": lambda x, y: lax.shift_right_arithmetic(x, jnp.int32(y)),
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "not": jnp.invert,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "float": lambda x: jnp.asarray(x).astype(jnp.float32),
    "int": lambda x: jnp.asarray(x).astype(jnp.int32),
    "bool": lambda x: jnp.asarray(x).astype(jnp.bool_),
}
"""What a user would write."""


def traced(expression: Expression, leaf: Callable[[Any], Any]) -> Any:
    """The expression on JAX's scalars."""

    def apply(op, *xs):
        if not any(isinstance(x, jax.Array) for x in xs):
            xs = [jnp.asarray(xs[0]), *xs[1:]]
        return _TRACED[op](*xs)

    return expression.evaluate(leaf, apply, {})


NOISE = 2.0**-22
"""The most by which a number is disturbed, of its size. Rounding to float32 is within 2^-24."""


@dataclasses.dataclass
class Number:
    """A float, with its derivative by the logit. Both are `[times, ...]`."""

    value: Any
    rate: Any


@dataclasses.dataclass
class Noisy:
    """The evaluation with NumPy.

    **Arguments:**

    - `rng`: the source of disturbances. The first of the `times` has none.
    - `shape`: that of all numbers, `[times, ...]`.
    - `most`: the most by which a number is disturbed, of its size.

    `bad` says where a number left the range in which float32 is good.
    """

    rng: np.random.Generator
    shape: tuple[int, ...]
    most: float = NOISE
    bad: Any = False

    def noise(self, x: Any, size: Any = 1.0) -> Any:
        """A number with an error of `size` roundings of it."""
        error = self.rng.uniform(-self.most, self.most, self.shape) * size
        error[0] = 0
        return x * (1 + error)

    def shift(self, x: Any, size: Any) -> Any:
        """A number with an error of `size` roundings of 1."""
        return x + self.noise(np.full(self.shape, 1.0), size) - 1

    def checked(self, x: Number, seen: Any = True) -> Number:
        """Notes where a number is out of range."""
        for y in (x.value, x.rate):
            size = np.abs(y)
            fine = np.isfinite(y) & (size < 1e12) & ((size > 1e-12) | (y == 0))
            self.bad = self.bad | (~fine & seen).any(0)
        return x

    def apply(self, op: str, *xs: Any) -> Any:
        """The result of an operation."""
        with np.errstate(all="ignore"):
            if op == "float":
                value = np.asarray(xs[0], np.float64)
                return Number(value, np.zeros_like(value))
            floats = [x for x in xs if isinstance(x, Number)]
            if op == "where" and floats:
                p, x, y = xs
                pick = lambda a, b: np.where(p, a, b)
                return Number(pick(x.value, y.value), pick(x.rate, y.rate))
            if op == "clamp" and floats:
                low, x, high = xs
                return self.apply("min", self.apply("max", x, low), high)
            if floats and op in _EXACT:
                values = [x.value for x in floats]
                return self.exact(op, values, [x.rate for x in floats])
            if floats:
                return self.rounded(op, *floats)
            found = _WHOLE[op](*xs)
            if found.dtype != np.bool_:
                self.bad = self.bad | (np.abs(found) >= 2**31).any(0)
            return found

    def exact(self, op: str, values: list, rates: list) -> Any:
        """The result of an operation on floats that does not round."""
        if op in _COMPARED:
            return _WHOLE[op](*values)
        if op == "int":
            return np.trunc(values[0]).astype(np.int64)
        if op == "bool":
            return values[0] != 0
        if op in ("max", "min"):
            (x, y), (dx, dy) = values, rates
            first = x >= y if op == "max" else x <= y
            return Number(np.where(first, x, y), np.where(first, dx, dy))
        (x,), (dx,) = values, rates
        value, rate = _STEPS[op](x)
        return Number(value, rate * dx)

    def rounded(self, op: str, *xs: Number) -> Number:
        """The result of an operation on floats that rounds."""
        values = [x.value for x in xs]
        value, partials = _SMOOTH[op](*values)
        value = self.noise(value)
        if op in ("exp", "exp2", "pow"):
            self.checked(Number(value, value))
            value = self.noise(value, 1 + np.abs(np.log(np.abs(value))))
        elif op in _ABSOLUTE:
            value = self.shift(value, 1 + np.abs(values[0]) * (op in ("sin", "cos")) / 64)
        # The derivative is that at the number that was rounded.
        partials = [self.noise(x) for x in partials]
        if op == "tanh":
            partials = [self.shift(1 - value * value, 2)]
        terms = [self.noise(p * x.rate) for p, x in zip(partials, xs)]
        moves = [np.where(x.rate == 0, 0, t) for t, x in zip(terms, xs)]
        return self.checked(Number(value, self.noise(sum(moves))))


_COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")
_ABSOLUTE = ("tanh", "sin", "cos", "log1p", "log")
_STEPS: dict[str, Callable] = {
    "neg": lambda x: (-x, -1.0),
    "abs": lambda x: (np.abs(x), np.sign(x)),
    "sign": lambda x: (np.sign(x), 0.0),
    "floor": lambda x: (np.floor(x), 0.0),
    "ceil": lambda x: (np.ceil(x), 0.0),
    "round": lambda x: (np.round(x), 0.0),
    "relu": lambda x: (np.maximum(x, 0), (x > 0) * 1.0),
}
_EXACT = {*_STEPS, *_COMPARED, "max", "min", "int", "bool"}
_SMOOTH: dict[str, Callable] = {
    "add": lambda x, y: (x + y, [1.0, 1.0]),
    "sub": lambda x, y: (x - y, [1.0, -1.0]),
    "mul": lambda x, y: (x * y, [y, x]),
    "div": lambda x, y: (x / y, [1 / y, -x / y**2]),
    "pow": lambda x, y: (x**y, [y * x ** (y - 1), x**y * np.log(x)]),
    "exp": lambda x: (np.exp(x), [np.exp(x)]),
    "exp2": lambda x: (2.0**x, [2.0**x * np.log(2)]),
    "log": lambda x: (np.log(x), [1 / x]),
    "log1p": lambda x: (np.log1p(x), [1 / (1 + x)]),
    "tanh": lambda x: (np.tanh(x), [1 - np.tanh(x) ** 2]),
    "logistic": lambda x: (1 / (1 + np.exp(-x)), [np.exp(-x) / (1 + np.exp(-x)) ** 2]),
    "sqrt": lambda x: (np.sqrt(x), [0.5 / np.sqrt(x)]),
    "rsqrt": lambda x: (x**-0.5, [-0.5 * x**-1.5]),
    "square": lambda x: (x * x, [2 * x]),
    "cube": lambda x: (x**3, [3 * x**2]),
    "inverse": lambda x: (1 / x, [-1 / x**2]),
    "over_square": lambda x: (1 / x**2, [-2 / x**3]),
    "sin": lambda x: (np.sin(x), [np.cos(x)]),
    "cos": lambda x: (np.cos(x), [-np.sin(x)]),
}
_WHOLE: dict[str, Callable] = {
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "square": np.square,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "where": np.where,
    "quotient": np.floor_divide,
    "remainder": np.mod,
    "truncated": np.fmod,
    "shl": np.left_shift,
    "shr": np.right_shift,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "int": lambda x: np.asarray(x, np.int64),
    "bool": lambda x: np.asarray(x) != 0,
}
"""Those of integers and booleans."""
