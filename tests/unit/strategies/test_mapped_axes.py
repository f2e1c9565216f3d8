"""`jax.vmap` over a batch that explicit axes of a mesh shard: the types inside hide these axes, and
no `shard_map` there may name them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from matrix import oracle

from eqattn import AllGather, attention, AttentionMetadata, Blockwise, Causal, Selected, top_keys


B, T, H, D = 4, 8, 2, 4
BLOCKS = AttentionMetadata(blocksize_q=4, blocksize_k=4)


@pytest.fixture
def mesh():
    kinds = (AxisType.Explicit,) * 2
    found = jax.make_mesh((2, 2), ("dp", "sp"), kinds, devices=jax.devices()[:4])
    with jax.set_mesh(found):
        yield found


def drawn(mesh, spec):
    """Query, key and value, and the same on the mesh."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((B, T, H, D)) for _ in range(3)]
    return arrays, [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]


CASES = {
    "bitwise": (Blockwise(BLOCKS, bitwise=True), False),
    "all_gather": (AllGather(BLOCKS), False),
    "all_gather bitwise": (AllGather(BLOCKS, bitwise=True), False),
    "list": (Blockwise(BLOCKS), True),
}


@pytest.mark.parametrize("spec", [P("dp")], ids=["batch"])
@pytest.mark.parametrize("name", ["bitwise", "list"])
def test_what_makes_axes_manual_is_mapped(name, spec, mesh, x64):
    strategy, listed = CASES[name]
    arrays, placed = drawn(mesh, spec)
    lists = np.random.default_rng(1).integers(-1, T, (1, T, 3)).astype(np.int32)
    mask = Causal() & Selected(jnp.asarray(lists)) if listed else Causal()

    @jax.jit
    @jax.vmap
    def gradient(*xs):
        call = lambda *xs: attention(*xs, strategy, mask=mask).attention_outputs
        out, pull = jax.vjp(call, *xs)
        return out, pull(out)

    visible = np.tri(T, dtype=bool)
    if listed:
        visible = visible & (lists[..., None] == np.arange(T)).any(-2)
    problem = oracle.plain_problem(*arrays, visible=visible)
    want = oracle.forward(problem)
    grads = oracle.vjp(problem, want.out, np.zeros_like(want.lse))
    out, found = gradient(*placed)
    for got, exact in zip((out, *found), (want.out, *[grads[x] for x in "qkv"])):
        np.testing.assert_allclose(got, exact, rtol=0, atol=1e-13 * max(1, abs(exact).max()))


def test_keys_are_ranked_under_it(mesh, x64):
    (query, key_, _), (q, k, _) = drawn(mesh, P("dp"))
    rank = lambda q, k: top_keys(q, k, 3, Blockwise(BLOCKS), mask=Causal()).values
    logits = np.einsum("bthd,bshd->bths", query, key_) * D**-0.5
    logits = np.where(np.tri(T, dtype=bool)[:, None], logits, -np.inf)
    want = -np.sort(-logits, axis=-1)[..., :3].swapaxes(1, 2)
    np.testing.assert_allclose(jax.jit(jax.vmap(rank))(q, k), want, rtol=0, atol=1e-13)
