"""A prompt that a ring has attended to is decoded from where its keys and values lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _moved import moved
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from eqattn import attention, AttentionMetadata, Causal, Ragged, Ring, Zigzag
from eqattn.cache import KVCache


B, T, NEW, H, K, D, N = 2, 32, 5, 4, 2, 8, 4
METADATA = AttentionMetadata(blocksize_q=4, blocksize_k=4)


@pytest.mark.parametrize("layout", [Zigzag()])
def test_keys_and_values_stay(layout):
    rng = np.random.default_rng(0)
    draw = lambda heads: rng.standard_normal((B, T + NEW, heads, D)).astype(np.float32)
    q, k, v = draw(H), draw(K), draw(K)
    mesh = jax.make_mesh((N,), ("sp",), (AxisType.Auto,), devices=jax.devices()[:N])
    ring, tail = Ring(METADATA, layout=layout), Ragged(METADATA)
    spread = Ragged(METADATA, axis_name="sp")
    positions = jnp.asarray(layout.positions(T, N).reshape(-1))

    def prefill(q, k, v):
        return attention(q, k, v, ring, mask=Causal()).attention_outputs

    def step(cache, prompt, q, k, v):
        """One token: attention over the prompt, wherever it lies, and over what came after it."""
        at, mask = T + cache.length, Causal()
        before = attention(
            q, *prompt, spread, q_offset=at, kv_positions=positions, return_carry=True
        ).carry
        cache = cache.append(k, v)
        mask = Causal() & cache.mask()
        after = attention(
            q, cache.key, cache.value, tail, mask=mask, q_offset=at - T, return_carry=True
        ).carry
        return cache, before.merge(after).output()

    placed = [
        jax.device_put(layout.permute(x[:, :T], N), NamedSharding(mesh, P(None, "sp")))
        for x in (q, k, v)
    ]
    with jax.set_mesh(mesh):
        program = jax.jit(prefill).lower(*placed).compile()
        assert moved(program)[0] == {"collective-permute"}
        outs = [layout.unpermute(np.asarray(program(*placed)), N)]
        cache = KVCache.empty(B, 8, K, D)
        run = jax.jit(step)
        for i in range(T, T + NEW):
            new = [jnp.asarray(x[:, i : i + 1]) for x in (q, k, v)]
            cache, out = run(cache, placed[1:], *new)
            outs.append(np.asarray(out))
        names, sent = moved(run.lower(cache, placed[1:], *new).compile())
    # The numerator, the denominator and the maximum of each query's row, and nothing else.
    assert names == {"all-reduce"} and sent <= 1.05 * B * H * (D + 2) * 4
    want = attention(*map(jnp.asarray, (q, k, v)), mask=Causal()).attention_outputs
    np.testing.assert_allclose(np.concatenate(outs, 1), want, rtol=0, atol=2e-6)
