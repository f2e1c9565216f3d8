"""Trees in kernels, over devices and under dropout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_trees as unit
from test_trees import given, METADATA, N, PARENTS, path, reference, SLOPES, START, T

from eqattn import (
    ALiBi,
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    dropout_mask,
    Ragged,
    ragged_attention,
    Ring,
    SlidingWindow,
    Tree,
    Ulysses,
    Zigzag,
)


def test_one_batch_of_different_trees():
    """Per batch element, mapped, and in `ragged_attention`, whose blocks are of one row each."""
    arrays = jnp.concatenate([given(), given()[:, :, ::-1]], 1)
    parents = np.stack([PARENTS, np.arange(-1, N - 1)])
    start = np.array([START, START])
    score = ALiBi(jnp.asarray(SLOPES, jnp.float32))

    @jax.jit
    def run(parents, start, q, k, v):
        window = SlidingWindow(3, 0)
        one = lambda p, n, q, k, v: attention(q, k, v, mask=Tree(p, n) & window, score=score)
        mapped = jax.vmap(lambda *xs: one(*xs).attention_outputs)(parents, start, q, k, v)
        batch = one(parents, start, q, k, v).attention_outputs
        packed = q[:, START:].reshape(2 * N, 2, 4)
        shared = [window & Tree(parents, start), Tree(parents[0], START) & window]
        ends = jnp.array([0, N, 2 * N]), jnp.array([T, T])
        ragged = [
            ragged_attention(packed, k, v, *ends, Ragged(METADATA), mask=m, block_q=4, score=score)
            for m in shared
        ]
        return batch, mapped, [x.attention_outputs.reshape(2, N, 2, 4) for x in ragged]

    batch, mapped, (ragged, shared) = run(parents, start, *arrays)
    want = reference("alibi")["out"][0]
    np.testing.assert_allclose(batch[0], want, rtol=0, atol=2e-6)
    line = attention(*arrays[:, 1:], mask=Causal() & SlidingWindow(3, 0), score=score)
    np.testing.assert_allclose(batch[1], line.attention_outputs[0], rtol=0, atol=2e-6)
    np.testing.assert_allclose(mapped, batch, rtol=0, atol=1e-6)
    np.testing.assert_allclose(ragged, batch[:, START:], rtol=0, atol=1e-6)
    np.testing.assert_allclose(shared[0], want[START:], rtol=0, atol=2e-6)


def test_dropout_of_a_path_is_that_of_the_path_alone():
    metadata = AttentionMetadata(dropout_prob=0.5)
    key, token = jax.random.key(3), START + 9
    row = np.array(path(token))
    q, k, v = given()
    whole = attention(q, k, v, Blockwise(metadata), mask=Tree(PARENTS, START), key=key)
    line = attention(q[:, row], k[:, row], v[:, row], Blockwise(metadata), mask=Causal(), key=key)
    got, want = whole.attention_outputs[0, token], line.attention_outputs[0, -1]
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)
    keep = dropout_mask(key, (1,), 2, len(row), len(row), 0.5)[0, :, -1]
    assert 0 < keep.sum() < keep.size


def test_a_tree_over_devices():
    """In a ring in zigzag, with heads exchanged, and inside of one's own `shard_map`."""
    mesh = jax.make_mesh((2,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(None, "sp")
    arrays, want = given(), reference("alibi")["out"]
    layout = Zigzag()
    at = np.asarray(layout.tokens(T, 2))[0]

    def call(strategy):
        def run(q, k, v):
            mask = Tree(PARENTS, START) & SlidingWindow(3, 0)
            score = ALiBi(jnp.asarray(SLOPES, jnp.float32))
            return attention(q, k, v, strategy, mask=mask, score=score).attention_outputs

        return run

    whole = Ring(AttentionMetadata(mesh=mesh), axis_name="sp", layout=layout)
    got = jax.jit(call(whole))(*arrays[:, :, at])
    np.testing.assert_allclose(got, want[:, at], rtol=0, atol=2e-6)
    inside = jax.shard_map(
        call(Ulysses(axis_name="sp")), mesh=mesh, in_specs=(spec,) * 3, out_specs=spec
    )
    np.testing.assert_allclose(jax.jit(inside)(*arrays), want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", unit.STRATEGIES)
def test_values_and_gradients_of_each_path(name):
    unit.test_values_and_gradients_of_each_path(name)
