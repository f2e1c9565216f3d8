"""How a problem is spread over devices. Tokens are spread around a ring, whose places may each be a
group of devices that exchange tokens for heads.

Attention of one head needs no other head. So an all-to-all gives each device of a place all tokens
of the place, for some of the heads. The device folds these as if it were alone, and a second
all-to-all brings the rows back. JAX transposes these moves, so there is no derivative code here.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._jax import summed_wide, vary, varying_axes
from .._sweep.gathering import ColumnsOfDevices
from .._sweep.grid import BATCH, COL, HEAD, ROW
from .blocking import Blocking
from .mesh import ManualAxes, merged_axes, split_axis, token_axis
from .problem import Problem


@dataclasses.dataclass(frozen=True)
class HeadExchange:
    """Two mesh axes over which tokens are sharded. The outer one is that of the ring.

    **Arguments:**

    - `ring`: how columns are reached over the outer axis, by hops or by gathering them; None means
        that there is a single place.
    - `axis`: the inner axis, over which heads are exchanged; None means that a place is one device.
    - `size`: the number of devices that exchange.
    - `manual`: how arrays of all devices are spread; None means that the axes are manual already.
    """

    ring: ColumnsOfDevices | None = None
    axis: str | None = None
    size: int = 1
    manual: ManualAxes | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes, the outer one first."""
        inner = () if self.axis is None else (self.axis,)
        return inner if self.ring is None else (self.ring.axis, *inner)

    @property
    def inside(self) -> bool:
        """Whether the arrays are one device's own."""
        return self.manual is None

    def local(self, blocking: Blocking) -> Blocking:
        """The blocking of what one device visits, from the blocking of the arrays outside."""
        batch, kv_heads = 1, self.size
        parts = blocking.parts * self.size
        if self.manual is not None:
            batch, kv_heads, places = map(self.manual.parts, (BATCH, HEAD, ROW))
            parts = blocking.parts // places
        lengths = blocking.queries, blocking.keys
        queries, keys = (-(-n // blocking.parts) * parts for n in lengths)
        return dataclasses.replace(
            blocking,
            batch=blocking.batch // batch,
            kv_heads=blocking.kv_heads // kv_heads,
            queries=queries,
            keys=keys,
            parts=parts,
            shards=max(blocking.shards // self.size, 1),
        )

    def tokens_to_heads(self, x: Array, axes: tuple[int, ...]) -> Array:
        """Brings what a device needs to fold its heads, from an array that is sharded by tokens.

        Arrays with heads and tokens are exchanged, and those with heads alone are cut. Those with
        tokens alone are gathered, and others are whole. This and `heads_to_tokens` are for axes
        that are manual already; `ManualAxes.shard_map` does the same for automatic ones.
        """
        if self.size == 1 or not {HEAD, ROW, COL} & set(axes):
            return x
        index = lax.axis_index(self.axis)
        x = vary(x, varying_axes(index))
        if HEAD not in axes:
            at = axes.index(token_axis(axes))
            return summed_wide(lambda x: lax.all_gather(x, self.axis, axis=at, tiled=True), x)
        at = axes.index(HEAD)
        x = split_axis(x, at, self.size)
        if ROW not in axes and COL not in axes:
            return lax.dynamic_index_in_dim(x, index, at + 1, keepdims=False)
        return merged_axes(lax.all_to_all(x, self.axis, at + 1, at + 1), at + 1)

    def heads_to_tokens(self, x: Array, axes: tuple[int, ...]) -> Array:
        """Undoes `tokens_to_heads` for an array with heads and tokens."""
        if self.size == 1:
            return x
        at = axes.index(HEAD)
        x = split_axis(x, at + 1, self.size, outside=True)
        return merged_axes(lax.all_to_all(x, self.axis, at + 1, at + 1), at)


def with_enough_heads(problem: Problem, shares: int) -> Problem:
    """Repeats each key/value head as often as is needed to cut the heads into equal `shares`."""
    kv_heads = problem.sizes[3]
    times = math.lcm(kv_heads, shares) // kv_heads
    if times == 1:
        return problem
    repeat = lambda x: jnp.repeat(x, times, 2)
    key, value = (summed_wide(repeat, x) for x in (problem.key, problem.value))
    return dataclasses.replace(problem, key=key, value=value)
