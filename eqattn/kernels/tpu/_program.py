"""Block functions as programs that a kernel can hold.

A `Program` is the jaxpr of a block function; an `Evaluation` writes its equations into a kernel.
The results are those of the jaxpr to rounding. These rules change what is computed on the way:

1. *Calls are inlined.* `jit`, `custom_jvp_call` and the like are replaced by their bodies
   (`flat_jaxpr`), so that the rules below see across them. `pvary` is dropped: a kernel runs on one
   device.
2. *Values are computed on demand*, once, where a result first reads them. So unused results cost
   nothing, and instructions stand in the order of demand, which the compiler's scheduler keeps.
3. *Large blocks are not transposed.* An argument that every product would like transposed is given
   so to the kernel. What is done to it element by element is done in that orientation, and a
   product or a sum names the other axis instead.
4. *Windows.* A window of a block of logits is computed from windows of the arguments of its
    operation. This holds for operations on single elements, for selections, and for products, whose
    operands are sliced. All other values are computed whole, once, and cut (`block`).
5. *Powers of two.* `exp(x)` is `exp2(x * log2(e))`. The factor moves towards the leaves: over
   differences, selections and broadcasts, and into the smaller operand of a product (`times`).
   There it meets the softmax scale, and costs one product of two numbers, not one for each logit.
6. *Selections by one predicate.* Inside `select(p, a, b)` it is known what a selection by the same
    `p` gives, and only that is computed. So a mask before the scale and one after it become one.
7. *Common factors.* `f x + f y` becomes `f (x + y)`: a probability multiplies both parts of the
   cotangent of its logit at once.
8. *No detours.* A product that reads bfloat16 takes a block that was widened from it as it was.
9. *Bounds of a row.* `q - k <= n` becomes `q - n <= k`: one difference for a row, not for a logit.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._jax import Literal, primitives
from ..._pairs import POINTWISE
from ..._sweep.differences import along_diagonals_p, sums_of_diagonals_p
from ..._sweep.products import dot_p, grouped_dot_p
from .._program import flat_jaxpr, in_powers_of_two, LOG2E, origin_in
from ._diagonals import Diagonals
from ._operands import as_block
from ._products import grouped_product, product_of
from ._range import in_range, RANGE


# Operations that are done in either orientation of a block. `Program.root` goes back through them
# by the last argument, which is the block that they work on (of a selection, the second case).
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
    """A function of blocks, of which a kernel computes some results.

    Its attribute `reads` holds for each argument whether these results depend on it, `multiplied`
    whether a product reads it. `flipped` holds whether every such product would like it transposed:
    as a left operand that is summed over its first axis. `held` holds whether every such product
    has it as a right operand that is summed over its first axis.

    **Arguments:**

    - `fn`: the function, which returns a list.
    - `avals`: the shapes and dtypes of its arguments.
    - `wanted`: the indices of the results to compute; None for all.
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
            wishes.setdefault(self.root(a), []).append((contract[0] == 0, False))
            wishes.setdefault(self.root(b), []).append((False, contract[1] == 0))
        found = [wishes.get(v, [(False, False)]) for v in self.jaxpr.invars]
        self.flipped = [all(flipped for flipped, _ in x) for x in found]
        self.held = [all(held for _, held in x) for x in found]
        self.multiplied = [v in wishes for v in self.jaxpr.invars]

    def maker(self, v: Any) -> Any:
        """The equation that a variable comes from; None for arguments and constants."""
        return None if isinstance(v, Literal) else self.made_by.get(v)

    def root(self, v: Any) -> Any:
        """The variable that a value was made from element by element; None for a constant."""
        while (eqn := self.maker(v)) is not None and eqn.primitive in _ELEMENTWISE:
            v = eqn.invars[-1]
        return None if isinstance(v, Literal) else v

    def __call__(self, load: Sequence[Callable | None], flipped: Sequence[bool]) -> list:
        """The results in a kernel. The arguments are those of `Evaluation`."""
        return [*map(Evaluation(self, load, flipped).value, self.outs)]


