"""Block functions as a warpgroup evaluates them: pair by pair, in registers.

A block function is written for blocks `[keys, rows]`, and is a product of keys and queries followed
by operations of one pair each. A warpgroup holds the transposed block, one row of the softmax in
the same four threads. Since every operation after the product is of one pair, neither this nor the
shapes in the function matter: all that counts of a value is what it varies with, its *kind*:
`"rk"` rows and keys, `"r"` rows, `"k"` keys, `""` neither. It is repeated where two kinds meet.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._jax import Literal, only_varies
from ..._sweep.products import dot_p
from .._program import calls, equations, flat_jaxpr


_SAME = {lax.broadcast_in_dim_p, lax.reshape_p, lax.squeeze_p, lax.transpose_p, lax.copy_p}
"""Operations that change the shape of a value, but not what it is at a pair."""


def _named(names: str) -> set:
    return {getattr(lax, f"{name}_p") for name in names.split()}


_OF_A_PAIR = _named(
    "abs add and atan2 clamp convert_element_type cos div eq erf exp exp2 ge gt integer_pow "
    "is_finite le log lt max min mul ne neg not or rem round rsqrt select_n shift_left "
    "shift_right_arithmetic shift_right_logical sign sin sqrt square sub tanh xor"
)
"""Operations that Mosaic GPU, the compiler of these kernels, lowers in jax 0.12."""


def unsupported(jaxpr: Any) -> str:
    """The name of an operation in a block function that a kernel cannot hold; empty without."""
    known = _OF_A_PAIR | _SAME | {lax.slice_p, dot_p}
    for eqn in equations(jaxpr):
        if eqn.primitive not in known and not (calls(eqn) or only_varies(eqn)):
            return eqn.primitive.name
    return ""


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


class PairProgram:
    """A block function, evaluated where a result needs it.

    **Arguments:**

    - `closed`: its jaxpr. Arguments 0 and 1 are the queries and the keys.

    `reads` holds for each argument whether the results depend on it, the product aside. `scale` is
    the argument that logits are multiplied with last, before some are masked; None without.
    """

    def __init__(self, closed: Any):
        flat = flat_jaxpr(closed)
        self.jaxpr, self.consts = flat.jaxpr, flat.consts
        self.made_by = {v: eqn for eqn in self.jaxpr.eqns for v in eqn.outvars}
        needed = {v for v in self.jaxpr.outvars if not isinstance(v, Literal)}
        for eqn in reversed(self.jaxpr.eqns):
            if needed & set(eqn.outvars) and eqn.primitive is not dot_p:
                needed |= {v for v in eqn.invars if not isinstance(v, Literal)}
        self.reads = [v in needed for v in self.jaxpr.invars]
        self.scale = self._scale()

    def root(self, v: Any) -> Any:
        """What a value was before its shape was changed."""
        while (eqn := self.made_by.get(v)) is not None and eqn.primitive in _SAME:
            v = eqn.invars[0]
            if isinstance(v, Literal):
                break
        return v

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

    def hidden(self, v: Any) -> bool:
        """Whether a value is the logit of a masked pair."""
        v = v if isinstance(v, Literal) else self.root(v)
        return isinstance(v, Literal) and bool(v.val == -np.inf)

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
        run = _Run(self, product, read, sizes)
        logits, *others = self.jaxpr.outvars
        run.apart = self.scale if apart else None
        values = [run.times(logits, None if apart else factor, {}), *map(run.value, others)]
        return [x.spread("rk", sizes) for x in values]


class _Run:
    """One evaluation of a program."""

    def __init__(self, program: PairProgram, product: Any, read: Callable, sizes: dict[str, int]):
        self.made_by, self.product, self.sizes = program.made_by, product, sizes
        self.arguments = {v: i for i, v in enumerate(program.jaxpr.invars)}
        self.read, self.root = read, program.root
        self.apart: int | None = None
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
            return Value("rk", self.product)
        return _evaluated(eqn, [self.value(x) for x in eqn.invars], self.sizes)

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
        if eqn is not None and eqn.primitive in _SAME:
            return self.times(eqn.invars[0], factor, given)
        if eqn is not None and eqn.primitive is lax.mul_p and self.apart is not None:
            for v, w in (eqn.invars, eqn.invars[::-1]):
                if not isinstance(v, Literal) and self.arguments.get(self.root(v)) == self.apart:
                    return self.times(w, None, given)
        if eqn is not None and eqn.primitive is lax.mul_p:
            small, large = sorted(eqn.invars, key=lambda x: len(self.value(x).kind))
            if not self.value(small).kind:
                xs = [self.times(small, factor, given), self.times(large, None, given)]
                return _evaluated(eqn, xs, self.sizes)
        x = self.value(v)
        return x if factor is None else Value(x.kind, x.array * np.float32(factor))


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
    if eqn.primitive in _SAME:
        (x, *_) = xs
        return Value("", x.parts[0]) if len(x.parts) == 1 else x
    kind = "".join(a for a in "rk" if any(a in x.kind for x in xs))
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
    return Value(kind, eqn.primitive.bind(*arrays, **params))
