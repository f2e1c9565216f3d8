"""What a fold does in one block, and with a row whose blocks have all been visited.

Functions of logits are written for blocks `[keys, rows]`. In that orientation no product of a
backward pass needs a large transpose. But the sum over keys of a fold multiplies a transposed block
of probabilities. A CPU folds faster the other way round, with queries `[rows, features]`. So there
the same functions are evaluated at transposed arguments, by `evaluate_transposed`. On one core of
an AMD EPYC, forwards of 1024 tokens took 0.92 to 0.96 of the time with 64 features. With 128 they
took 0.86 to 0.90.

What a sweep does in one block: it evaluates the block function, and adds up its results.
"""

import dataclasses
import functools as ft
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._carry import change_of_origin, safe_max
from .._jax import CALLS, evaluated, interpret, jaxpr_as_fun, only_varies
from .._pairs import POINTWISE
from .grid import BlockGrid, ROW
from .nonfinite import complete, poisoned
from .products import dot, dot_p, PIECE
from .tokens import by_tokens, TokenRows


def evaluate(jaxpr: Any, blocks: Sequence) -> list:
    """Applies a block function to blocks as they are stored, each cast to what it reads."""
    return jaxpr_as_fun(jaxpr)(*[x.astype(a.dtype) for x, a in zip(blocks, jaxpr.in_avals)])


def transposed_queries(x: Array, axes: tuple[int, ...], layout: BlockGrid, lie: bool = True) -> Any:
    """Queries of which the loops read blocks `[rows, features]` instead of `[features, rows]`.

    Several rows are read where their tokens lie, if they may `lie` there: in a loop over the batch.
    Gradients read each block transposed, too. XLA:CPU fuses this with the read, which is slow where
    tokens are far apart. With 128 features, gradients of 256 tokens took up to 1.05 of the time. So
    those are copied.
    """
    near = layout.stage == "fold" or x.shape[-2] <= 64
    if lie and near and layout.grid[ROW] != 1:
        found = by_tokens(x, axes, layout, transposed=True)
        if isinstance(found, TokenRows):
            return dataclasses.replace(found, transposed=False)
    return jnp.swapaxes(x, -1, -2)


class _Transposed(NamedTuple):
    """A matrix that is held transposed."""

    array: Array


def evaluate_transposed(jaxpr: Any, blocks: Sequence) -> list[Array]:
    """The transposed results of a function of logits, a closed jaxpr.

    **Arguments:**

    - `jaxpr`: the function. Its results are blocks `[keys, rows]`.
    - `blocks`: its arguments as they are stored, each to be cast to what it reads. The first, the
        queries, is transposed.
    """
    query, *others = (x.astype(a.dtype) for x, a in zip(blocks, jaxpr.in_avals))
    found = _interpret(jaxpr, [_Transposed(query), *others], jaxpr.out_avals[0].shape)
    return [_transposed(x) for x in found]


def _plain(x: Any) -> Any:
    return jnp.swapaxes(x.array, 0, 1) if isinstance(x, _Transposed) else x


def _transposed(x: Any) -> Any:
    return x.array if isinstance(x, _Transposed) else jnp.swapaxes(x, 0, 1)


def _interpret(closed: Any, args: Sequence, block: tuple[int, ...]) -> list:
    def evaluate(eqn, xs):
        if eqn.primitive in CALLS:
            return _interpret(eqn.params[CALLS[eqn.primitive]], xs, block)
        return _results(eqn, xs, block)

    return interpret(closed.jaxpr, closed.consts, args, evaluate)


def _results(eqn: Any, xs: list, block: tuple[int, ...]) -> list:
    """The results of an equation whose arguments are arrays, some of them `_Transposed`."""
    transposed = any(isinstance(x, _Transposed) for x in xs)
    if transposed and eqn.primitive is dot_p and not eqn.params["lead"]:
        # The transpose of a product is the product of the transposes, the second one first.
        (a, b), (i, j) = xs, eqn.params["contract"]
        i, j = (1 - n if isinstance(x, _Transposed) else n for n, x in ((i, a), (j, b)))
        a, b = (x.array if isinstance(x, _Transposed) else x for x in (a, b))
        return [_Transposed(dot_p.bind(b, a, **{**eqn.params, "contract": (j, i)}))]
    if transposed and (eqn.primitive in POINTWISE or only_varies(eqn)):
        ys = evaluated(eqn, [_transposed(x) if v.aval.ndim == 2 else x
                             for x, v in zip(xs, eqn.invars)])  # fmt: skip
        return [_Transposed(y) for y in ys]
    if eqn.primitive is lax.broadcast_in_dim_p and _is_part(eqn.outvars[0].aval.shape, block):
        (x,) = xs
        axes = eqn.params["broadcast_dimensions"]
        x = _transposed(x) if len(axes) == 2 else x
        axes = axes if len(axes) == 2 else [1 - n for n in axes]
        return [_Transposed(lax.broadcast_in_dim(x, eqn.outvars[0].aval.shape[::-1], axes))]
    return evaluated(eqn, [_plain(x) for x in xs])


