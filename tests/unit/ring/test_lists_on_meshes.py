"""Lists of keys beside scores, where tokens are sharded and so are batch elements or heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _draw import normal
from jax.sharding import AxisType

from eqattn import ALiBi, AllGather, attention, AttentionMetadata, Ring, ScoreFn, Selected


B, T, H, K, D = 2, 16, 4, 2, 4
Q, KEYS, VALUES = normal(0, B, T, H, D), normal(1, B, T, K, D), normal(2, B, T, K, D)
LISTS = np.argsort(np.random.default_rng(3).random((B, K, T, T)), -1)[..., :5].astype(np.int32)
SLOPES = jnp.abs(normal(4, H)) + 0.1
DISTANCE = np.abs(np.arange(T)[:, None] - np.arange(T)).astype(np.float32)

# A score of one's own reads its slopes where it closes over them.
SCORES = {
    "alibi": ALiBi,
    "closure": lambda slopes: ScoreFn(
        lambda z, b, h, q, k: z - slopes[h] * abs(q - k).astype(z.dtype)
    ),
}
MESHES = {"dp, sp, tp": (2, 2, 2), "dp, sp": (2, 2), "sp, tp": (2, 2), "sp": (4,)}


def dense(q, k, v, slopes):
    """In plain JAX."""
    k, v = (jnp.repeat(x, H // K, 2) for x in (k, v))
    z = jnp.einsum("bthd,bshd->bhts", q, k) / D**0.5
    z -= jnp.einsum("h,ts->hts", slopes, DISTANCE)[None]
    seen = (LISTS[..., None] == np.arange(T)).any(-2).repeat(H // K, 1)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(seen, z, -jnp.inf)), v)


@pytest.mark.parametrize(
    "strategy, score, mesh, kind",
    [
        (Ring, "closure", "dp, sp, tp", AxisType.Auto),
        (AllGather, "closure", "dp, sp", AxisType.Explicit),
    ],
)
def test_scores_beside_a_list(strategy, score, mesh, kind):
    """The score is traced where the tokens are manual, and again where the other axes are. Its first
    trace had the mesh of the first place.
    """
    names, sizes = mesh.split(", "), MESHES[mesh]
    devices = jax.devices()[: int(np.prod(sizes))]
    over = jax.make_mesh(sizes, names, axis_types=(kind,) * len(names), devices=devices)

    def ours(q, k, v, slopes):
        mask = Selected(jnp.asarray(LISTS))
        out = attention(q, k, v, strategy(), mask=mask, score=SCORES[score](slopes))
        return out.attention_outputs

    def results(fn):
        loss = lambda *xs: jnp.sin(fn(*xs)).sum()
        return jax.jit(lambda *xs: (fn(*xs), jax.grad(loss, (0, 1, 2, 3))(*xs)))

    args = Q, KEYS, VALUES, SLOPES
    with jax.set_mesh(over):
        got = jax.tree.map(np.asarray, results(ours)(*args))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(results(dense)(*args)), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5)


@pytest.mark.parametrize("strategy", [AllGather])
def test_rows_that_pad_a_list_are_not_singular(strategy):
    """A query that stands alone is padded to the rows of a list on each device. So was its soft cap,
    by zeros, and gradients of keys were NaN.
    """
    q, k, v = Q[0, :1], KEYS[0], VALUES[0]
    metadata = AttentionMetadata(logits_soft_cap=2.0)
    mask = Selected(jnp.asarray([[[1]]]), 6, 8)

    def ours(q, k, v):
        return attention(q, k, v, strategy(metadata), mask=mask).attention_outputs

    def plain(q, k, v):
        k, v = (jnp.repeat(x[8:], H // K, 1) for x in (k, v))
        z = 2 * jnp.tanh(jnp.einsum("thd,shd->hts", q, k) / D**0.5 / 2)
        return jnp.einsum("hts,shd->thd", jax.nn.softmax(z), v)

    mesh = jax.make_mesh((2,), ("sp",), (AxisType.Auto,), devices=jax.devices()[:2])
    gradients = lambda fn: jax.jit(jax.grad(lambda *xs: jnp.sin(fn(*xs)).sum(), (0, 1, 2)))
    with jax.set_mesh(mesh):
        got = gradients(ours)(q, k, v)
    for x, y in zip(got, gradients(plain)(q, k, v), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)
