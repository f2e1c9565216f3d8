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
from ._masks import AbstractMask
from ._pairs import Operand, over_block
from ._problem import Problem, visible
from ._ring import Rotation
from ._traverse import COL, EMPTY, FULL, PARTIAL, ROW


BATCH, HEAD = -4, -3


@dataclasses.dataclass(frozen=True)
class Blocking:
    """Sizes of the grid and its blocks.

    Queries and keys are cut into `parts` of equal length, each with blocks of its own, so that no
    block lies on two devices. What varies with queries and keys holds the keys of `shards` devices.
    """

    batch: int
    kv_heads: int
    group: int
    queries: int
    keys: int
    block_q: int
    block_k: int
    parts: int = 1
    shards: int = 1

    @property
    def rows(self) -> int:
        return self.parts * -(-self.queries // (self.parts * self.block_q))

    @property
    def columns(self) -> int:
        return self.parts * -(-self.keys // (self.parts * self.block_k))

    @property
    def grid(self) -> tuple[int, ...]:
        return (self.batch, self.kv_heads, self.rows, self.columns)

    @property
    def block(self) -> tuple[int, int]:
        return (self.block_k, self.group * self.block_q)

    def pad(self, x: Any, axis: int, n: int, edge: bool, parts: int | None = None) -> Any:
        """Pads each part of an axis, to `n` in all, with its last entry or with zeros."""
        if x.shape[axis] == n:
            return x
        parts = self.parts if parts is None else parts
        xp = np if isinstance(x, np.ndarray) else jnp

        def widen(x, axis, n):
            widths = [(0, 0)] * x.ndim
            widths[axis] = (0, n - x.shape[axis])
            return xp.pad(x, widths, mode="edge") if edge else xp.pad(x, widths)

        if parts == 1:
            return widen(x, axis, n)
        lead, rest = x.shape[:axis], x.shape[axis + 1 :]
        x = widen(x, axis, -(-x.shape[axis] // parts) * parts).reshape(*lead, parts, -1, *rest)
        return widen(x, axis + 1, n // parts).reshape(*lead, n, *rest)

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
        rest, part = x.shape[5:], -(-self.queries // self.parts)
        x = x.reshape(self.batch, self.parts, -1, heads, *rest)[:, :, :part]
        return x.reshape(self.batch, -1, heads, *rest)[:, : self.queries]

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
        columns = self.columns * (self.shards if t > 1 else 1)
        if t > 1:
            x = self.pad(x, 2, self.rows * self.block_q, edge=True)
        if s > 1:
            parts = self.parts * columns // self.columns
            x = self.pad(x, 3, columns * self.block_k, edge=True, parts=parts)
        sizes = (
            (b, 1) if b == 1 else (self.batch, 1),
            (1, 1) if h == 1 else (self.kv_heads, self.group),
            (1, 1) if t == 1 else (self.rows, self.block_q),
            (1, 1) if s == 1 else (columns, self.block_k),
        )
        x = x.reshape([n for pair in sizes for n in pair]).transpose(0, 2, 4, 6, 7, 3, 5, 1)
        # One device's only block of rows or columns differs from the others' in a ring.
        kept = [n > 1 or self.shards > 1 < m for (n, _), m in zip(sizes, (b, h, t, s))]
        axes = tuple(a for a, keep in zip((BATCH, HEAD, ROW, COL), kept) if keep)
        keys, group, queries = x.shape[4:7]
        x = x.reshape([n for (n, _), keep in zip(sizes, kept) if keep] + [keys, group, queries])
        if keys == 1 and group * queries > 1:
            xp = np if isinstance(x, np.ndarray) else jnp
            x = xp.broadcast_to(x, (*x.shape[:-2], self.group, self.block_q))
        if keys == 1 or x.shape[-2:] in ((1, 1), (self.group, self.block_q)):
            x = x.reshape(*x.shape[:-2], -1)
        return x, axes

    def from_pairs(self, x: Array, axes: tuple[int, ...]) -> Array:
        """What `pairs_of` made blocks of, with its padding."""
        sizes, block = dict(zip(axes, x.shape)), x.shape[len(axes) :]
        b, k, rows, columns = (sizes.get(a, 1) for a in (BATCH, HEAD, ROW, COL))
        if len(block) == 2:
            block = (block[0], 1, 1) if block[1] == 1 else (block[0], self.group, self.block_q)
        x = x.reshape(b, k, rows, columns, *block)
        if HEAD not in axes and self.kv_heads > 1:  # spread over the group
            x = x[..., :1, :]
        x = x.transpose(0, 1, 5, 2, 6, 3, 4)
        return x.reshape(b, x.shape[1] * x.shape[2], rows * block[2], columns * block[0])


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


def fold_problem(
    problem: Problem, blocking: Blocking, ring: Rotation | None = None, mesh: Any = None
) -> Carry:
    """The softmax fold of a problem: a Carry of `[B, T, H, V]`, `[B, T, H]`, `[B, T, H]`.

    With a `ring`, over the keys of all its devices. Its axis is manual here if `mesh` is None; else
    the arrays are those of all devices, and the axis of this mesh is made manual for the fold.
    """
    if 0 in (*blocking.grid, blocking.queries):
        t, _, heads, _ = problem.sizes
        shape = (blocking.batch, t, heads)
        return Carry.empty(shape, problem.value.shape[-1], problem.accumulation)
    parts = Parts(problem, blocking, ring is not None)
    table, table_axes, classes = parts.plan()
    devices = 1 if ring is None or mesh is None else ring.size
    columns = (BATCH, HEAD, COL)

    def run(operands, value, poison):
        return fold(
            {c: parts.logits(c) for c in classes},
            operands,
            parts.axes,
            value,
            poison,
            columns,
            grid=(*blocking.grid[:2], *[n // devices for n in blocking.grid[2:]]),
            block=blocking.block,
            table=table,
            table_axes=table_axes,
            ring=ring,
            classify=None if classes == (FULL,) else parts.classify,
            reads=parts.reads,
            products=parts.products,
            spec=parts.spec,
            roles=parts.roles,
        )

    if devices > 1:
        run = ring.over(mesh, run, [parts.axes, columns, columns], [(BATCH, HEAD, ROW)] * 3)
    return Carry(*map(blocking.from_rows, run(parts.operands, parts.value, parts.poison)))


def not_finite(x: Array) -> Array:
    """`[..., 1]`: NaN where a vector of `x` `[..., n]` holds what is not finite, else 0."""
    x = lax.stop_gradient(x)
    few = np.where(np.arange(x.shape[-1]) % 2, 2.0**-13, 2.0**-14)  # sums stay in range
    weights = jnp.asarray(few[:, None].repeat(2, 1), x.dtype)  # two columns: XLA:CPU is fast then
    return (jnp.einsum("...n,nm->...m", x, weights, precision=lax.Precision.HIGHEST) * 0)[..., :1]


class Parts:
    """The operands of a problem's blocks, and the function that turns them into logits."""

    def __init__(self, problem: Problem, blocking: Blocking, rotates: bool = False):
        self.problem, self.blocking, self.rotates = problem, blocking, rotates
        dtype, acc = problem.query.dtype, problem.accumulation
        wide = dtype == acc or jax.default_backend() == "cpu"
        # Narrow products are slower than float32's on a CPU. What rotates stays narrow.
        stored = dtype if rotates or not wide else acc
        precision = problem.precision
        if precision is None and dtype == acc:
            precision = lax.Precision.HIGHEST
        self.products = (("operand_dtype", None if wide else dtype), ("precision", precision))
        query, key = problem.query.astype(stored), problem.key.astype(stored)
        scale = jnp.asarray(problem.scale, acc)
        self.post_scale = stored != acc
        if not self.post_scale:  # not the query, as XLA:CPU is slow at arithmetic in a transposed copy
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
        valid = np.ones((1, 1, 1, blocking.keys), bool)
        valid = blocking.pad(valid, 3, blocking.columns * blocking.block_k, edge=False)
        self.padded = not valid.all()
        if self.padded:
            self.add("valid", valid)
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

    @property
    def reads(self) -> list[int]:
        """The operands of `classify`."""
        positions = [self.roles.index(n) for n in ("q_position", "kv_position")]
        valid = [self.roles.index("valid")] if self.padded else []
        own = [] if self.problem.mask is None else range(len(self.axes))[self.groups[-1]]
        return [*positions, *valid, *own]

    def classify(self, *blocks: Array) -> Array:
        """The table of one hop, `[rows, columns]` or `[B, K, rows, columns]`."""
        from ._intervals import classify

        blocking, axes = self.blocking, [self.axes[i] for i in self.reads]
        whole = [blocking.from_pairs(x, a) for x, a in zip(blocks, axes)]
        (q, k), whole = whole[:2], whole[2:]
        q, k = q[:, 0, :, 0], k[:, 0, 0]
        rows, columns = (n // size for n, size in zip((q.shape[1], k.shape[1]), (blocking.block_q, blocking.block_k)))
        table = jnp.full((1, 1, rows, columns), FULL, jnp.int8)
        if self.padded:
            valid, *whole = whole
            valid = valid.reshape(1, 1, 1, columns, -1)
            padded = jnp.where(valid.any(-1), jnp.int8(PARTIAL), jnp.int8(EMPTY))
            table = jnp.where(valid.all(-1), table, padded)
        if self.problem.mask is not None:
            classes = classify(
                Given(self.problem.mask, tuple(whole)),
                batch_shape=(blocking.batch,),
                heads=blocking.kv_heads * blocking.group,
                kv_heads=blocking.kv_heads,
                q_positions=q,
                kv_positions=k,
                block_q=blocking.block_q,
                block_k=blocking.block_k,
            )
            table = jnp.minimum(table, classes)
        if table.shape[:2] == (1, 1):
            return table[0, 0]
        return jnp.broadcast_to(table, (*blocking.grid[:2], rows, columns))

    def plan(self):
        """The table of live blocks, its grid axes, and the classes that can occur."""
        if self.rotates:  # each hop makes its own table
            some = self.problem.mask is not None or self.padded
            return None, None, (PARTIAL, FULL) if some else (FULL,)
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


class Given(AbstractMask):
    """A mask whose operands are replaced by canonical arrays."""

    mask: AbstractMask
    arrays: tuple[Array, ...]

    def operands(self):
        return tuple(Operand(x, "bhts") for x in self.arrays)

    def visible(self, b, h, q, k, *ids):
        return self.mask.visible(b, h, q, k, *ids)


def choose_blocking(
    problem: Problem, block_q: int | None, block_k: int | None, parts: int = 1, shards: int = 1
) -> Blocking:
    """The blocking of a problem; automatic sizes where None."""
    t, s, heads, kv_heads = problem.sizes
    group = heads // kv_heads
    if block_q is None:
        block_q = max(8, 256 // group)
    if block_k is None:
        block_k = 128
    return Blocking(
        batch=math.prod(problem.batch_shape),
        kv_heads=kv_heads,
        group=group,
        queries=t,
        keys=s,
        block_q=min(block_q, max(-(-t // parts), 1)),
        block_k=min(block_k, max(-(-s // parts), 1)),
        parts=parts,
        shards=shards,
    )
