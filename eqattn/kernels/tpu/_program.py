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

Numbers times a factor that must not overflow, as logits in units of `log 2` might.

Blocks whose diagonals share a number, and sums of diagonals, beside a window of logits.

A *strip* is what the first `LANES` keys of a block have, over all of its diagonals. It is one roll
of equal rows, in which each row moves by one lane less than the row before. Further down and
further right by `LANES`, a block repeats itself. So it is put together from the square tiles of its
strip, of which there are 15 in a block of 1024 x 1024 numbers.

Each tile is a roll of its own, next to the window that needs it. Where tiles are transposed, the
units for transposes are the limit. So there one roll makes the strip, and no register is rolled
twice. With a roll for each tile, a step of `backward, T5 bias` in `python tests/measure tpu-report`
took 7% more cycles on v6e.

Numbers that vary only with keys, or only with rows, beside a window of logits.

On the side along which vector registers have lanes, such numbers are a row, which costs nothing to
repeat. On the other side each number must be in all lanes. Units for transposes bring them there
once for a block. The compiler would do it again for each window, number by number.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ..._jax import Literal, primitives
from ..._pairs import POINTWISE
from ..._sweep.differences import along_diagonals_p, padded, sums_of_diagonals_p, window_size
from ..._sweep.products import dot_p, grouped_dot_p
from .._program import flat_jaxpr, in_powers_of_two, LOG2E, origin_in
from ._operands import as_block
from ._products import grouped_product, LANES, product_of, SUBLANES
from ._windows import cut, size_of


RANGE = float(jnp.finfo(jnp.float32).min), float(jnp.finfo(jnp.float32).max)
"""The least and the greatest finite number."""


def in_range(x: Any, factor: float) -> Any:
    """A number times a factor, which is finite if the number is.

    The origin of a row that sees nothing is the least finite number. Times `log2(e)` it would
    overflow to -inf, and a masked logit minus its origin would be NaN.
    """
    return x * factor if math.isinf(x) else np.float32(np.clip(float(x) * factor, *RANGE))


class Sides:
    """The part of an `Evaluation` that knows numbers of keys alone, and numbers of rows alone."""

    program: Any
    window: tuple[slice, slice] | None
    done: dict
    value: Callable[..., Any]
    block: Callable[..., Any]
    transposed = False
    """Whether windows are `[rows, keys]`, and not `[keys, rows]`."""

    def from_side(self, key: Any, of_keys: bool, row: Callable[[bool], Any]) -> Any:
        """The window of numbers that vary only with keys, or only with rows.

        **Arguments:**

        - `key`: what identifies the numbers.
        - `of_keys`: whether they vary with keys.
        - `row`: a function that returns them as a row, given whether that is a transpose.
        """
        assert self.window is not None
        part, other = self.window if of_keys else self.window[::-1]
        upright = of_keys != self.transposed
        if ("side", key) not in self.done:
            x = row(of_keys)
            boolean = x.dtype == jnp.bool_
            x = x.astype(jnp.int32) if boolean else x
            self.done["side", key] = (in_lanes(x) if upright else x), boolean
        x, boolean = self.done["side", key]
        x = columns(x, part, other.stop - other.start) if upright else x[:, part]
        return x != 0 if boolean else x

    def repeated_keys(self, v: Any) -> Any:
        """The window of numbers `[keys]`, which all rows have."""
        x = self.value(v)
        if x.dtype != jnp.bool_:
            return self.from_side(v, True, lambda _: x.reshape(1, -1))
        # The compiler fails to make a row of booleans.
        return self.from_side(v, True, lambda _: x.astype(jnp.int32).reshape(1, -1)) != 0

    def bounds(self, eqn: Any) -> tuple[Any, Any] | None:
        """Turns a comparison of `a - b` with a number `n` into one of `a - n` and `b`. It is None
        for other comparisons.

        See rule 9 of `_program.py`.
        """
        if (comparison := eqn.primitive) not in _BOUNDS or not isinstance(eqn.invars[1], Literal):
            return None
        diff, n = eqn.invars[0], int(eqn.invars[1].val)
        made = self.program.maker(diff)
        if made is None or made.primitive is not lax.sub_p or diff.aval.dtype != jnp.int32:
            return None
        a, b = made.invars
        if 1 not in a.aval.shape or not moves_bound(comparison, n):
            return None
        of_keys = a.aval.shape[1] == 1
        row = lambda flip: moved(comparison, self.value(a, flip), n)
        return self.from_side((a, comparison, n), of_keys, row), self.block(b)


