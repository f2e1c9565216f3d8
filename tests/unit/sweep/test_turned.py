"""Logits that loops compute as `[rows, keys]`, of functions that are written for `[keys, rows]`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import attention, AttentionMetadata, Blockwise, Causal, ScoreFn
from eqattn._sweep.nonfinite import masked_dot
from eqattn._sweep.products import dot
from eqattn._sweep.steps import evaluate_transposed


KEYS, ROWS, FEATURES = 6, 4, 3


def _plain(q, k, of_rows, of_keys, pairs):
    return [dot(k, q, (1, 0)) + of_rows * of_keys - pairs]


def _masked(q, k, of_rows, of_keys, pairs):
    s = masked_dot(k, q, ())
    visible = of_keys.reshape(-1)[:, None] <= of_rows.reshape(-1)[None]
    return [jnp.where(visible, s, -jnp.inf), jnp.where(pairs > 0, 2.0, 0.0)]


def _of_other_operations(q, k, of_rows, of_keys, pairs):
    s = jnp.cumsum(dot(k, q, (1, 0)), 0) + jax.jit(lambda x: x[::-1] * 2)(pairs)
    return [jax.nn.relu(s) + jnp.sort(of_rows, 1)]


@pytest.mark.parametrize("fn", [_plain, _masked, _of_other_operations])
def test_a_transposed_function_returns_transposed_results(fn):
    shapes = (FEATURES, ROWS), (KEYS, FEATURES), (1, ROWS), (KEYS, 1), (KEYS, ROWS)
    rng = np.random.default_rng(0)
    q, *others = (jnp.asarray(rng.standard_normal(n, dtype=np.float32)) for n in shapes)
    closed = jax.make_jaxpr(fn)(q, *others)
    for x, y in zip(evaluate_transposed(closed, [q.T, *others]), fn(q, *others), strict=True):
        np.testing.assert_allclose(x, y.T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "t, s, transposed",
    [
        pytest.param(96, 120, False, id="one block"),
        pytest.param(1024, 512, True, id="read where it lies"),
        pytest.param(1000, 500, False, id="copied as padded blocks"),
    ],
)
def test_a_copied_bias_of_all_pairs_is_not_transposed_in_each_block(t, s, transposed):
    """Its blocks would be. So a program with such a bias computes logits as `[keys, rows]`, and
    another as `[rows, keys]`. In blocks of a row and a column of known sizes, these are the shapes
    of their products.
    """
    q, k = jnp.ones((1, t, 1, 8)), jnp.ones((1, s, 1, 8))
    scaled = ScoreFn(lambda s, b, h, i, j: s * 2)
    rows, keys = (96, 120) if t == 96 else (128, 256)
    metadata = AttentionMetadata(blocksize_q=rows, blocksize_k=keys)
    run = lambda q, k, bias: attention(
        q, k, k, Blockwise(metadata), mask=Causal(), bias=bias, score=scaled
    )
    text = lambda bias: jax.jit(lambda *x: run(*x).attention_outputs).lower(q, k, bias).as_text()
    products = lambda bias: "".join(x for x in text(bias).splitlines() if "dot_general" in x)
    by_rows, by_keys = f"{rows}x{keys}xf32", f"{keys}x{rows}xf32"
    assert by_rows in products(None) and by_keys not in products(None)
    found = products(jnp.ones((t, s)))
    assert (by_keys in found) == (not transposed) and (by_rows in found or not transposed)


def _logits_of(fn, *args, shape):
    """Whether a program has a product of this shape."""
    lines = jax.jit(fn).lower(*args).as_text().splitlines()
    return any(f"x{shape}xf32>" in x.partition("->")[2] for x in lines if "dot_general" in x)


@pytest.mark.parametrize("mask", [None, Causal()])
def test_many_short_sequences_fold_as_rows_and_keys(mask):
    """Without the loop over batch elements, too. A derivative computes `[keys, rows]` in both of
    its passes, and XLA computes the logits once.
    """
    t, s = 24, 40
    q, k = jnp.ones((32, t, 2, 8)), jnp.ones((32, s, 2, 8))
    run = lambda q, k: attention(q, k, k, Blockwise(), mask=mask).attention_outputs
    assert _logits_of(run, q, k, shape="24x40") and not _logits_of(run, q, k, shape="40x24")
    grad = jax.grad(lambda q, k: run(q, k).sum())
    assert _logits_of(grad, q, k, shape="40x24") and not _logits_of(grad, q, k, shape="24x40")
