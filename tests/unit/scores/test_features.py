"""Operands with features: a mask or a score may use a second product of each pair."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import (
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    Dense,
    KeyPadding,
    MaskFn,
    Ragged,
    ragged_attention,
    Ring,
    ScoreFn,
    Ulysses,
)
from eqattn.scores import AbstractScore, Operand


B, T, H, K, D, I, F = 2, 12, 4, 2, 8, 3, 5
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape)


class Indexer(AbstractScore):
    """DeepSeek's `sum_i w_i relu(q_i . k)` of a query and a key, added to the logit."""

    query: jax.Array  # [*b, t, I F]
    weights: jax.Array  # [*b, t, I]
    key: jax.Array  # [*b, s, F]

    def operands(self):
        return Operand(self.query, "btf"), Operand(self.weights, "btf"), Operand(self.key, "bsf")

    def transform(self, logit, b, h, q, k, query, weights, key):
        return logit + (weights * jax.nn.relu(query.reshape(I, F) @ key)).sum().astype(logit.dtype)


def as_function(query, weights, key):
    score = Indexer(query, weights, key)
    return ScoreFn(lambda *pair: score.transform(*pair), score.operands())


def near(query, key):
    """A key is visible if the first features of query and key point the same way."""
    return MaskFn(
        lambda b, h, q, k, x, y: (x[:F] @ y > 0) | (k == 0),
        arrays=(Operand(query, "btf"), Operand(key, "bsf")),
    )


