"""Layers whose heads devices share: weights are sharded over outputs, and the last over inputs."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from eqattn.nn import LatentAttention, MultiheadAttention, Rotary


@pytest.mark.parametrize(
    "kind, norm", [(AxisType.Auto, None), (AxisType.Explicit, "rms"), (AxisType.Explicit, "layer")]
)
def test_heads_over_devices(kind, norm):
    layer = MultiheadAttention(
        4, 32, num_kv_heads=2, rotary=Rotary(), qk_norm=norm, key=jax.random.key(0)
    )
    x = jax.random.normal(jax.random.key(1), (4, 8, 32))

    def loss(layer, x):
        out = jax.vmap(lambda x: layer(x, mask="causal"))(x)
        return (out**2).sum(), out

    run = eqx.filter_jit(eqx.filter_grad(loss, has_aux=True))
    want = run(layer, x)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), (kind, kind), devices=jax.devices()[:4])
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    split = lambda l: (l.query_proj.weight, l.key_proj.weight, l.value_proj.weight)
    with jax.set_mesh(mesh):
        sharded = jax.tree.map(lambda a: put(a) if eqx.is_array(a) else a, layer)
        sharded = eqx.tree_at(split, sharded, replace_fn=lambda w: put(w, "tp"))
        last = lambda l: l.output_proj.weight
        sharded = eqx.tree_at(last, sharded, replace_fn=lambda w: put(w, None, "tp"))
        got = run(sharded, put(x, "dp"))
    assert got[1].sharding.is_equivalent_to(NamedSharding(mesh, P("dp")), 3)
    for a, b in zip(*(jax.tree.leaves(eqx.filter(t, eqx.is_array)) for t in (got, want))):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_latents_of_heads_over_explicit_axes(form):
    """All heads share the rotary part of their keys, which no axis of the mesh shards."""
    sizes = dict(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)
    layer = LatentAttention(4, 16, **sizes, rotary=Rotary(), key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (8, 16))
    run = eqx.filter_jit(eqx.filter_grad(lambda l, x: (l(x, "causal", form=form) ** 2).sum()))
    want = run(layer, x)
    mesh = jax.make_mesh((2,), ("tp",), (AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        of_heads = lambda l: [y.weight for y in (l.q_proj, l.k_b_proj, l.v_b_proj)]
        put = lambda w, *spec: jax.device_put(w, NamedSharding(mesh, P(*spec)))
        sharded = eqx.tree_at(of_heads, layer, replace_fn=lambda w: put(w, "tp"))
        last = lambda l: l.o_proj.weight
        sharded = eqx.tree_at(last, sharded, replace_fn=lambda w: put(w, None, "tp"))
        got = run(sharded, x)
    for a, b in zip(*(jax.tree.leaves(eqx.filter(t, eqx.is_array)) for t in (got, want))):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * float(jnp.abs(b).max()))