class Evaluation(Diagonals):
    """One evaluation of a program in a kernel.

    **Arguments:**

    - `program`: what to evaluate.
    - `load`: for each argument, a function that reads it; None where nothing does.
    - `flipped`: for each argument, whether what `load` returns is transposed.

    Values that were computed are kept: whole ones in `done`, by variable and whether they are
    transposed, those of the window in `parts`.
    """

    def __init__(self, program: Program, load: Sequence, flipped: Sequence[bool]):
        self.program = program
        invars = program.jaxpr.invars
        self.load = {v: (f, t) for v, f, t in zip(invars, load, flipped)}
        consts = zip(program.jaxpr.constvars, program.consts)
        self.done: dict = {(v, False): c for v, c in consts}
        self.window: tuple[slice, slice] | None = None
        self.parts: dict = {}

    def at(self, window: tuple[slice, slice] | None) -> Any:
        """The same evaluation for a window of the logits, given as slices of keys and rows."""
        run = copy.copy(self)  # what it reads whole, it reads once
        run.window, run.parts = window, {}
        return run

    def block(self, v: Any) -> Any:
        """Computes a block of logits, or a block that logits are made of, in the window."""
        if self.window is None or isinstance(v, Literal) or v.aval.ndim == 0:
            return self.value(v)
        if v not in self.parts:
            self.parts[v] = self._block(v, self.window)
        return self.parts[v]

    def _block(self, v: Any, window: tuple[slice, slice]) -> Any:
        eqn, shape = self.program.maker(v), v.aval.shape
        if shape[0] > 1 == shape[-1]:
            return self.from_side(v, True, lambda flip: self.value(v, flip))
        if eqn is not None and eqn.primitive is along_diagonals_p:
            return self.repeated_diagonals(eqn)
        if eqn is not None and eqn.primitive is dot_p:
            return self._dot(eqn.invars[0], eqn.invars[1], window, **eqn.params)
        if eqn is not None and eqn.primitive is lax.select_n_p:
            return self._selected(eqn)
        if eqn is not None and eqn.primitive is lax.broadcast_in_dim_p:
            if eqn.invars[0].aval.ndim == 0:
                return self._repeated(self.value(eqn.invars[0]), shape)
            if eqn.params["broadcast_dimensions"] == (0,) and shape[0] > 1:
                return self.repeated_keys(eqn.invars[0])
        if eqn is not None and eqn.primitive in POINTWISE:
            return self.pointwise(eqn, self.block)
        turn = v in self.load and self.lies_flipped(v)  # of pairs where they lie
        return self._cut(self.value(v, turn), turn)

    def pointwise(self, eqn: Any, get: Callable) -> Any:
        """An operation on single elements of what `get` returns for its arguments."""
        if self.window is not None and (bounds := self.bounds(eqn)) is not None:
            return eqn.primitive.bind(*bounds)
        added = eqn.primitive is primitives.add_jaxvals_p
        if added and (terms := self._with_factor(eqn)) is not None:
            factor, x, y = map(get, terms)
            return factor * (x + y)
        if eqn.primitive is lax.exp_p:  # the scale's factor costs nothing
            return jnp.exp2(self.times(eqn.invars[0], LOG2E))
        for v in self._integers(eqn):
            get(v)
        return eqn.primitive.bind(*map(get, eqn.invars), **eqn.params | _plain(eqn))

    def _integers(self, eqn: Any) -> list[Any]:
        """The integers from which operations on single elements compute an operation, in order.
        Those that were already computed are left out.

        A generator of random bits has hundreds of them, one after the other. Evaluated on demand,
        they would exceed the depth to which Python's calls may be nested.
        """
        found: dict = {}
        left = [(v, False) for v in eqn.invars]
        while left:
            v, ready = left.pop()
            made = None if isinstance(v, Literal) or v in found else self.program.maker(v)
            if made is None or made.primitive not in POINTWISE or not _integer(v):
                continue
            if v in self.parts or (v, False) in self.done or (v, True) in self.done:
                continue
            if ready:
                found[v] = None
            else:
                left += [(v, True), *[(u, False) for u in made.invars]]
        return [*found]

    def _cut(self, x: Any, turn: bool = False) -> Any:
        """The window of an array, one of whose sides may be 1. It is transposed if `turn`."""
        assert self.window is not None
        if x.dtype == jnp.bool_:
            return self._cut(x.astype(jnp.int32), turn) != 0
        if turn:
            return x[self.window[::-1]].T
        return x[tuple(slice(None) if n == 1 else w for n, w in zip(x.shape, self.window))]

    def _spread(self, v: Any, x: Any, factor: float) -> Any:
        """The window of a broadcast `v`, made of `x`, which is its operand times a factor."""
        del factor
        eqn = self.program.maker(v)
        return self._cut(eqn.primitive.bind(x, **eqn.params))

    def _repeated(self, x: Any, shape: tuple[int, ...]) -> Any:
        """A number, repeated to the window of a block of this shape."""
        assert self.window is not None
        sides = [min(n, w.stop - w.start) for n, w in zip(shape, self.window)]
        return lax.broadcast(x, sides)

    def lies_flipped(self, v: Any) -> bool:
        """Whether a value is made, element by element, from an argument that lies transposed."""
        v = v if isinstance(v, Literal) else self.program.root(v)
        return not isinstance(v, Literal) and self.load.get(v, (None, False))[1]

    def value(self, v: Any, flip: bool = False) -> Any:
        """The whole value of a variable, transposed if `flip`."""
        if isinstance(v, Literal):
            return v.val
        if (v, flip) not in self.done:
            self.done[v, flip] = self.at(None)._value(v, flip)
        return self.done[v, flip]

    def _value(self, v: Any, flip: bool) -> Any:
        if v in self.load:
            load, lies = self.load[v]
            return load() if lies == flip else self._turn(v, flip)
        eqn = self.program.maker(v)
        if eqn is None:
            return self.value(v, False).T
        if eqn.primitive is dot_p and not flip:
            return self._dot(*eqn.invars, **eqn.params)
        if eqn.primitive in (along_diagonals_p, sums_of_diagonals_p) and not flip:
            return self.of_diagonals(eqn)
        if eqn.primitive is grouped_dot_p and not flip:
            assert eqn.params["contract"] == (1, 0), eqn
            dtype, precision = eqn.params["operand_dtype"], eqn.params["precision"]
            k, q = (self.narrow(x, False, dtype) for x in eqn.invars)
            return grouped_product(k, q, precision)
        if eqn.primitive is lax.transpose_p:
            return self.value(eqn.invars[0], not flip)
        if flip and eqn.primitive is lax.broadcast_in_dim_p and eqn.invars[0].aval.ndim < 2:
            x, kept = self.value(eqn.invars[0], False), eqn.params["broadcast_dimensions"]
            return lax.broadcast_in_dim(x, v.aval.shape[::-1], tuple(1 - a for a in kept))
        if flip and eqn.primitive in POINTWISE and eqn.primitive is not lax.exp_p:
            return self.pointwise(eqn, lambda x: self.value(x, x.aval.ndim == 2))
        if flip:
            return self.value(v, False).T
        flat = eqn.primitive in _ELEMENTWISE and v.aval.ndim == 2
        if flat and any(self.lies_flipped(x) for x in eqn.invars):
            return self._turn(v, False)
        if eqn.primitive is lax.reshape_p:
            x: Any = eqn.invars[0]
            shape = eqn.outvars[0].aval.shape
            # Numbers of one order are a row or a column.
            line = len(shape) < 2 and 1 in x.aval.shape
            y = self.value(x, line and self.lies_flipped(x))
            if x.aval.dtype == jnp.bool_:  # the compiler moves no predicates between registers
                return y.astype(jnp.int32).reshape(shape) != 0
            if line:
                return y.reshape(shape)
        if eqn.primitive is lax.reduce_sum_p and self.lies_flipped(eqn.invars[0]):
            x = self.value(eqn.invars[0], True)
            return jnp.sum(x, tuple(1 - a for a in eqn.params["axes"]))
        if eqn.primitive is lax.select_n_p:
            return self._selected(eqn)
        if eqn.primitive in (primitives.add_jaxvals_p, lax.exp_p):
            return self.pointwise(eqn, self.value)
        if eqn.primitive is lax.broadcast_in_dim_p and v.aval.dtype == jnp.bool_:
            x = jnp.asarray(self.value(eqn.invars[0])).astype(jnp.int32)  # as where it is reshaped
            return eqn.primitive.bind(x, **eqn.params) != 0
        ys = eqn.primitive.bind(*[self.value(x, False) for x in eqn.invars], **eqn.params)
        if not eqn.primitive.multiple_results:
            return ys
        self.done.update(zip([(w, False) for w in eqn.outvars], ys))
        return self.done[v, False]

    def _turn(self, v: Any, flip: bool) -> Any:
        """A value in the other of its two orientations."""
        x, shape = self.value(v, not flip), v.aval.shape
        if flip or len(shape) < 2 or shape[1] > 1:
            return x.T
        return as_block(x.astype(jnp.int32) if x.dtype == jnp.bool_ else x, shape, x.dtype)

    def _with_factor(self, eqn: Any) -> tuple | None:
        """The common factor of a sum of two products, and the two others; None without one."""
        products = [self.program.maker(v) for v in eqn.invars]
        if any(p is None or p.primitive is not lax.mul_p for p in products):
            return None
        (a, b), (c, d) = (p.invars for p in products)
        for x, y, u, w in ((a, b, c, d), (a, b, d, c), (b, a, c, d), (b, a, d, c)):
            if x is u:
                return x, y, w
        return None

    def _selected(self, eqn: Any, factor: float | None = None) -> Any:
        """A selection, times a factor, whose cases skip selections by the same predicate."""
        which, *cases = eqn.invars
        xs = [self._given(x, which, i, factor) for i, x in enumerate(cases)]
        return lax.select_n(self.block(which), *xs)

    def _given(self, v: Any, which: Any, case: int, factor: float | None) -> Any:
        """A value, times a factor, where the predicate `which` is known to select `case`."""
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
        """A product of matrices in the orientation in which they lie, or the window of it."""
        assert lead == 0
        operands, dims = [], []
        for v, c, part in zip((a, b), contract, window):
            flip = self.lies_flipped(v)
            dims.append(1 - c if flip else c)
            x = self.narrow(v, flip, operand_dtype)
            operands.append(x if part is None else x[:, part] if dims[-1] == 0 else x[part])
        return product_of(operands[0], operands[1], (dims[0], dims[1]), precision)

    def times(self, v: Any, factor: float) -> Any:
        """A value times a number, which is multiplied in where that costs least (rule 5)."""
        eqn = self.program.maker(v)
        if isinstance(v, Literal):
            return in_range(v.val, factor)
        if eqn is not None and eqn.primitive is lax.select_n_p:
            return self._selected(eqn, factor)
        if eqn is not None and eqn.primitive is lax.sub_p:
            return self.times(eqn.invars[0], factor) - self.times(eqn.invars[1], factor)
        if eqn is not None and eqn.primitive is along_diagonals_p:
            return self.repeated_diagonals(eqn, factor)
        if eqn is not None and eqn.primitive is lax.add_p and any(map(self.shared, eqn.invars)):
            return self.times(eqn.invars[0], factor) + self.times(eqn.invars[1], factor)
        if eqn is not None and eqn.primitive is lax.broadcast_in_dim_p:
            run, small = self.at(None), eqn.invars[0]
            x = run.times(small, factor)
            if small.aval.ndim > 0:
                kept = run.block(small)
                x = jnp.where(jnp.abs(kept) < jnp.inf, jnp.clip(x, *RANGE), x)
                of_row = origin_in(self.program.maker(small)) is not None
                x = in_powers_of_two(kept, x) if of_row else x
            if self.window is None:
                return eqn.primitive.bind(x, **eqn.params)
            if x.ndim == 0:
                return self._repeated(x, v.aval.shape)
            return self._spread(v, x, factor)
        if eqn is not None and eqn.primitive is lax.mul_p:
            small, large = sorted(eqn.invars, key=self._size)
            return self.times(small, factor) * self.block(large)
        return self.block(v) * factor

    def _size(self, v: Any) -> int:
        """The size of what a value was before it was repeated."""
        while (eqn := self.program.maker(v)) and eqn.primitive is lax.broadcast_in_dim_p:
            v = eqn.invars[0]
        return v.aval.size


def _integer(v: Any) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.integer)


def _plain(eqn) -> dict:
    """Parameters to replace in an equation whose arguments have other shapes: its sharding."""
    return {"sharding": None} if "sharding" in eqn.params else {}