def plain(q, k, v, query, weights, key):
    """By whole matrices."""
    logits = jnp.einsum("bthd,bshd->bhts", q, k.repeat(H // K, 2)) * D**-0.5
    products = jnp.einsum("btif,bsf->btsi", query.reshape(B, T, I, F), key)
    logits = logits + (weights[:, :, None] * jax.nn.relu(products)).sum(-1)[:, None]
    seen = (products[..., 0] > 0) | (jnp.arange(T) == 0)[None, None]
    seen = seen & jnp.tri(T, dtype=bool)[None]
    weights = jax.nn.softmax(jnp.where(seen[:, None], logits, -jnp.inf), -1)
    return jnp.einsum("bhts,bshv->bthv", weights, v.repeat(H // K, 2))


ARRAYS = [
    *(normal(B, T, n, D) for n in (H, K, K)),
    *(normal(B, T, I * F), normal(B, T, I), normal(B, T, F)),
]
BLOCKS = AttentionMetadata(runtime_dtype=jnp.float64, blocksize_q=4, blocksize_k=3)
MESH = jax.make_mesh((2,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))


def results(fn):
    """Values, all gradients and a tangent, of one program."""

    @jax.jit
    def run(*xs):
        out, pull = jax.vjp(fn, *xs)
        return out, pull(jnp.cos(out)), jax.jvp(fn, xs, tuple(map(jnp.cos, xs)))[1]

    return run(*ARRAYS)


def assert_equal(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-12)


STRATEGIES = {
    "blockwise": (Blockwise(BLOCKS), Indexer),
    "dense": (Dense(BLOCKS), as_function),
    "ragged": (Ragged(BLOCKS), as_function),
    "ring": (Ring(BLOCKS, axis_name="sp", mesh=MESH), Indexer),
    "ulysses": (Ulysses(BLOCKS, axis_name="sp", mesh=MESH), as_function),
}


@pytest.mark.parametrize("name", ["blockwise"])
def test_a_second_product_in_masks_and_scores(name, x64):
    strategy, kind = STRATEGIES[name]

    def ours(q, k, v, query, weights, key):
        mask, score = Causal() & near(query, key), kind(query, weights, key)
        return attention(q, k, v, strategy, mask=mask, score=score).attention_outputs

    assert_equal(results(ours), results(plain))


@pytest.mark.parametrize("garbage", [np.nan])
def test_what_is_masked_reaches_nothing(garbage, x64):
    """A key that no query sees, one that some see, and a product that is singular where masked."""
    lengths = jnp.array([9, 0])
    mask = Causal() & KeyPadding(lengths)

    def loss(q, k, v, query, weights, key):
        score = ScoreFn(
            lambda logit, b, h, q, k, x, w, y: (
                logit + w.sum() / ((q - k).astype(logit.dtype) + (x[:F] @ y) ** 2 + 1)
            ),
            (Operand(query, "btf"), Operand(weights, "btf"), Operand(key, "bsf")),
        )
        out = attention(q, k, v, Blockwise(BLOCKS), mask=mask, score=score)
        # Of queries that do not see the key that is spoiled.
        return jnp.sin(out.attention_outputs[:, :5]).sum()

    gradient = jax.jit(jax.grad(loss, range(6)))
    clean = gradient(*ARRAYS)
    query = np.stack([ARRAYS[3][0], 0 * ARRAYS[3][1]])  # where nothing is visible
    clean_query = gradient(*ARRAYS[:3], query, *ARRAYS[4:])
    assert all(jnp.isfinite(x).all() for x in clean_query)
    for at in (5, 9):  # seen by later queries, and by none
        key = np.copy(ARRAYS[5])
        key[:, at] = garbage
        got = gradient(*ARRAYS[:5], key)
        for i, (x, y) in enumerate(zip(got, clean, strict=True)):
            if at == 9:
                np.testing.assert_array_equal(x, y)
            elif i in (0, 3, 4):  # of queries
                np.testing.assert_array_equal(x[:, :5], y[:, :5])


Q = jnp.ones((6, 1, 2))


def test_a_product_that_is_singular_where_masked(x64):
    """Row 4 does not see key 5, and their product is 0. Both have visible pairs in their block."""
    query, key = RNG.uniform(0.5, 1.5, (2, T, F))
    query[4], key[5] = np.eye(F)[:2]

    def loss(query, key, power, dense):
        if dense:
            seen = jnp.tri(T, dtype=bool)[None, None]
            k, v = (x.repeat(H // K, 2) for x in ARRAYS[1:3])
            logits = jnp.einsum("bthd,bshd->bhts", ARRAYS[0], k) * D**-0.5
            logits = logits + power * jnp.log(jnp.where(seen, (query @ key.T)[None, None], 1))
            weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), -1)
            return jnp.sin(jnp.einsum("bhts,bshv->bthv", weights, v)).sum()
        operands = Operand(query, "tf"), Operand(key, "sf")
        score = ScoreFn(lambda logit, b, h, q, k, x, y: logit + power * jnp.log(x @ y), operands)
        out = attention(
            *map(jnp.asarray, ARRAYS[:3]), Blockwise(BLOCKS), mask=Causal(), score=score
        )
        return jnp.sin(out.attention_outputs).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=3)
    got, want = (gradient(query, key, 0.7, dense) for dense in (False, True))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12), got, want)


WITH = ScoreFn(lambda logit, b, h, q, k, x: logit + x.sum(), (Operand(jnp.ones((6, 3)), "tf"),))
BAD = {
    "axes": (lambda: Operand(Q, "ft"), "'bhtsf'.*got 'ft'"),
    "tokens": (lambda: attention(Q, Q, Q, score=ScoreFn(lambda x, *_: x, (Operand(jnp.ones((5, 3)), "tf"),))), r"\(5, 3\).*'tf'.*does not broadcast"),
    "no operand": (lambda: MaskFn(lambda b, h, q, k, x: x, arrays=(Q,)), "must be Operands"),
    "a kernel": (lambda: attention(Q, Q, Q, Blockwise(AttentionMetadata(platform="interpret")), mask=MaskFn(lambda b, h, q, k, x: x[0] > 0, arrays=(Operand(jnp.ones((6, 3)), "tf"),))), "an operand of MaskFn has features"),
    "unequal": (lambda: attention(Q, Q, Q, score=ScoreFn(lambda s, b, h, q, k, x, y: s + x @ y, (Operand(jnp.ones((6, 3)), "tf"), Operand(jnp.ones((6, 4)), "sf")))), "3 and 4 features.*as many"),
    "unequal in a mask": (lambda: attention(Q, Q, Q, mask=MaskFn(lambda b, h, q, k, x, y: (x * y).sum() > 0, arrays=(Operand(jnp.ones((6, 3)), "tf"), Operand(jnp.ones((6, 4)), "sf")))), "3 and 4 features.*as many"),
    "packed": (lambda: ragged_attention(Q, Q[None], Q[None], jnp.array([0, 6]), jnp.array([6]), Ragged(), score=WITH), "axes 'tf'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    call, message = BAD[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_supports_says_what_has_no_kernel():
    kernel = Blockwise(AttentionMetadata(platform="pallas", backend="tpu"))
    score = Indexer(jnp.ones((6, I * F)), jnp.ones((6, I)), jnp.ones((6, F)))
    assert "Indexer has features" in kernel.supports(score=score).reason
    assert Blockwise().supports(score=score)
