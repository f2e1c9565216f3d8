"""Block functions as programs that a kernel can hold: flat, evaluated where something reads them.

A block may lie transposed in memory. A product then reads it so, and what is done element by
element is done so: nothing large is transposed in the kernel unless there is no other way.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._jax import Literal
from ..._sweep.products import dot_p, grouped_dot_p
from .._program import flat_jaxpr, LOG2E, POINTWISE
from ._products import grouped_product, product_of


_ELEMENTWISE = {
    lax.convert_element_type_p,
    lax.is_finite_p,
    lax.select_n_p,
    lax.mul_p,
    lax.add_p,
    lax.sub_p,
    lax.neg_p,
}


class Program:
    """A function of blocks whose results `wanted` a kernel computes.

    `reads` holds for each argument whether these depend on it, `flipped` whether every product
    that reads it would like it transposed.
    """

    def __init__(self, fn: Callable, avals: Sequence, wanted: Sequence[int] | None = None):
        flat = flat_jaxpr(jax.make_jaxpr(fn)(*avals))
        self.jaxpr, self.consts = flat.jaxpr, flat.consts
        outs = self.jaxpr.outvars
        self.outs = outs if wanted is None else [outs[i] for i in wanted]
        self.made_by = {v: eqn for eqn in self.jaxpr.eqns for v in eqn.outvars}
        needed, dots = {v for v in self.outs if not isinstance(v, Literal)}, []
        for eqn in reversed(self.jaxpr.eqns):
            if needed & set(eqn.outvars):
                needed |= {v for v in eqn.invars if not isinstance(v, Literal)}
                dots += [eqn] if eqn.primitive is dot_p else []
        self.needed = needed
        self.reads = [v in needed for v in self.jaxpr.invars]
        wishes: dict = {}
        for eqn in dots:
            (a, b), contract = eqn.invars, eqn.params["contract"]
            wishes.setdefault(self.root(a), []).append(contract[0] == 0)
            wishes.setdefault(self.root(b), []).append(False)
        self.flipped = [all(wishes.get(v, [False])) for v in self.jaxpr.invars]

    def maker(self, v: Any) -> Any:
        """The equation that a value comes from, None for arguments and constants."""
        return None if isinstance(v, Literal) else self.made_by.get(v)

    def root(self, v: Any) -> Any:
        """What a value was before it was worked on element by element; None for a constant."""
        while (eqn := self.maker(v)) is not None and eqn.primitive in _ELEMENTWISE:
            v = eqn.invars[-1]
        return None if isinstance(v, Literal) else v

    def __call__(self, load: Sequence[Callable | None], flipped: Sequence[bool]) -> list:
        """**Arguments:** those of `Run`."""
        run = Evaluation(self, load, flipped)
        return [run.value(v) for v in self.outs]


class Evaluation:
    """One evaluation of a program in a kernel.

    **Arguments:**

    - `load`: for each argument, a function that reads it.
    - `flipped`: whether what it returns is transposed.

    `at` gives the same evaluation of a `window` of the blocks of logits, slices of keys and rows.
    """

    def __init__(self, program: Program, load: Sequence, flipped: Sequence[bool]):
        self.program = program
        invars = program.jaxpr.invars
        self.load = {v: (f, t) for v, f, t in zip(invars, load, flipped)}
        consts = zip(program.jaxpr.constvars, program.consts)
        self.done: dict = {(v, False): c for v, c in consts}
        self.window: tuple[slice, slice] | None = None
        self.parts: dict = {}

    def at(self, window: tuple[slice, slice] | None) -> "Evaluation":
        run = copy.copy(self)  # what it reads whole, it reads once
        run.window, run.parts = window, {}
        return run

    def block(self, v: Any) -> Any:
        """What of a block of logits, or of one that makes it, is in the window."""
        if self.window is None or isinstance(v, Literal) or v.aval.ndim == 0:
            return self.value(v)
        if v not in self.parts:
            self.parts[v] = self._block(v, self.window)
        return self.parts[v]

    def _block(self, v: Any, window: tuple[slice, slice]) -> Any:
        eqn = self.program.maker(v)
        if eqn is not None and eqn.primitive is dot_p:
            return self._dot(eqn.invars[0], eqn.invars[1], window, **eqn.params)
        if eqn is not None and eqn.primitive is lax.select_n_p:
            return self._selected(eqn)
        if eqn is not None and eqn.primitive is lax.broadcast_in_dim_p:
            if eqn.invars[0].aval.ndim == 0:
                return self._repeated(self.value(eqn.invars[0]), v.aval.shape)
        if eqn is not None and eqn.primitive in POINTWISE:
            return eqn.primitive.bind(*map(self.block, eqn.invars), **eqn.params | _plain(eqn))
        return self._cut(self.value(v))

    def _cut(self, x: Any) -> Any:
        """The window of an array, one of whose sides may be 1."""
        assert self.window is not None
        if x.dtype == jnp.bool_:
            return self._cut(x.astype(jnp.int32)) != 0
        return x[tuple(slice(None) if n == 1 else w for n, w in zip(x.shape, self.window))]

    def _repeated(self, x: Any, shape: tuple[int, ...]) -> Any:
        assert self.window is not None
        sides = [min(n, w.stop - w.start) for n, w in zip(shape, self.window)]
        return lax.broadcast(x, sides)

    def lies_flipped(self, v: Any) -> bool:
        v = v if isinstance(v, Literal) else self.program.root(v)
        return not isinstance(v, Literal) and self.load.get(v, (None, False))[1]

    def value(self, v: Any, flip: bool = False) -> Any:
        if isinstance(v, Literal):
            return v.val
        if (v, flip) not in self.done:
            self.done[v, flip] = self.at(None)._value(v, flip)
        return self.done[v, flip]

    def _value(self, v: Any, flip: bool) -> Any:
        if v in self.load:
            load, lies = self.load[v]
            return load() if lies == flip else self.value(v, not flip).T
        eqn = self.program.maker(v)
        if eqn is None:
            return self.value(v, False).T
        if eqn.primitive is dot_p and not flip:
            return self._dot(*eqn.invars, **eqn.params)
        if eqn.primitive is grouped_dot_p and not flip:
            assert eqn.params["contract"] == (1, 0), eqn
            dtype, precision = eqn.params["operand_dtype"], eqn.params["precision"]
            k, q = (self.narrow(x, False, dtype) for x in eqn.invars)
            return grouped_product(k, q, precision)
        if eqn.primitive is lax.transpose_p:
            return self.value(eqn.invars[0], not flip)
        if flip and eqn.primitive is lax.broadcast_in_dim_p and eqn.invars[0].aval.ndim == 0:
            x = self.value(eqn.invars[0], False)
            return lax.broadcast(x, eqn.params["shape"][::-1])
        if flip and eqn.primitive in _ELEMENTWISE:
            xs = [self.value(x, x.aval.ndim == 2) for x in eqn.invars]
            return eqn.primitive.bind(*xs, **{**eqn.params, **_plain(eqn)})
        if flip:
            return self.value(v, False).T
        if (
            eqn.primitive in _ELEMENTWISE
            and v.aval.ndim == 2
            and any(self.lies_flipped(x) for x in eqn.invars)
            and not isinstance(v, Literal)
        ):
            return self.value(v, True).T
        if eqn.primitive is lax.reduce_sum_p and self.lies_flipped(eqn.invars[0]):
            x = self.value(eqn.invars[0], True)
            return jnp.sum(x, tuple(1 - a for a in eqn.params["axes"]))
        if eqn.primitive is lax.select_n_p:
            return self._selected(eqn)
        if eqn.primitive.name == "add_any" and (terms := self._with_factor(eqn)) is not None:
            factor, x, y = (self.value(u) for u in terms)
            return factor * (x + y)
        if eqn.primitive is lax.exp_p:  # the scale's factor costs nothing
            return jnp.exp2(self.times(eqn.invars[0], LOG2E))
        ys = eqn.primitive.bind(*[self.value(x, False) for x in eqn.invars], **eqn.params)
        if not eqn.primitive.multiple_results:
            return ys
        self.done.update(zip([(w, False) for w in eqn.outvars], ys))
        return self.done[v, False]

    def _with_factor(self, eqn: Any) -> tuple | None:
        """Of a sum of two products with a factor in common: it, and the others."""
        products = [self.program.maker(v) for v in eqn.invars]
        if any(p is None or p.primitive is not lax.mul_p for p in products):
            return None
        (a, b), (c, d) = (p.invars for p in products)
        for x, y, u, w in ((a, b, c, d), (a, b, d, c), (b, a, c, d), (b, a, d, c)):
            if x is u:
                return x, y, w
        return None

    def _selected(self, eqn: Any, factor: float | None = None) -> Any:
        """A selection (times a factor), whose cases skip selections by the same predicate."""
        which, *cases = eqn.invars
        xs = [self._given(x, which, i, factor) for i, x in enumerate(cases)]
        return lax.select_n(self.block(which), *xs)

    def _given(self, v: Any, which: Any, case: int, factor: float | None) -> Any:
        """A value where it is known what the predicate selects."""
        eqn = self.program.maker(v)
        if not self._tests(v, which):
            return self.block(v) if factor is None else self.times(v, factor)
        if eqn.primitive is lax.select_n_p:
            return self._given(eqn.invars[1 + case], which, case, factor)
        small, large = sorted(eqn.invars, key=self._size)
        return self._given(small, which, case, factor) * self._given(large, which, case, None)

    def _tests(self, v: Any, which: Any) -> bool:
        """Whether a value is a selection by the predicate, or a product with one."""
        eqn = self.program.maker(v)
        if eqn is None or eqn.primitive not in (lax.select_n_p, lax.mul_p):
            return False
        if eqn.primitive is lax.select_n_p:
            return eqn.invars[0] is which
        return any(self._tests(x, which) for x in eqn.invars)

    def narrow(self, v: Any, flip: bool, dtype: Any) -> Any:
        """A value in the dtype that a product reads, without widening it first."""
        eqn = self.program.maker(v)
        if dtype is not None and eqn is not None and eqn.primitive is lax.convert_element_type_p:
            if eqn.invars[0].aval.dtype == dtype:
                return self.value(eqn.invars[0], flip)
        x = self.value(v, flip)
        return x if dtype is None else x.astype(dtype)

    def _dot(self, a, b, window=(None, None), *, contract, lead, precision, operand_dtype):
        assert lead == 0
        operands, dims = [], []
        for v, c, part in zip((a, b), contract, window):
            flip = self.lies_flipped(v)
            dims.append(1 - c if flip else c)
            x = self.narrow(v, flip, operand_dtype)
            operands.append(x if part is None else x[:, part] if dims[-1] == 0 else x[part])
        return product_of(operands[0], operands[1], (dims[0], dims[1]), precision)

    def times(self, v: Any, factor: float) -> Any:
        """A value times a number, by way of what it is already multiplied with."""
        eqn = self.program.maker(v)
        if isinstance(v, Literal):
            return in_range(v.val, factor)
        if eqn is not None and eqn.primitive is lax.select_n_p:
            return self._selected(eqn, factor)
        if eqn is not None and eqn.primitive is lax.sub_p:
            return self.times(eqn.invars[0], factor) - self.times(eqn.invars[1], factor)
        if eqn is not None and eqn.primitive is lax.broadcast_in_dim_p:
            run, small = self.at(None), eqn.invars[0]
            x = run.times(small, factor)
            if small.aval.ndim > 0:
                x = jnp.where(jnp.abs(run.block(small)) < jnp.inf, jnp.clip(x, *_RANGE), x)
            if self.window is None:
                return eqn.primitive.bind(x, **eqn.params)
            if x.ndim == 0:
                return self._repeated(x, v.aval.shape)
            return self._cut(eqn.primitive.bind(x, **eqn.params))
        if eqn is not None and eqn.primitive is lax.mul_p:
            small, large = sorted(eqn.invars, key=self._size)
            return self.times(small, factor) * self.block(large)
        return self.block(v) * factor

    def _size(self, v: Any) -> int:
        """Of what a value was before it was repeated."""
        while (eqn := self.program.maker(v)) and eqn.primitive is lax.broadcast_in_dim_p:
            v = eqn.invars[0]
        return v.aval.size


_RANGE = float(jnp.finfo(jnp.float32).min), float(jnp.finfo(jnp.float32).max)


def in_range(x: Any, factor: float) -> Any:
    """A number times a factor, finite if it is: the origin of a row that sees nothing is the least
    of all numbers.
    """
    return x * factor if math.isinf(x) else np.float32(np.clip(float(x) * factor, *_RANGE))


def _plain(eqn) -> dict:
    return {"sharding": None} if "sharding" in eqn.params else {}
