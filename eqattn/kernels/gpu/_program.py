"""Block functions as a warpgroup evaluates them: pair by pair, in registers.

A block function is written for blocks `[keys, rows]`. It is products of matrices that give a number
for each pair, operations of one pair each, and in sums further products. A warpgroup may hold the
transposed block: in the fold, one row of the softmax lies in the same four threads. Since what is
between the products is of one pair, neither this nor the shapes in the function matter: all that
counts of a value is what it varies with, its *kind*: `"rk"` rows and keys, or `"kr"` where a
warpgroup holds it so, `"r"` rows, `"k"` keys, `""` neither. It is repeated where two kinds meet.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._jax import Literal, only_varies
from ..._sweep.products import dot_p
from .._program import calls, equations, flat_jaxpr, LOG2E


_SAME = {lax.broadcast_in_dim_p, lax.reshape_p, lax.squeeze_p, lax.transpose_p, lax.copy_p}


def named(names: str) -> set:
    return {getattr(lax, f"{name}_p") for name in names.split()}


_OF_A_PAIR = named(
    "abs add and atan2 clamp convert_element_type cos div eq erf exp exp2 ge gt integer_pow "
    "is_finite le log lt max min mul ne neg not or rem round rsqrt select_n shift_left "
    "shift_right_arithmetic shift_right_logical sign sin sqrt square sub tanh xor"
)
"""Operations that Mosaic GPU, the compiler of these kernels, lowers in jax 0.12."""


_BY_NAME: dict[str, Callable] = {
    "add_any": lax.add,
    "one_minus_square": lambda x: (1 - x) * (1 + x),
}
"""What operations of derivatives compute that have no public name."""

_KNOWN = _SAME | {lax.slice_p, dot_p}


def unsupported(jaxpr: Any, of_a_pair: set = _OF_A_PAIR) -> str:
    """The name of an operation in a block function that a kernel cannot hold; empty without."""
    for eqn in equations(jaxpr):
        if not (is_known(eqn, of_a_pair) or calls(eqn)):
            return eqn.primitive.name
    return ""


def is_known(eqn: Any, of_a_pair: set = _OF_A_PAIR) -> bool:
    """Whether a kernel can hold an operation."""
    known = eqn.primitive in of_a_pair | _KNOWN
    return known or eqn.primitive.name in _BY_NAME or is_identity(eqn)


def is_identity(eqn: Any) -> bool:
    """Whether it only says something of a value: how it is sharded, or differentiated."""
    return eqn.primitive.name in ("reshard", "stop_gradient") or only_varies(eqn)


def _same(eqn: Any) -> bool:
    """Whether it changes the shape of a value, but not what it is at a pair."""
    return eqn.primitive in _SAME or is_identity(eqn)


@dataclasses.dataclass(frozen=True)
class Value:
    """An array whose axes are those of its kind. `parts`: instead of it, the numbers of a vector
    that no pair indexes.
    """

    kind: str
    array: Any
    parts: tuple = ()

    def spread(self, kind: str, sizes: dict[str, int]) -> Any:
        """The array, repeated over the axes of a larger kind."""
        if self.kind == kind:
            return self.array
        if np.result_type(self.array) == np.bool_:  # which the compiler does not repeat
            return Value(self.kind, _as_number(self.array, jnp.int32)).spread(kind, sizes) != 0
        shape, own = tuple(sizes[a] for a in kind), [kind.index(a) for a in self.kind]
        return lax.broadcast_in_dim(jnp.asarray(self.array), shape, own)


def _as_number(x: Any, dtype: Any) -> Any:
    """1 where a boolean holds, else 0."""
    if isinstance(x, bool | np.bool_):
        return jnp.asarray(int(x), dtype)
    one = jnp.asarray(1, dtype)
    return jnp.where(x, one, one * 0)


class BlockProgram:
    """A block function, evaluated where a result needs it.

    **Arguments:**

    - `closed`: its jaxpr.
    """

    def __init__(self, closed: Any):
        flat = flat_jaxpr(closed)
        self.jaxpr, self.consts = flat.jaxpr, flat.consts
        self.made_by = {v: eqn for eqn in self.jaxpr.eqns for v in eqn.outvars}

    def needed(self, results: Sequence[Any]) -> tuple[list[Any], list[bool]]:
        """The operations that some values depend on, up to products, in the order of the function;
        and for each argument whether they do.
        """
        needed, eqns = {v for v in results if not isinstance(v, Literal)}, []
        for eqn in reversed(self.jaxpr.eqns):
            if needed & set(eqn.outvars):
                eqns.insert(0, eqn)
                if eqn.primitive is not dot_p:
                    needed |= {v for v in eqn.invars if not isinstance(v, Literal)}
        return eqns, [v in needed for v in self.jaxpr.invars]

    def root(self, v: Any) -> Any:
        """What a value was before its shape was changed."""
        while (eqn := self.made_by.get(v)) is not None and _same(eqn):
            v = eqn.invars[0]
            if isinstance(v, Literal):
                break
        return v

    def hidden(self, v: Any) -> bool:
        """Whether a value is the logit of a masked pair."""
        v = v if isinstance(v, Literal) else self.root(v)
        return isinstance(v, Literal) and bool(v.val == -np.inf)

    def choice(self, v: Any) -> tuple[Any, int] | None:
        """The predicate that masks a logit, and its case of those that are not; or None."""
        eqn = None if isinstance(v, Literal) else self.made_by.get(v)
        if eqn is None or eqn.primitive is not lax.select_n_p:
            return None
        hidden = [self.hidden(x) for x in eqn.invars[1:]]
        return (eqn.invars[0], hidden.index(False)) if sorted(hidden) == [False, True] else None


class PairProgram(BlockProgram):
    """The block function of logits: one product, and what is done to it pair by pair. Arguments 0
    and 1 are the queries and the keys.

    `reads` holds for each argument whether the results depend on it, the product aside. `scale` is
    the argument that logits are multiplied with last, before some are masked; None without.
    """

    def __init__(self, closed: Any):
        super().__init__(closed)
        self.reads = self.needed(self.jaxpr.outvars)[1]
        self.scale = self._scale()

    def _scale(self) -> int | None:
        v, reads = self.root(self.jaxpr.outvars[0]), [x for e in self.jaxpr.eqns for x in e.invars]
        eqn = self.made_by.get(v)
        if eqn is not None and eqn.primitive is lax.select_n_p:
            kept = [x for x in eqn.invars[1:] if not self.hidden(x)]
            eqn = self.made_by.get(kept[0]) if len(kept) == 1 else None
        if eqn is None or eqn.primitive is not lax.mul_p:
            return None
        for v in eqn.invars:
            if not isinstance(v, Literal) and self.root(v) in self.jaxpr.invars[2:]:
                i = self.jaxpr.invars.index(self.root(v))
                once = sum(x is self.jaxpr.invars[i] for x in reads) == 1
                return i if once and self.jaxpr.invars[i].aval.size == 1 else None
        return None

    def __call__(
        self,
        product: Any,
        read: Callable[[int], Value],
        sizes: dict[str, int],
        factor: float,
        apart: bool,
    ) -> list[Any]:
        """The results at each pair, the first of them times a factor.

        **Arguments:**

        - `product`: of the queries and keys, `[rows, keys]`.
        - `read`: the value of an argument.
        - `sizes`: the lengths of the axes `"r"` and `"k"`.
        - `apart`: whether the first result comes without the factor and without its `scale`, which
            is positive and not infinite.
        """
        run = Run(self, lambda _: product, read, sizes)
        logits, *others = self.jaxpr.outvars
        run.apart = self.scale if apart else None
        values = [run.times(logits, None if apart else factor, {}), *map(run.value, others)]
        return [x.spread("".join(sizes), sizes) for x in values]


class Run:
    """One evaluation of a program.

    **Arguments:**

    - `product`: the result of a product, `[own, other]`.
    - `read`: the value of an argument.
    - `sizes`: the lengths of the axes of a tile by kind, in the order of its axes.
    - `origin`: the argument that is subtracted in exponents, if it is read as that times
        `log2(e)`.
    """

    def __init__(
        self,
        program: BlockProgram,
        product: Callable[[Any], Any],
        read: Callable[[int], Value],
        sizes: dict[str, int],
        origin: int | None = None,
    ):
        self.program, self.made_by = program, program.made_by
        self.product, self.sizes = product, sizes
        self.arguments = {v: i for i, v in enumerate(program.jaxpr.invars)}
        self.read, self.root, self.origin = read, program.root, origin
        self.apart: int | None = None
        self.exponentials: dict[Any, Value] = {}
        consts = zip(program.jaxpr.constvars, program.consts)
        self.done: dict[Any, Value] = {v: Value("", c) for v, c in consts}

    def value(self, v: Any) -> Value:
        if isinstance(v, Literal):
            return Value("", v.val)
        if v not in self.done:
            self.done[v] = self._value(v)
        return self.done[v]

    def _value(self, v: Any) -> Value:
        if v in self.arguments:
            return self.read(self.arguments[v])
        eqn = self.made_by[v]
        if eqn.primitive is dot_p:
            return Value("".join(self.sizes), self.product(eqn))
        if eqn.primitive is lax.exp_p:
            return self._exponential(eqn.invars[0], {})
        if eqn.primitive.name == "add_any":
            return self._sum(eqn, {})
        return _evaluated(eqn, [self.value(x) for x in eqn.invars], self.sizes)

    def _exponential(self, v: Any, given: dict[Any, int]) -> Value:
        """The exponential of an argument of `exp`. That of a masked logit is 0, also where the
        origin of its row is NaN: so logit and origin meet in one operation, and the mask selects
        afterwards, unless it is given.
        """
        eqn = None if isinstance(v, Literal) else self.made_by.get(v)
        choice = None
        if eqn is not None and eqn.primitive is lax.sub_p and self._is_origin(eqn.invars[1]):
            choice = self.program.choice(eqn.invars[0])
        which, case = choice or (None, 0)
        if v not in self.exponentials:
            x = self.times(v, LOG2E, {} if choice is None else {which: case})
            self.exponentials[v] = Value(x.kind, jnp.exp2(x.array))
        y = self.exponentials[v]
        if choice is None or given.get(which) == case:
            return y
        cases = (y, _ZERO) if case == 0 else (_ZERO, y)
        return self._apply(lambda *xs: lax.select_n(*xs), self.value(which), *cases)

    def _apply(self, f: Callable, *xs: Value) -> Value:
        kind = _joined(xs, self.sizes)
        return Value(kind, f(*[x.spread(kind, self.sizes) for x in xs]))

    def _sum(self, eqn: Any, given: dict[Any, int]) -> Value:
        """The sum of two cotangents; a factor that both have is multiplied once."""
        terms = self._with_factor(eqn)
        both = [self.times(v, None, given) for v in (terms or (None, *eqn.invars))[1:]]
        total = self._apply(jnp.add, *both)
        if terms is None:
            return total
        return self._apply(jnp.multiply, self.times(terms[0], None, given), total)

    def _with_factor(self, eqn: Any) -> tuple | None:
        """The common factor of a sum of two products, and the two others; None without one."""
        made = [None if isinstance(v, Literal) else self.made_by.get(v) for v in eqn.invars]
        products = [p.invars for p in made if p is not None and p.primitive is lax.mul_p]
        if len(products) < 2:
            return None
        (a, b), (c, d) = products
        for x, y, u, w in ((a, b, c, d), (a, b, d, c), (b, a, c, d), (b, a, d, c)):
            if x is u:
                return x, y, w
        return None

    def _is_origin(self, v: Any) -> bool:
        """Whether a value is the finite origin of exponents."""
        eqn = None if isinstance(v, Literal) else self.made_by.get(self.root(v))
        found = origin_of(eqn, self.root, self.arguments)
        return found is not None and found == self.origin

    def _is_scaled(self, v: Any) -> bool:
        """Whether a value is multiplied with one number, which can bring a further factor along."""
        eqn = None if isinstance(v, Literal) else self.made_by.get(v)
        if eqn is not None and _same(eqn):
            return self._is_scaled(eqn.invars[0])
        if eqn is None or eqn.primitive is not lax.mul_p:
            return False
        return any(not self.value(x).kind for x in eqn.invars)

    def times(self, v: Any, factor: float | None, given: dict[Any, int]) -> Value:
        """A value times a factor, by way of what it is already multiplied with.

        **Arguments:**

        - `given`: the cases that predicates select wherever the result counts.
        """
        eqn = None if isinstance(v, Literal) else self.made_by.get(v)
        if isinstance(v, Literal):
            return Value("", v.val if factor is None else _in_range(v.val, factor))
        if eqn is not None and eqn.primitive is lax.select_n_p:
            which, *cases = eqn.invars
            if which in given:
                return self.times(cases[given[which]], factor, given)
            xs = [self.times(x, factor, {**given, which: i}) for i, x in enumerate(cases)]
            return _evaluated(eqn, [self.value(which), *xs], self.sizes)
        if eqn is not None and _same(eqn):
            return self.times(eqn.invars[0], factor, given)
        if eqn is not None and eqn.primitive is lax.mul_p and self.apart is not None:
            for v, w in (eqn.invars, eqn.invars[::-1]):
                if not isinstance(v, Literal) and self.arguments.get(self.root(v)) == self.apart:
                    return self.times(w, None, given)
        if eqn is not None and eqn.primitive is lax.mul_p:
            small, large = sorted(eqn.invars, key=lambda x: len(self.value(x).kind))
            if not self.value(small).kind or (factor is None and given):
                xs = [self.times(small, factor, given), self.times(large, None, given)]
                return _evaluated(eqn, xs, self.sizes)
        if eqn is not None and eqn.primitive is lax.sub_p and self._is_origin(eqn.invars[1]):
            assert self.origin is not None
            x = self.times(eqn.invars[0], factor, given)
            return self._apply(jnp.subtract, x, self.read(self.origin))
        if eqn is not None and factor is not None and eqn.primitive in (lax.add_p, lax.sub_p):
            if all(self._is_scaled(x) for x in eqn.invars):
                xs = [self.times(x, factor, given) for x in eqn.invars]
                return _evaluated(eqn, xs, self.sizes)
        if eqn is not None and factor is None and given and eqn.primitive is lax.exp_p:
            return self._exponential(eqn.invars[0], given)
        if eqn is not None and factor is None and given and eqn.primitive.name == "add_any":
            return self._sum(eqn, given)
        if eqn is not None and eqn.primitive is lax.max_p and factor is not None:
            return self._apply(jnp.maximum, *(self.times(x, factor, given) for x in eqn.invars))
        x = self.value(v)
        return x if factor is None else Value(x.kind, x.array * np.float32(factor))


_ZERO = Value("", np.float32(0))


def origin_of(eqn: Any, root: Callable, arguments: dict[Any, int]) -> int | None:
    """The argument of which an operation makes the finite origin of exponents, or None."""
    if eqn is None or eqn.primitive is not lax.max_p:
        return None
    v, least = eqn.invars
    if not (isinstance(least, Literal) and least.val == np.finfo(np.float32).min):
        return None
    return arguments.get(root(v))


def _joined(xs: Sequence[Value], sizes: dict[str, int]) -> str:
    """The kind of what varies with any of several values."""
    return "".join(a for a in sizes if any(a in x.kind for x in xs))


def _in_range(x: Any, factor: float) -> Any:
    """A number times a factor, finite if it is."""
    info = np.finfo(np.float32)
    return x * factor if np.isinf(x) else np.float32(np.clip(float(x) * factor, info.min, info.max))


def _evaluated(eqn: Any, xs: Sequence[Value], sizes: dict[str, int]) -> Value:
    """What an operation of one pair makes of its arguments."""
    if eqn.primitive is lax.slice_p:
        (start,), (limit,) = eqn.params["start_indices"], eqn.params["limit_indices"]
        parts = xs[0].parts[start : limit : (eqn.params["strides"] or (1,))[0]]
        return Value("", None, parts)
    if _same(eqn):
        (x, *_) = xs
        return Value("", x.parts[0]) if len(x.parts) == 1 else x
    if eqn.primitive is lax.reduce_sum_p:  # over the values of a row
        return Value(xs[0].kind[:1], xs[0].array.sum(1))
    kind = _joined(xs, sizes)
    arrays = [x.spread(kind, sizes) for x in xs] if kind else [x.array for x in xs]
    params = eqn.params | ({"sharding": None} if "sharding" in eqn.params else {})
    if eqn.primitive is lax.is_finite_p:
        return Value(kind, jnp.abs(arrays[0]) < jnp.inf)
    if eqn.primitive is lax.not_p and eqn.invars[0].aval.dtype == jnp.bool_:
        return Value(kind, _as_number(arrays[0], jnp.int32) == 0)
    if eqn.primitive is lax.convert_element_type_p and params["new_dtype"] == jnp.bool_:
        return Value(kind, arrays[0] != 0)
    if eqn.primitive is lax.convert_element_type_p and eqn.invars[0].aval.dtype == jnp.bool_:
        return Value(kind, _as_number(arrays[0], params["new_dtype"]))
    if eqn.primitive.name in _BY_NAME:
        return Value(kind, _BY_NAME[eqn.primitive.name](*arrays))
    return Value(kind, eqn.primitive.bind(*arrays, **params))