def in_lanes(row: Array | np.ndarray) -> Array:
    """Numbers `[1, n]` as columns, `[n, LANES]`."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def columns(x: Array, part: slice, width: int) -> Array:
    """A part of what `in_lanes` returns, as columns `[part, width]`."""
    if width % LANES:
        return jnp.broadcast_to(x[part, :1], (part.stop - part.start, width))
    return jnp.concatenate([x[part]] * (width // LANES), 1)


_BOUNDS = {lax.le_p: (1, jnp.maximum, -(2**31)), lax.ge_p: (-1, jnp.minimum, 2**31 - 1)}
"""For each comparison with a bound: its sign, and how the other side is kept in range."""


def moves_bound(comparison: Any, n: int) -> bool:
    """Whether `a - b <= n`, or `>=`, is `a - n <= b` by `moved`, whatever the integers `a` and `b`.

    A bound of the other sign would count a saturated number as within it.
    """
    return n * _BOUNDS[comparison][0] >= 0


def moved(comparison: Any, a: Array, n: int) -> Array:
    """The difference `a - n`, saturated, of integers of 32 bits."""
    _, saturate, limit = _BOUNDS[comparison]
    return saturate(a, np.int32(limit + n)) - np.int32(n)


class Diagonals(Sides):
    """The part of an `Evaluation` that knows numbers which the diagonals of a block share."""

    def shared(self, v: Any) -> bool:
        """Whether a value has one number for each diagonal, so that a factor costs nothing."""
        eqn = self.program.maker(v)
        return eqn is not None and eqn.primitive is along_diagonals_p

    def of_diagonals(self, eqn: Any) -> Array:
        """The whole result of an equation of diagonals."""
        if eqn.primitive is along_diagonals_p:
            return self.repeated_diagonals(eqn)
        return sums_of_diagonals(self.value(eqn.invars[0]), **eqn.params)

    def repeated_diagonals(self, eqn: Any, factor: float | None = None) -> Array:
        """The window of numbers that diagonals share, times a factor. It is whole without one."""
        whole = tuple(slice(0, n) for n in eqn.outvars[0].aval.shape)
        (at, to), found = self.window or whole, []
        transposed = self.transposed and self.window is not None
        for head, queries in _shares(to, eqn.params["queries"]):
            each = []
            for i, keys in _shares(at, LANES):
                first = padded(eqn.params["keys"]) - (i + 1) * LANES + queries.start
                columns = slice(first, first + size_of(queries))
                x = self._tiles(eqn, head, columns, transposed, factor)
                each.append(x[:, keys] if transposed else x[keys])
            found.append(_joined(each, int(transposed)))
        return _joined(found, int(not transposed))

    def _tiles(
        self, eqn: Any, head: int, columns: slice, transposed: bool, factor: float | None
    ) -> Array:
        """Some columns of the strip of a head, `[LANES, columns]`, transposed if `transposed`."""
        each = []
        for i, part in _shares(columns, LANES):
            tile = self._tile(eqn, head, i, transposed, factor)
            each.append(tile[part] if transposed else tile[:, part])
        return _joined(each, int(not transposed))

    def _tile(self, eqn: Any, head: int, i: int, transposed: bool, factor: float | None) -> Array:
        """Tile number `i` of the strip of a head, `[LANES, LANES]`, transposed if `transposed`. It
        is made once for a block.
        """
        head = min(head, eqn.invars[0].aval.shape[0] - 1)
        key = "tile", eqn.outvars[0], head, i, transposed, factor
        if key not in self.done:
            x = self.value(eqn.invars[0])[head : head + 1]
            x = x if factor is None else x * factor
            part = slice(i * LANES, (i + 1) * LANES)
            if transposed:
                strip = "strip", *key[1:3], factor
                if strip not in self.done:
                    self.done[strip] = _rolled(x)
                self.done[key] = self.done[strip][:, part].T
            else:
                self.done[key] = _rolled(x[:, part.start : part.stop + LANES])[:, :LANES]
        return self.done[key]


def _rolled(x: Array) -> Array:
    """The strip of a window `[1, n]`, whose last `LANES` columns have no meaning."""
    rows = jnp.broadcast_to(x, (LANES, x.shape[1]))
    return pltpu.roll(rows, x.shape[1] - LANES + 1, 1, stride=1, stride_axis=0)


def _shares(part: slice, size: int) -> Iterator[tuple[int, slice]]:
    """The shares of this size that a part of an axis lies in, each with what lies in it. The shares
    of rows, for example, are those of heads.
    """
    for i in range(part.start // size, -(-part.stop // size)):
        yield i, slice(max(part.start - i * size, 0), min(part.stop - i * size, size))


def _joined(xs: Sequence[Array], axis: int) -> Array:
    return xs[0] if len(xs) == 1 else jnp.concatenate(xs, axis)


def sums_of_diagonals(x: Array, *, keys: int, queries: int, heads: int, windows: int) -> Array:
    """The sums of the diagonals of a block `[keys, heads * queries]`, as windows
    `[windows, window]`. With one window, they are those of all heads.
    """
    sides = padded(keys), padded(queries)
    blocks = [x[:, part] for part in cut(0, heads * queries, queries)]
    if windows == 1:
        blocks = [sum(blocks[1:], blocks[0])]
    found = []
    for block in blocks:
        for axis, n in enumerate(sides):
            if more := n - block.shape[axis]:
                shape = (more, block.shape[1]) if axis == 0 else (block.shape[0], more)
                block = jnp.concatenate([block, jnp.zeros(shape, block.dtype)], axis)
        found.append(_sums(_strip_of(block, window_size(keys, queries))))
    return _joined(found, 0)


def _strip_of(block: Array, size: int) -> Array:
    """The sums of a block's parts that are the same part of its strip."""
    keys, queries = block.shape
    found: list = [None] * (size // LANES)
    for at in cut(0, keys, LANES):
        for to in cut(0, queries, LANES):
            i = (keys - LANES - at.start + to.start) // LANES
            part = block[at, to]
            found[i] = part if found[i] is None else found[i] + part
    zeros = jnp.zeros((LANES, LANES), block.dtype)
    return jnp.concatenate([zeros if x is None else x for x in found], 1)


def _sums(strip: Array) -> Array:
    """The sums of the diagonals of a strip. Its rows are cut into halves, which are added, until
    one row is left. Before, the upper half is moved by as many lanes as it has rows.
    """
    n = strip.shape[0]
    while n > SUBLANES:
        n //= 2
        strip = strip[n:] + pltpu.roll(strip[:n], n, 1)
    while n > 1:
        n //= 2
        strip = pltpu.roll(strip, SUBLANES - n, 0) + pltpu.roll(strip, n, 1)
    return strip[:1]


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

    def _value(self, v: Any, flip: bool) -> Any:  # noqa: C901 (one branch for each operation)
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
