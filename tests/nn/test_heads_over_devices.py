"""Layers whose heads devices share: weights are sharded over outputs, and the last over inputs."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from eqattn.nn import MultiheadAttention, Rotary


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("norm", [None, "rms", "layer"])
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
