"""What type checkers see of eqattn: `pyright` and `mypy --strict` check this file, which never runs.

A line with `type: ignore` must be an error: both checkers report one that is not needed.
"""

from typing import Any, assert_type

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

import eqattn
from eqattn import (
    ALiBi,
    attention,
    AttentionImpl,
    AttentionMetadata,
    AttentionOutput,
    AttentionRegistry,
    Blockwise,
    Carry,
    Causal,
    Dense,
    dot_product_attention,
    packed_segments,
    Platform,
    Ring,
    ring_attention,
    ring_plan,
    RingPlan,
    RuntimeMode,
    ScoreFn,
    SlidingWindow,
    Support,
    Ulysses,
    Zigzag,
)
from eqattn.cache import KVCache
from eqattn.compat import PartitionAxis, ring_attention as ring_attention_
from eqattn.masks import AbstractMask, Sparsity
from eqattn.nn import from_equinox, MultiheadAttention


query = jnp.ones((2, 8, 4, 16))
key_ = value = jnp.ones((2, 8, 2, 16))

# Entry points
out = attention(query, key_, value, Blockwise(AttentionMetadata()), mask=Causal())
assert_type(out, AttentionOutput)
assert_type(out.attention_outputs, Array)
assert_type(out.carry, Carry | Any)
assert_type(out.logsumexp, Array | Any)
out.attention_outputs.merge(out.carry)  # type: ignore
assert_type(dot_product_attention(query, key_, value, is_causal=True), Array)
assert_type(dot_product_attention(query, key_, value, return_residual=True), tuple[Array, Array])
attention(query, key_, value, maks=Causal())  # type: ignore
attention(query, key_, value, inference="no")  # type: ignore
attention(query, key_, value, mask="causal")
attention(query, key_, value, score=jnp.tanh)  # type: ignore
attention(query, key_, value, mask=query[0] > 0, score=[ALiBi.geometric(4)])
dot_product_attention(query, key_, value, scale=jnp.ones(()), local_window_size=(3, jnp.array(0)))
ring_attention(query, key_, value, sliding_window=(3, None))
assert_type(ring_attention_(query, key_, value), Array)
assert_type(PartitionAxis(), PartitionAxis)
assert_type(eqattn.strategies.ring_plan(64, 4), RingPlan)
assert_type(eqattn.masks.packed_segments([0, 3], 3), eqattn.masks.PackedSegments)
packed_segments([0, 3, 8], 8)
dot_product_attention(query, key_, value, implementation="fast")  # type: ignore

# The Carry
carry = Carry.empty((2, 8, 4), 16)
assert_type(carry.merge(carry), Carry)
assert_type(carry.finalise(), tuple[Array, Array])
carry.merge(query)  # type: ignore

# Strategies and metadata
metadata = AttentionMetadata("bfloat16", platform="xla", softmax_scale=0.5)
assert_type(metadata.replace(blocksize_q=128), AttentionMetadata)
assert_type(metadata.platform, Platform)
assert_type(metadata.blocksize_q, int | None)
assert_type(AttentionMetadata.from_json(metadata.to_json()), AttentionMetadata)
AttentionMetadata(block_q=128)  # type: ignore
assert_type(Ulysses(metadata, axis_name="sp").mesh, Any)
strategy = Ring(metadata, layout=Zigzag(), head_axis="heads")
assert_type(strategy.metadata, AttentionMetadata)
assert_type(strategy(query, key_, value, mask=None), AttentionOutput)
assert_type(Zigzag().permute(query, 4), Array)
assert_type(strategy.supports(return_weights=True), Support)
assert_type(strategy.supports().ok, bool)
assert_type(strategy.get_mode(query), RuntimeMode)
assert_type(strategy.forward_cpu(query, key_, value), AttentionOutput)
assert_type(AttentionRegistry.get("ring"), type[AttentionImpl])
assert_type(AttentionRegistry.create("ring", metadata), AttentionImpl)
Blockwise(3)  # type: ignore
Ring(metadata, layout="zigzag")  # type: ignore
AttentionImpl(metadata)  # type: ignore


@AttentionRegistry.register
class Mine(AttentionImpl):
    """Keeps its own type through the decorator."""

    extra: Array

    @classmethod
    def get_impl_name(cls) -> str:
        return "mine"

    def forward_native(
        self, q: Array, k: Array, v: Array, *args: Any, **kw: Any
    ) -> AttentionOutput:
        return AttentionOutput(attention_outputs=self.extra * v)


assert_type(Mine(metadata, query), Mine)
assert_type(Mine(metadata, query).extra, Array)
Mine(metadata)  # type: ignore

# Masks and scores
mask = Causal() & SlidingWindow(3, 0) | ~Causal(offset=2)
assert_type(mask, AbstractMask)
assert_type(mask.as_array(8, 8), Array)
assert_type(mask.sparsity(8, 8), Sparsity)
SlidingWindow()  # type: ignore
AbstractMask()  # type: ignore
ScoreFn(lambda logit, b, h, q, k: logit - 0.1 * jnp.abs(q - k))

# Plans, caches, layers
assert_type(ring_plan(64, 4), RingPlan)
assert_type(ring_plan(64, 4).balance, float)
cache = KVCache.empty(2, 16, 2, 16)
assert_type(cache, KVCache)
assert_type(cache.append(key_, value), KVCache)
layer = MultiheadAttention(4, 64, key=jax.random.key(0))
assert_type(layer(query, query, query), Array)
assert_type(layer(query), Array)
assert_type(layer(query, cache=cache, mask="causal"), tuple[KVCache, Array])
layer(query, append=False)  # type: ignore
layer(query, cache=query)  # type: ignore
assert_type(eqattn.nn.MultiheadAttention(4, 64, key=jax.random.key(0)), MultiheadAttention)
assert_type(
    from_equinox(eqx.nn.MultiheadAttention(4, 64, key=jax.random.key(0))), MultiheadAttention
)
assert_type(from_equinox(eqx.nn.Identity()), eqx.nn.Identity)


# What filters keep
@eqx.filter_jit
def run(strategy: Dense, x: Array) -> AttentionOutput:
    return strategy(x, x, x)


assert_type(run(Dense(metadata), query), AttentionOutput)
run(3, query)  # type: ignore
