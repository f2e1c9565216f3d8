"""Statistics and lists of keys where tokens, batch and heads are sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from matrix.oracle import exact

from eqattn import (
    AllGather,
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    Dense,
    Ragged,
    Ring,
    stats,
    top_keys,
    Ulysses,
)
from eqattn.cache import QuantizedKVCache


RNG = np.random.default_rng(0)
B, T, H, K, D = 2, 8, 4, 2, 4
QUERY, KEY = (jnp.asarray(RNG.normal(size=(B, T, h, D)), jnp.float32) for h in (H, K))
P_IJ = exact(QUERY, KEY, KEY, visible=np.tri(T, dtype=bool))[2]
MASS = P_IJ.sum(2).swapaxes(1, 2)


def mesh_of(kind, **sizes):
    n = int(np.prod(list(sizes.values())))
    kinds = (kind,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), kinds, devices=jax.devices()[:n])


@pytest.mark.parametrize("cls", [Ring])
def test_mass_of_the_keys_of_each_device(cls):
    """In a `jax.shard_map` of one's own, a device has some of the keys, and gets their mass: not
    the sum over devices of what they have at the same place.
    """
    rows = P() if cls is Ragged else P(None, "sp")
    strategy = cls(AttentionMetadata(), axis_name="sp")

    def own(query, key):
        return stats.mass(query, key, strategy, mask=Causal())

    spread = dict(mesh=mesh_of(AxisType.Auto, sp=2), in_specs=(rows, P(None, "sp")))
    found = jax.jit(jax.shard_map(own, out_specs=P(None, "sp"), **spread))(QUERY, KEY)
    np.testing.assert_allclose(found, MASS, atol=1e-5)


def test_mass_of_stored_keys_of_each_device():
    """Also of keys of eight bits, which are no array; where JAX does not know what varies, it
    raises.
    """
    mesh = mesh_of(AxisType.Auto, sp=2)
    cache = QuantizedKVCache.empty(B, T, K, D).append(KEY, KEY)
    specs = jax.tree.map(lambda x: x.spec, cache.key_shardings(mesh, "sp"))
    strategy = Ragged(AttentionMetadata(), axis_name="sp")

    def own(query, cache):
        return stats.mass(query, cache.key, strategy, mask=Causal())

    def mapped(**kw):
        spread = dict(mesh=mesh, in_specs=(P(), specs), out_specs=P(None, "sp"))
        return jax.shard_map(own, **spread, **kw)

    found = jax.jit(mapped())(QUERY, cache)
    held = cache.key.materialise()
    want = exact(QUERY, held, held, visible=np.tri(T, dtype=bool))[2].sum(2).swapaxes(1, 2)
    np.testing.assert_allclose(found, want, atol=1e-5)
    with pytest.raises(ValueError, match="'sp' needs a jax.shard_map with check_vma=True"):
        jax.eval_shape(mapped(check_vma=False), QUERY, cache)


@pytest.mark.parametrize("cls", [Blockwise, Ragged, Dense])
def test_results_lie_as_the_arrays_on_explicit_meshes(cls):
    mesh = mesh_of(AxisType.Explicit, dp=2, tp=2)
    with jax.set_mesh(mesh):
        place = lambda x: jax.device_put(x, NamedSharding(mesh, P("dp", None, "tp")))
        query, key = place(QUERY), place(KEY)

        def fn(query):
            top = top_keys(query, key, 2, cls(), mask=Causal())
            return top, stats.mass(query, key, cls(), mask=Causal())

        def gradient(query):
            return jax.grad(lambda q: jnp.sum(jax.nn.sigmoid(fn(q)[0].values)))(query)

        top, mass = jax.eval_shape(fn, query)
        assert top.values.sharding.spec == top.indices.sharding.spec == P("dp", "tp", None, None)
        assert mass.sharding.spec == P("dp", None, "tp")
        assert jax.eval_shape(gradient, query).sharding.spec == P("dp", None, "tp", None)
        if cls is Blockwise:
            top, mass = jax.jit(fn)(query)
            np.testing.assert_allclose(mass, MASS, atol=1e-5)
            best = np.argsort(-P_IJ, -1)[..., :2]
            np.testing.assert_array_equal(top.indices[:, :, 1:], best[:, :, 1:])


def test_a_known_logsumexp_on_an_explicit_mesh():
    mesh, options = mesh_of(AxisType.Explicit, dp=2, tp=2), dict(mask=Causal())
    logsumexp = attention(QUERY, KEY, KEY, **options, return_logsumexp=True).logsumexp
    with jax.set_mesh(mesh):
        place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
        query, key = (place(x, "dp", None, "tp") for x in (QUERY, KEY))
        known = place(logsumexp, "dp", None, "tp")
        mass = jax.jit(lambda *x: stats.mass(*x[:2], logsumexp=x[2], **options))(query, key, known)
    np.testing.assert_allclose(mass, MASS, atol=1e-5)
    assert mass.sharding.spec == P("dp", None, "tp")


@pytest.mark.parametrize("cls", [Ring, AllGather, Ulysses])
def test_few_queries_on_explicit_meshes(cls):
    """Three, which four devices cannot share."""
    with jax.set_mesh(mesh_of(AxisType.Explicit, sp=4)):
        query, key = jnp.zeros((B, 3, H, D)), jnp.zeros((B, T, K, D))
        top = jax.eval_shape(lambda: top_keys(query, key, 2, cls(), mask=Causal()))
        assert top.values.shape == (B, H, 3, 2)
