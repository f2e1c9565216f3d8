"""Draws expressions of a pair, with the arrays that they read."""

import dataclasses
from typing import Any

import numpy as np

from ._expressions import Expression


FLOATS = (-2.0, -1.0, -0.5, 0.0, 0.25, 1.0, 1.5, 3.0, 0.1, -0.7, 2.0)
INTEGERS = (-3, -1, 0, 1, 2, 3, 5, 7)
NAMES = {"f": "float", "i": "int", "b": "bool"}
PLACES = ("", "", "h", "q", "k", "qk")
"""What an array is indexed by: nothing for a number."""
SMALL = ("", "", "", "", "h", "q", "k")
"""What factors are indexed by."""


@dataclasses.dataclass
class Drawing:
    """Expressions that are drawn one after the other.

    **Arguments:**

    - `rng`: the source.
    - `sizes`: the number of heads, queries and keys, by letter.
    - `logit`: whether the logit may be read.

    `arrays` are those that the expressions read, by name. A name is the letter of its kind, a
    number, and the letters that index it: `f3_hq`.
    """

    rng: np.random.Generator
    sizes: dict[str, int]
    arrays: dict[str, Any]
    logit: bool
    made: dict[str, list[Expression]] = dataclasses.field(
        default_factory=lambda: {"f": [], "i": [], "b": []}
    )

    def one(self, *xs: Any) -> Any:
        return xs[self.rng.integers(len(xs))]

    def likely(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def draw(self, kind: str, depth: int) -> Expression:
        """An expression of a kind, at most so deep."""
        if self.made[kind] and self.likely(0.2):
            return self.one(*self.made[kind])
        if depth <= 0 or self.likely(0.1):
            return self.leaf(kind)
        new = {"f": self.float, "i": self.integer, "b": self.boolean}[kind](depth - 1)
        self.made[kind].append(new)
        return new

    def leaf(self, kind: str) -> Expression:
        if kind == "f" and self.logit and self.likely(0.45):
            return Expression("", value="s")
        if kind == "i" and self.likely(0.6):
            return Expression("", value=self.one("q", "k", "q", "k", "h", "b"))
        if kind == "b" and self.likely(0.7):
            return self.compared("i", 0)
        return self.constant(kind) if kind != "b" and self.likely(0.4) else self.array(kind)

    def constant(self, kind: str) -> Expression:
        return Expression("", value=self.one(*(FLOATS if kind == "f" else INTEGERS)))

    def array(self, kind: str, places: tuple[str, ...] = PLACES) -> Expression:
        place = self.one(*places)
        same = [n for n in self.arrays if n[0] == kind and n.partition("_")[2] == place]
        if same and self.likely(0.5):
            return Expression("", value=self.one(*same))
        shape, name = [self.sizes[a] for a in place], f"{kind}{len(self.arrays)}_{place}"
        if kind == "f":
            x = self.rng.uniform(-2, 2, shape) * (not self.likely(0.05))
            self.arrays[name] = np.float32(x)
        elif kind == "i":
            self.arrays[name] = np.int32(self.rng.integers(-4, 6, shape))
        else:
            self.arrays[name] = self.rng.integers(0, 2, shape) > 0
        return Expression("", value=name)

    def small(self, depth: int = 1, places: tuple[str, ...] = ()) -> Expression:
        """A number that few pairs differ in, of either sign."""
        places = places or (self.one(*SMALL),)
        x = self.constant("f") if self.likely(0.4) else self.array("f", places)
        if depth and self.likely(0.5):
            op = self.one("mul", "max", "max", "min", "neg", "abs", "add", "sub", "where")
            if op in ("neg", "abs"):
                return Expression(op, (x,))
            both = (x, self.small(depth - 1, places))
            return Expression(op, (self.leaf("b"), *both) if op == "where" else both)
        return x

    def positive(self, x: Expression) -> Expression:
        more = Expression("", value=self.one(0.1, 0.5, 1.0))
        return Expression("add", (Expression(self.one("abs", "square"), (x,)), more))

    def scaled(self, x: Expression) -> Expression:
        """An expression with some factors, which kernels multiply first."""
        while True:
            op, y = self.one("mul", "mul", "mul", "div"), self.small()
            if op == "div" and self.likely(0.7):
                y = Expression("", value=self.one(-2.0, 0.5, 3.0, -0.7))
            x = Expression(op, (x, y) if op == "div" or self.likely(0.5) else (y, x))
            if self.likely(0.4):
                return x

    def float(self, depth: int) -> Expression:
        rng_op = self.rng.random()
        x = self.draw("f", depth)
        if rng_op < 0.28:
            return self.scaled(x)
        if rng_op < 0.5:
            op = self.one("add", "sub", "mul", "max", "min", "max", "min", "add", "sub")
            return Expression(op, (x, self.draw("f", depth)))
        if rng_op < 0.62:
            return Expression("where", (self.draw("b", depth), x, self.draw("f", depth)))
        if rng_op < 0.66:
            low, high = sorted((self.one(*FLOATS), self.one(*FLOATS)))
            low, high = (Expression("", value=v) for v in (low, high))
            return Expression("clamp", (low, x, high))
        if rng_op < 0.72:
            return Expression("float", (self.draw(self.one("i", "i", "b"), depth),))
        if rng_op < 0.76:
            return Expression("div", (x, self.positive(self.draw("f", depth))))
        if rng_op < 0.9:
            plain = "neg abs sign floor ceil round tanh logistic relu sin cos square cube"
            return Expression(self.one(*plain.split(), "tanh", "neg", "abs"), (x,))
        if rng_op < 0.94:
            bounded = Expression(self.one("tanh", "sin", "cos"), (x,))
            less = Expression("min", (x, Expression("", value=self.one(1.0, 2.0))))
            return Expression(self.one("exp", "exp", "exp2"), (self.one(bounded, less),))
        if rng_op < 0.96:
            return Expression("pow", (self.positive(x), self.small()))
        ops = "log log1p sqrt rsqrt inverse over_square"
        return Expression(self.one(*ops.split()), (self.positive(x),))

    def integer(self, depth: int) -> Expression:
        x, op = self.draw("i", depth), self.rng.random()
        if op < 0.4:
            return Expression(
                self.one("add", "sub", "sub", "max", "min"), (x, self.draw("i", depth))
            )
        if op < 0.5:
            return Expression("mul", (x, self.constant("i")))
        if op < 0.65:
            by = Expression("", value=self.one(-3, 2, 3, 4, 5))
            return Expression(self.one("quotient", "remainder", "truncated"), (x, by))
        if op < 0.72:
            by = Expression("", value=self.one(1, 2, 3))
            return Expression(self.one("shl", "shr", "shr"), (x, by))
        if op < 0.82:
            return Expression(self.one("and", "or", "xor"), (x, self.draw("i", depth)))
        if op < 0.88:
            return Expression(self.one("neg", "abs", "sign", "not", "square"), (x,))
        if op < 0.93:
            return Expression("where", (self.draw("b", depth), x, self.draw("i", depth)))
        if op < 0.96 and self.logit:
            whole = Expression("floor", (self.draw("f", depth),))
            low, high = (Expression("", value=v) for v in (-9.0, 9.0))
            return Expression("int", (Expression("clamp", (low, whole, high)),))
        return Expression("int", (self.draw("b", depth),))

    def compared(self, kind: str, depth: int) -> Expression:
        ops = (
            ("lt", "le", "gt", "ge", "le", "ge")
            if kind == "f"
            else ("lt", "le", "ge", "gt", "eq", "ne")
        )
        x, y = self.draw(kind, depth), self.draw(kind, depth)
        y = self.constant(kind) if self.likely(0.4) else y
        return Expression(self.one(*ops), (x, y))

    def boolean(self, depth: int) -> Expression:
        op = self.rng.random()
        if op < 0.55:
            return self.compared("f" if self.logit and self.likely(0.5) else "i", depth)
        if op < 0.85:
            both = self.draw("b", depth), self.draw("b", depth)
            return Expression(self.one("and", "and", "or", "xor"), both)
        if op < 0.95:
            return Expression("not", (self.draw("b", depth),))
        return Expression("bool", (self.draw("i", depth),))