def _is_part(shape: tuple[int, ...], block: tuple[int, ...]) -> bool:
    """Whether an array of a shape can be broadcast to a block."""
    return len(shape) == 2 and all(n in (1, m) for n, m in zip(shape, block))


def softmax_terms(
    s: Array,
    origin: Array,
    weight: Sequence[Array],
    nan_flag: Sequence[Array],
    transposed: bool = False,
) -> tuple[Array, Array]:
    """The terms that a block of logits adds to a softmax.

    **Arguments:**

    - `s`: the logits `[keys, rows]`, or `[rows, keys]` if they are `transposed`.
    - `origin`: what is subtracted from the logits of each row, `[rows]`.
    - `weight`: a list of one or none: the factors of dropout, as the logits lie.
    - `nan_flag`: a list of one or none, as for `poisoned`.

    **Returns:** the factors of the values in the numerator, as the logits lie, and the sums of the
    exponentials `[rows]`, to which dropout does not apply.
    """
    p = poisoned(s, origin, *nan_flag, transposed=transposed)
    return p * weight[0] if weight else p, p.sum(int(transposed))


# XLA:CPU turns a transposed left side into a slow product for each matrix of a batch. Where a
# single block has fewer keys and rows than this, `dot` copies what is transposed, which is faster.
# Many calls with 4 to 15 tokens then took 0.43 to 0.87 of the time, 0.62 to 0.96 with gradients.
# From 16 on, some took 1.5 times as long. The cases of `python tests/measure bench --only
# cpu-f32-full-many` have 8 and 16.
_TINY = 16


@dataclasses.dataclass(frozen=True)
class FoldStep:
    """The step of the fold in a block of one class: `(accumulators, blocks) -> accumulators`.

    The accumulators are the numerator, the denominator and the maximum. The numerator is
    `[v, rows]`, or `[rows, v]` if it is `by_rows`. They are None if this is the only block, and the
    numerator returned is then `[rows, v]`.

    **Arguments:**

    - `logits`, `values`: the block functions of the logits and of the values, as closed jaxprs.
    - `products`: keyword arguments of `dot`, as sorted pairs.
    - `shared`: which of the blocks that the logits read the values read, too.
    - `transposed`: whether logits are computed as `[rows, keys]`, of queries that are transposed.
    """

    logits: Any
    values: Any
    products: tuple
    shared: tuple[int, ...] = ()
    transposed: bool = False

    @property
    def grouped(self) -> bool:
        """Whether each group of rows has different values."""
        return self.values.out_avals[0].ndim == 3

    @property
    def by_rows(self) -> bool:
        """Whether the accumulated numerator is `[rows, v]`."""
        return self.grouped or self.transposed

    @property
    def width(self) -> int:
        """The size `v` of a value."""
        return self.values.out_avals[0].shape[-1]

    def evaluate_logits(self, *blocks: Array) -> list:
        if self.transposed:
            return evaluate_transposed(self.logits, blocks)
        return evaluate(self.logits, blocks)

    def evaluate_values(self, *blocks: Array) -> list:
        return evaluate(self.values, blocks)

    def spread(self, row: Array) -> Array:
        """Gives numbers `[rows]` the axes of a numerator."""
        return row[:, None] if self.by_rows else row[None]

    def weighted(self, v: Array, kept: Array, alone: bool) -> Array:
        """The sums of the values with the factors `kept`, as a part of the numerator. In a block
        that is `alone` they are `[rows, v]`.
        """
        product = ft.partial(dot, **dict(self.products))
        if self.transposed:
            return self._in_pieces(kept, v)
        if self.width == 1 and not self.grouped:  # This sum is exact, and fuses with the other.
            return (v * kept).sum(0)[:, None] if alone else (v * kept).sum(0)[None]
        if alone and max(kept.shape) >= _TINY:
            return product(kept.T, v, (1, 0))
        return product(kept, v, (0, 0)) if alone or self.grouped else product(v, kept, (0, 0))

    def _in_pieces(self, kept: Array, v: Array) -> Array:
        """The product of factors `[rows, keys]` and values. Blocks of usual sizes are added up in
        pieces of `PIECE` keys, as `dot` does it. For values of mean 10, the error was 1.5 and not
        2.2. With 2048 keys and 16 rows, lists took 1.2 times as long in pieces.
        """
        keys, size = len(v), PIECE if len(v) in (2 * PIECE, 4 * PIECE) else len(v)
        parts = (slice(i, i + size) for i in range(0, keys, size))
        found = [dot(kept[:, at], v[at], (1, 0), **dict(self.products)) for at in parts]
        return ft.reduce(operator.add, found)

    def __call__(self, accs: Sequence | None, blocks: Sequence) -> list:
        n = len(self.logits.in_avals)
        of_values = [*[blocks[i] for i in self.shared], *blocks[n:]]
        (s, *weight) = self.evaluate_logits(*blocks[:n])
        (v, *nan_flag) = self.evaluate_values(*of_values)
        transposed = self.transposed
        top = s.max(int(transposed))
        if accs is None:
            kept, den = softmax_terms(s, safe_max(top), weight, nan_flag, transposed)
            num = self.weighted(v, kept, alone=True)
            return [num, den, top] if nan_flag else complete(num, den, top, -1)
        new = jnp.maximum(accs[2], top)
        # The old maximum is made finite, too. The result does not need that, as the sums of a row
        # that saw nothing are 0. But the loop that XLA:CPU fuses would be shorter without it, and
        # all of its intermediate results would be written to memory.
        origin, scale = change_of_origin(new, safe_max(accs[2]))
        kept, den = softmax_terms(s, origin, weight, nan_flag, transposed)
        num = self.weighted(v, kept, alone=False)
        return [accs[0] * self.spread(scale) + num, accs[1] * scale + den, new]


