"""How strategies fold a problem. What they need for it is imported when they first do so: nearly
a fifth of eqattn's import.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._carry import Carry, safe_max
from .._jax import compiled
from .._problem.blocking import choose_blocking
from .._problem.exchange import HeadExchange
from .._problem.fold import fold_problem
from .._problem.jit_cache import cached
from .._problem.operands import BlockOperand, BlockOperands
from .._problem.problem import Problem
from .._ring.plan import reach
from .._sweep.fold import softmax_terms
from .._sweep.grid import BATCH, HEAD, PARTIAL
from .._sweep.lowering import XLA
from .._sweep.products import dot
from .._sweep.rotation import Rotation
from .._sweep.sweep import block_dtype


@cached
def fold_on_device(
    problem: Problem, *, block_q, block_k, fused, lowering=XLA, manual=None, in_place=False
) -> Carry:
    """On one device, in its blocks."""
    devices = 1 if manual is None else manual.parts(HEAD)
    blocking = choose_blocking(
        problem, block_q, block_k, in_place=in_place, lowering=lowering, devices=devices
    )
    return fold_problem(
        problem, blocking, HeadExchange(manual=manual), fused=fused, lowering=lowering
    )


@compiled  # JAX cannot look at known arrays inside of a `shard_map` that is not
@cached
def fold_sharded(
    problem: Problem, *, block_q, block_k, place, manual, unroll, fused, lowering
) -> Carry:
    """Over the devices of a place of a strategy over sharded sequences."""
    axis, n, head_axis, group, mesh, layout, _ = place
    # Blocks lie on one device and in one chunk of the layout.
    pieces = math.lcm(layout.parts, group)
    t, s, _, _ = problem.sizes
    ring = None
    if axis is not None:
        ahead, behind = reach(problem, layout, n, group)
        ring = Rotation(axis, n, ahead, behind, unroll)

    def tokens(length, given):
        """The positions of a device's place; of all devices where the axes are automatic."""
        if given is not None:
            gathered = mesh is None and head_axis is not None
            return lax.all_gather(given, head_axis, axis=1, tiled=True) if gathered else given
        return place.tokens(length)

    problem = dataclasses.replace(
        problem,
        q_positions=tokens(t, problem.q_positions),
        kv_positions=tokens(s, problem.kv_positions),
    )
    parts = pieces // group if mesh is None else pieces * n
    shards = n * group if mesh is None else 1
    blocking = choose_blocking(problem, block_q, block_k, parts, shards, lowering=lowering)
    spread = HeadExchange(ring, head_axis, group, manual)
    return fold_problem(problem, blocking, spread, fused=fused, lowering=lowering)


@cached
def fold_dense(problem: Problem) -> tuple[Carry, Array]:
    """At once, with the probabilities."""
    t, s, heads, _ = problem.sizes
    blocking = choose_blocking(problem, max(t, 1), max(s, 1))
    if 0 in (*blocking.grid, t):
        shape = (blocking.batch, t, heads)
        empty = Carry.empty(shape, problem.value.shape[-1], problem.accumulation_dtype)
        return empty, jnp.zeros((blocking.batch, heads, t, s), problem.accumulation_dtype)
    whole = BlockOperands(problem, blocking)
    logits, weigh = whole.logits(PARTIAL), whole.weigh(PARTIAL)

    def block(blocks, values):
        s, *weight = logits(*blocks)
        v, *poison = weigh(*values)
        top = s.max(0)
        kept, den = softmax_terms(s, safe_max(top), weight, poison)
        num = dot(v, kept, (0, 0), **dict(whole.products)).T
        return num, den, jax.lax.stop_gradient(top), kept

    single = {a: n for a, n in zip((BATCH, HEAD), blocking.grid)}
    operands = [_whole(x) for x in whole.operands]
    values = [_whole(x) for x in whole.values]
    for axis in (HEAD, BATCH):
        mapped = [0 if axis in x.axes else None for x in whole.operands]
        block = jax.vmap(block, (mapped, 0), axis_size=single[axis])
    num, den, top, kept = block(operands, values)
    carry = Carry(*[blocking.from_rows(x[:, :, None]) for x in (num, den, top)])
    inverse = jnp.where(den == 0, 0, 1 / jnp.where(den == 0, 1, den))
    weights = jnp.swapaxes(kept * inverse[:, :, None], -1, -2)
    return carry, weights.reshape(blocking.batch, heads, t, s)


def _whole(operand: BlockOperand) -> Array:
    """An operand without the axes of rows and columns, which have one block each."""
    x, axes = operand.array, operand.axes
    x = x.reshape([n for a, n in zip(axes, x.shape) if a < -2] + list(x.shape[len(axes) :]))
    return x.astype(block_dtype(x))
