"""Scores that are singular at masked pairs: their derivatives there reach no gradient."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import attention, AttentionMetadata, AttentionRegistry, KeyPadding, MaskFn
from eqattn.scores import AbstractScore, ScoreFn


class LogDistance(AbstractScore):
    """Singular where `k >= q`."""

    strength: jax.Array

    def transform(self, logit, b, h, q, k):
        distance = (q - k).astype(logit.dtype)
        return logit - self.strength * jnp.log(distance) + jnp.sqrt(distance) ** -1.5


def log_distance(strength):
    return ScoreFn(lambda *pair: LogDistance(strength).transform(*pair))


# `(block, T, lengths)`: batch elements that see nothing, in one block, in whole blocks and in rows
# of partial ones; lengths that pad the last block.
UNSEEN = [(None, 7, (0, 7)), (4, 8, (0, 6)), (4, 11, (3, 0)), (3, 11, (0, 0))]
PLACES = [("dense", 1), ("ragged", 1), ("ring", 2), ("ulysses", 2)]
KINDS = (log_distance, LogDistance)


def crossed(shift):
    """Each size and each strategy, with kinds in turn."""
    kinds = [(i + shift) % 2 for i in range(4)]
    for sizes, j in zip(UNSEEN, kinds):
        yield *sizes, KINDS[j], ("blockwise", 1)
    for i, (place, j) in enumerate(zip(PLACES, kinds)):
        yield *UNSEEN[(i + j) % 4], KINDS[j], place


CASES = [*crossed(0), *crossed(1), *[(*sizes, LogDistance, ("tpu", 1)) for sizes in UNSEEN[:3]]]


# A batch element of a padded block that sees nothing.
@pytest.mark.parametrize("block, t, lengths, kind, place", [CASES[2]])
def test_a_score_may_be_singular_where_nothing_is_visible(block, t, lengths, kind, place, request):
    """A row that sees no key, or a whole batch element, has no visible pair to lend its arguments.
    Gradients in both modes are those of the plain softmax over what is visible, in all strategies.
    """
    (name, devices), kernel = place, place[0] == "tpu"
    if not kernel:
        request.getfixturevalue("x64")
    t += t % devices
    rng = np.random.default_rng(0)
    dtype = np.float32 if kernel else np.float64
    shapes = (2, t, 2, 4), (2, t, 1, 4), (2, t, 1, 4)
    q, k, v = (jnp.asarray(rng.standard_normal(x), dtype) for x in shapes)
    ct = jnp.asarray(rng.standard_normal((2, t, 2, 4)), dtype)
    strength = jnp.asarray(0.7, dtype)
    metadata = AttentionMetadata(
        runtime_dtype=dtype,
        blocksize_q=block,
        blocksize_k=block,
        platform="interpret" if kernel else "auto",
    )
    impl = AttentionRegistry.create("blockwise" if kernel else name, metadata)
    ends = jnp.asarray(lengths, jnp.int32)
    mask = KeyPadding(ends) & MaskFn(lambda b, h, i, j: j < i)

    def ours(q, k, v, strength):
        return attention(q, k, v, impl, mask=mask, score=kind(strength)).attention_outputs

    def plain(q, k, v, strength):
        i, j = np.arange(t)[:, None], np.arange(t)[None, None, None]
        seen = (j < i) & (j < np.asarray(lengths)[:, None, None, None])
        distance = np.maximum(i - j, 1).astype(dtype)
        z = jnp.einsum("bthd,bsd->bhts", q, k[:, :, 0], precision="highest") / 2
        z = z - strength * np.log(distance) + distance ** np.asarray(-0.75, dtype)
        p = jnp.where(seen, jnp.exp(z), 0)
        p = p / jnp.where(seen.any(-1, keepdims=True), p.sum(-1, keepdims=True), 1)
        return jnp.einsum("bhts,bsd->bthd", p, v[:, :, 0], precision="highest")

    def everything(f):
        def loss(*xs):
            return jnp.sum(f(*xs) * ct)

        def run(*xs):
            gradient = jax.grad(loss, (0, 1, 2, 3))
            moved = tuple(jnp.cos(x) for x in xs)
            second = None if kernel else jax.jvp(gradient, xs, moved)
            return jax.value_and_grad(loss, (0, 1, 2, 3))(*xs), jax.jvp(f, xs, moved), second

        return jax.jit(run)

    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("sp",), auto, devices=jax.devices()[:devices])
    with jax.set_mesh(mesh) if devices > 1 else contextlib.nullcontext():
        actual = everything(ours)(q, k, v, strength)
    expected = everything(plain)(q, k, v, strength)
    for x, y in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 if kernel else 1e-13)
