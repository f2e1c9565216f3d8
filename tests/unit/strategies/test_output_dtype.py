"""The output has the query's dtype, unless the metadata names another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import attention, AttentionMetadata, AttentionRegistry, Blockwise


NAMES = ("blockwise", "dense", "ragged", "ring", "ulysses", "all_gather")
DTYPES = ("bfloat16", "float16", "float32", "float64")


def inputs(dtype):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(5, 2, 4)), dtype) for _ in range(3)]


# tests/nightly/strategies has every pair of these.
@pytest.mark.parametrize("name, dtype", list(zip(NAMES, DTYPES + DTYPES[:2])))
def test_the_query_decides_and_a_runtime_dtype_overrules_it(name, dtype, x64):
    q, k, v = inputs(dtype)
    cls = AttentionRegistry.get(name)
    plain = attention(q, k, v).attention_outputs
    assert plain.dtype == dtype
    for strategy in (cls(), cls(AttentionMetadata()), AttentionRegistry.create(name)):
        out = jax.jit(lambda s, *qkv: attention(*qkv, s))(strategy, q, k, v).attention_outputs
        assert out.dtype == dtype
        np.testing.assert_allclose(
            out.astype(float), plain.astype(float), rtol=0, atol=2 * jnp.finfo(dtype).eps
        )
    scaled = cls(AttentionMetadata(softmax_scale=0.3))
    assert attention(q, k, v, scaled).attention_outputs.dtype == dtype
    for other in DTYPES:
        strategy = cls(AttentionMetadata(runtime_dtype=other))
        assert attention(q, k, v, strategy).attention_outputs.dtype == other
        assert strategy.output_dtype(q) == other and cls().output_dtype(q) == dtype


def test_weights_have_it_and_sums_do_not():
    q, k, v = inputs("bfloat16")
    dense = AttentionRegistry.create("dense")
    out = attention(q, k, v, dense, return_weights=True, return_logsumexp=True, return_carry=True)
    assert out.attention_weights.dtype == jnp.bfloat16 and out.logsumexp.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(out.carry)} == {jnp.dtype("float32")}


def test_old_metadata_keep_their_dtype():
    """What was written while float32 was the default names it."""
    old = dict(AttentionMetadata().to_dict(), runtime_dtype="float32")
    q, k, v = inputs("bfloat16")
    strategy = Blockwise(AttentionMetadata.from_dict(old))
    assert attention(q, k, v, strategy).attention_outputs.dtype == jnp.float32
    new = AttentionMetadata.from_dict({**old, "runtime_dtype": None})
    assert new == AttentionMetadata() == AttentionMetadata.from_json(new.to_json())