@dataclasses.dataclass(frozen=True)
class Finish:
    """What a visit returns of a row, once it is complete.

    **Arguments:**

    - `fn`: a function of the row's numerator, denominator and maximum, and of the blocks that it
        reads. It returns a list: matrices, then vectors of float32.
    - `reads`: the operands whose blocks it reads, by index. These have no axis of columns.
    """

    fn: Callable[..., list]
    reads: tuple[int, ...] = ()

    def __call__(self, accs: Sequence, *blocks: Any) -> list:
        return self.fn(*accs, *blocks)


@dataclasses.dataclass(frozen=True)
class SumStep:
    """The step of a sweep: `(accumulators, blocks) -> accumulators`.

    **Arguments:**

    - `f`: the block function.
    """

    f: Callable[..., list]

    def __call__(self, accs: Sequence | None, blocks: Sequence) -> list:
        ys = self.f(*blocks)
        return ys if accs is None else [a + y for a, y in zip(accs, ys)]


def _vectorised(f: Callable, layout: BlockGrid, out_axes: Sequence) -> Callable:
    """Maps `f` over the grid's batch axes, which are inside of the blocks. Outputs that lack a
    batch axis are summed over it.
    """
    for axis in reversed(layout.batch):
        mapped = [0 if axis in a else None for a in layout.in_axes]

        def g(*xs, f=f, axis=axis, mapped=mapped):
            size = layout.grid[axis]
            ys = jax.vmap(f, mapped, axis_size=size)(*xs)
            return [y if axis in a else y.sum(0) for y, a in zip(ys, out_axes)]

        f = g
    return f


def steps_of(
    visits: Sequence,
    layout: BlockGrid,
    out_axes: Sequence,
    wanted: Sequence[int],
    vectorise: bool,
    transposed: bool = False,
) -> dict[int, Callable]:
    """The steps by which `traverse` adds up the results `wanted` of block functions. Where they are
    `transposed`, the first block, the queries, is read as `[rows, features]`.
    """
    steps: dict[int, Callable] = {}
    for c, jaxpr in visits:

        def f(*blocks: Any, jaxpr: Any = jaxpr) -> list:
            blocks = (jnp.swapaxes(blocks[0], 0, 1), *blocks[1:]) if transposed else blocks
            ys = evaluate(jaxpr, blocks)
            return [ys[i] for i in wanted]

        axes = [out_axes[i] for i in wanted]
        steps[c] = SumStep(_vectorised(f, layout, axes) if vectorise else f)
    return steps
