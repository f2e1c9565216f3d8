"""A `Problem` cut into blocks: operands on a grid, and the logits of one block.

The grid is `(B, K, rows, columns)`: batch, key/value heads, query blocks, key blocks. The rows of
a block are the queries of all heads that share a key/value head, so keys and values are never
repeated; blocks of logits are `[keys, group * queries]`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from ._carry import Carry
from ._dot import dot
from ._dropout import kept
from ._fold import finite, fold, masked_dot
from ._pairs import over_block
from ._problem import Problem, visible
from ._traverse import COL, EMPTY, FULL, PARTIAL, ROW


BATCH, HEAD = -4, -3


@dataclasses.dataclass(frozen=True)
class Blocking:
    """Sizes of the grid and its blocks."""

    batch: int
    kv_heads: int
    group: int
    queries: int
    keys: int
    block_q: int
    block_k: int

    @property
    def rows(self) -> int:
        return -(-self.queries // self.block_q)

    @property
    def columns(self) -> int:
        return -(-self.keys // self.block_k)

    @property
    def grid(self) -> tuple[int, ...]:
        return (self.batch, self.kv_heads, self.rows, self.columns)

    @property
    def block(self) -> tuple[int, int]:
        return (self.block_k, self.group * self.block_q)

    def pad(self, x: Array | np.ndarray, axis: int, n: int, edge: bool) -> Array | np.ndarray:
        """Pads an axis to `n`, with its last entry or with zeros."""
        if x.shape[axis] == n:
            return x
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, n - x.shape[axis])
        xp = np if isinstance(x, np.ndarray) else jnp
        return xp.pad(x, widths, mode="edge") if edge else xp.pad(x, widths)

    def rows_of(self, x: Any) -> Array:
        """`[B, T, H, D]` to `[B, K, rows, D, group * block_q]`."""
        x = self.pad(x, 1, self.rows * self.block_q, edge=False)
        x = x.reshape(self.batch, self.rows, self.block_q, self.kv_heads, self.group, x.shape[-1])
        x = x.transpose(0, 3, 1, 5, 4, 2)
        return x.reshape(*x.shape[:4], self.group * self.block_q)

    def from_rows(self, x: Array) -> Array:
        """`[B, K, rows, group * block_q]`, maybe with a last axis `V`, to `[B, T, H]`, `V`."""
        x = x.reshape(*x.shape[:3], self.group, self.block_q, *x.shape[4:])
        x = x.transpose(0, 2, 4, 1, 3, *range(5, x.ndim))
        heads = self.kv_heads * self.group
        x = x.reshape(self.batch, self.rows * self.block_q, heads, *x.shape[5:])
        return x[:, : self.queries]

    def columns_of(self, x: Any) -> Array:
        """`[B, S, K, D]` to `[B, K, columns, block_k, D]`."""
        x = self.pad(x, 1, self.columns * self.block_k, edge=False)
        # The axis of size 1 makes XLA:CPU copy once, not twice, on the way into a loop.
        x = x.reshape(self.batch, self.columns, 1, self.block_k, self.kv_heads, x.shape[-1])
        x = x.transpose(0, 4, 1, 2, 3, 5)
        return x.reshape(*x.shape[:3], *x.shape[4:])

    def pairs_of(self, x: Array | np.ndarray) -> tuple[Array | np.ndarray, tuple[int, ...]]:
        """A canonical operand `[B|1, H|1, T|1, S|1]` as blocks `[keys|1, rows|1]` on some of the
        grid's axes; or `[keys, group|1, queries|1]` where the whole would be larger than `x`.
        """
        b, h, t, s = x.shape
        if t > 1:
            x = self.pad(x, 2, self.rows * self.block_q, edge=True)
        if s > 1:
            x = self.pad(x, 3, self.columns * self.block_k, edge=True)
        sizes = (
            (b, 1) if b == 1 else (self.batch, 1),
            (1, 1) if h == 1 else (self.kv_heads, self.group),
            (1, 1) if t == 1 else (self.rows, self.block_q),
            (1, 1) if s == 1 else (self.columns, self.block_k),
        )
        x = x.reshape([n for pair in sizes for n in pair]).transpose(0, 2, 4, 6, 7, 3, 5, 1)
        axes = tuple(a for a, (n, _) in zip((BATCH, HEAD, ROW, COL), sizes) if n > 1)
        keys, group, queries = x.shape[4:7]
        x = x.reshape([n for n, _ in sizes if n > 1] + [keys, group, queries])
        if keys == 1 and group * queries > 1:
            xp = np if isinstance(x, np.ndarray) else jnp
            x = xp.broadcast_to(x, (*x.shape[:-2], self.group, self.block_q))
        if keys == 1 or x.shape[-2:] in ((1, 1), (self.group, self.block_q)):
            x = x.reshape(*x.shape[:-2], -1)
        return x, axes


def spread(x: Array, blocking: Blocking) -> Array:
    """A block from `pairs_of` as `[keys|1, rows|1]`."""
    if x.ndim == 2:
        return x
    return jnp.broadcast_to(x, (len(x), blocking.group, blocking.block_q)).reshape(len(x), -1)


def table_of(problem: Problem, blocking: Blocking):
    """The class of each block `[B|1, K|1, rows, columns]`; None if all are full."""
    table = None
    if problem.mask is not None:
        from ._intervals import classify  # imported on first use: half of eqattn's import

        q, k = problem.positions()
        table = classify(
            problem.mask,
            batch_shape=problem.batch_shape,
            heads=blocking.kv_heads * blocking.group,
            kv_heads=blocking.kv_heads,
            q_positions=q,
            kv_positions=k,
            block_q=blocking.block_q,
            block_k=blocking.block_k,
        )
    if blocking.keys % blocking.block_k:  # keys that pad the last block must be masked
        if table is None:
            table = np.full((1, 1, blocking.rows, blocking.columns), FULL, np.int8)
        last = np.arange(blocking.columns) == blocking.columns - 1
        last = last.reshape(1, 1, 1, -1)
        xp = np if isinstance(table, np.ndarray) else jnp
        table = xp.where(last & (table == FULL), np.int8(PARTIAL), table)
    return table


def fold_problem(problem: Problem, blocking: Blocking) -> Carry:
    """The softmax fold of a problem: a Carry of `[B, T, H, V]`, `[B, T, H]`, `[B, T, H]`."""
    if 0 in (*blocking.grid, blocking.queries):
        t, _, heads, _ = problem.sizes
        shape = (blocking.batch, t, heads)
        return Carry.empty(shape, problem.value.shape[-1], problem.accumulation)
    parts = Parts(problem, blocking)
    table, table_axes, classes = parts.plan()
    carry = fold(
        {c: parts.logits(c) for c in classes},
        parts.operands,
        parts.axes,
        parts.value,
        parts.poison,
        (BATCH, HEAD, COL),
        grid=blocking.grid,
        block=blocking.block,
        table=table,
        table_axes=table_axes,
        products=parts.products,
        spec=parts.spec,
        roles=parts.roles,
    )
    return Carry(*map(blocking.from_rows, carry))


def not_finite(x: Array) -> Array:
    """`[..., 1]`: NaN where a vector of `x` `[..., n]` holds what is not finite, else 0."""
    x = lax.stop_gradient(x)
    few = np.where(np.arange(x.shape[-1]) % 2, 2.0**-13, 2.0**-14)  # sums stay in range
    weights = jnp.asarray(few[:, None].repeat(2, 1), x.dtype)  # two columns: XLA:CPU is fast then
    return (jnp.einsum("...n,nm->...m", x, weights, precision=lax.Precision.HIGHEST) * 0)[..., :1]


class Parts:
    """The operands of a problem's blocks, and the function that turns them into logits."""

    def __init__(self, problem: Problem, blocking: Blocking):
        self.problem, self.blocking = problem, blocking
        dtype, acc = problem.query.dtype, problem.accumulation
        wide = dtype == acc or jax.default_backend() == "cpu"
        stored = acc if wide else dtype  # narrow products are slower than float32's on a CPU
        precision = problem.precision
        if precision is None and dtype == acc:
            precision = lax.Precision.HIGHEST
        self.products = (("operand_dtype", None if wide else dtype), ("precision", precision))
        query, key = problem.query.astype(stored), problem.key.astype(stored)
        scale = jnp.asarray(problem.scale, acc)
        self.post_scale = not wide
        if wide:  # not the query, as XLA:CPU is slow at arithmetic in a transposed copy
            key = key * scale
        value = problem.value.astype(stored)
        self.value = blocking.columns_of(finite(value))
        self.poison = blocking.columns_of(not_finite(value).astype(acc))[..., 0]
        self.operands = [blocking.rows_of(query), blocking.columns_of(key)]
        self.axes: list[tuple[int, ...]] = [(BATCH, HEAD, ROW), (BATCH, HEAD, COL)]
        self.roles = ("query", "key")
        if self.post_scale:
            self.add("scale", scale.reshape(1, 1, 1, 1))
        for name, x in zip(("batch", "head", "q_position", "kv_position"), problem.indices()):
            self.add(name, x)
        valid = np.arange(blocking.columns * blocking.block_k) < blocking.keys
        self.padded = not valid.all()
        if self.padded:
            self.add("valid", valid.reshape(1, 1, 1, -1))
        self.groups = []
        for part in (*problem.scores, *([] if problem.mask is None else [problem.mask])):
            start = len(self.operands)
            for operand in part.operands():
                self.add(type(part).__name__, problem.canonical(operand))
            self.groups.append(slice(start, len(self.operands)))
        if problem.seed is not None and problem.rate > 0:
            self.operands.append(problem.seed)
            self.axes.append(())
            self.roles += ("seed",)
        self.spec = (
            tuple(type(s).__name__ for s in problem.scores),
            jax.tree.structure(problem.mask),
            problem.rate if "seed" in self.roles else 0.0,
            problem.logits_dtype,
        )

    def add(self, role: str, x) -> None:
        blocks, axes = self.blocking.pairs_of(x)
        self.operands.append(jnp.asarray(blocks))
        self.axes.append(axes)
        self.roles += (role,)

    def plan(self):
        """The table of live blocks, its grid axes, and the classes that can occur."""
        table = table_of(self.problem, self.blocking)
        if table is None:
            return None, None, (FULL,)
        if self.blocking.rows * self.blocking.columns == 1:
            return None, None, (PARTIAL,)
        classes = (PARTIAL, FULL)
        if isinstance(table, np.ndarray):
            present = np.unique(table)
            classes = tuple(c for c in classes if c in present) or (PARTIAL,)
            if present.size == 1 and EMPTY not in present:
                return None, None, classes
        axes = [a for a, n in zip((BATCH, HEAD), table.shape) if n > 1] + [ROW, COL]
        shape = [n for n in table.shape[:2] if n > 1] + list(table.shape[2:])
        return jnp.asarray(table.reshape(shape)), tuple(axes), classes

    def logits(self, c: int) -> Callable:
        """The logits of a block of class `c`, and with dropout the factor on its probabilities."""
        problem, blocking = self.problem, self.blocking
        acc = problem.accumulation

        def fn(*blocks):
            q, k = blocks[:2]
            named = {n: x if n == "seed" else spread(x, blocking)
                     for n, x in zip(self.roles[2:], blocks[2:])}  # fmt: skip
            pairs = [named[n] for n in ("batch", "head", "q_position", "kv_position")]
            own = [[spread(x, blocking) for x in blocks[g]] for g in self.groups]
            mask = None
            if c == PARTIAL:
                mask = jnp.ones((1, 1), bool)
                if problem.mask is not None:
                    mask = over_block(visible(problem.mask), [*pairs, *own[-1]])
                if self.padded:
                    mask = mask & named["valid"]
                mask = jnp.broadcast_to(mask, blocking.block)
            if mask is None:
                s = dot(k, q, (1, 0), **dict(self.products))
            else:
                s = masked_dot(k, q, self.products)
            if self.post_scale:
                s = s * named["scale"]
            if mask is not None:
                s = jnp.where(mask, s, 0)
            for score, xs in zip(problem.scores, own):
                s = over_block(score.transform, [s, *pairs, *xs])
            if problem.logits_dtype is not None:
                s = s.astype(problem.logits_dtype).astype(acc)
            if mask is not None:
                s = jnp.where(mask, s, -jnp.inf)
            if "seed" not in named:
                return [s]
            keep = kept(named["seed"], pairs, problem.rate)
            return [s, keep.astype(acc) * (1 / (1 - problem.rate))]

        return fn


def choose_blocking(problem: Problem, block_q: int | None, block_k: int | None) -> Blocking:
    """The blocking of a problem; automatic sizes where None."""
    t, s, heads, kv_heads = problem.sizes
    group = heads // kv_heads
    if block_q is None:
        block_q = max(8, 256 // group)
    if block_k is None:
        block_k = 256
    return Blocking(
        batch=math.prod(problem.batch_shape),
        kv_heads=kv_heads,
        group=group,
        queries=t,
        keys=s,
        block_q=min(block_q, max(t, 1)),
        block_k=min(block_k, max(s, 1)),
    )
