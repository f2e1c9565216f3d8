"""The plain softmax: the reference, and the strategy that returns attention weights."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._blocking import BATCH, choose_blocking, HEAD
from .._blocks import Parts
from .._cached import cached
from .._carry import Carry, gauge
from .._dot import dot
from .._fold import poisoned
from .._metadata import AttentionMetadata
from .._problem import Problem
from .._registry import AttentionRegistry
from .._traverse import PARTIAL
from ._exact import AbstractExact


@cached
def _fold(problem: Problem) -> tuple[Carry, Array]:
    t, s, heads, _ = problem.sizes
    blocking = choose_blocking(problem, max(t, 1), max(s, 1))
    if 0 in (*blocking.grid, t):
        shape = (blocking.batch, t, heads)
        empty = Carry.empty(shape, problem.value.shape[-1], problem.accumulation)
        return empty, jnp.zeros((blocking.batch, heads, t, s), problem.accumulation)
    parts = Parts(problem, blocking)
    logits, weigh = parts.logits(PARTIAL), parts.weigh(PARTIAL)

    def block(blocks, values):
        s, *weight = logits(*blocks)
        v, poison = weigh(*values)
        top = s.max(0)
        p = poisoned(s, gauge(top), poison)
        kept = p * weight[0] if weight else p
        num = dot(v, kept, (0, 0), **dict(parts.products)).T
        return num, p.sum(0), jax.lax.stop_gradient(top), kept

    single = {a: n for a, n in zip((BATCH, HEAD), blocking.grid)}
    operands = [_whole(x, a, problem) for x, a in zip(parts.operands, parts.axes)]
    values = [_whole(x, a, problem) for x, a in zip(parts.values, parts.value_axes)]
    for axis in (HEAD, BATCH):
        mapped = [0 if axis in a else None for a in parts.axes]
        block = jax.vmap(block, (mapped, 0), axis_size=single[axis])
    num, den, top, kept = block(operands, values)
    carry = Carry(*[blocking.from_rows(x[:, :, None]) for x in (num, den, top)])
    inverse = jnp.where(den == 0, 0, 1 / jnp.where(den == 0, 1, den))
    weights = jnp.swapaxes(kept * inverse[:, :, None], -1, -2)
    return carry, weights.reshape(blocking.batch, heads, t, s)


def _whole(x: Array, axes: tuple[int, ...], problem: Problem) -> Array:
    """An operand without the axes of rows and columns, which have one block each."""
    x = x.reshape([n for a, n in zip(axes, x.shape) if a < -2] + list(x.shape[len(axes) :]))
    return x.astype(problem.accumulation) if jnp.issubdtype(x.dtype, jnp.floating) else x


@AttentionRegistry.register
class Dense(AbstractExact):
    """Exact attention that forms all logits at once, in memory queries x keys.

    It is differentiated by JAX's own rules, without this library's, and is the only strategy with
    `return_weights=True`: the probabilities `[*b, h, t, s]` as they multiply the values (after
    dropout; with sinks they sum to less than one).

    **Arguments:**

    - `metadata`: as for `Blockwise`. There is one block, of any size: the answer of every strategy
        is independent of the block sizes.
    - `precision`: as for `Blockwise`.
    """

    metadata: AttentionMetadata
    precision: Any = eqx.field(static=True, default=None)

    forms_weights = True

    @classmethod
    def get_impl_name(cls) -> str:
        return "dense"

    def fold(self, problem: Problem) -> tuple[Carry, Any]:
        return _fold(problem)
