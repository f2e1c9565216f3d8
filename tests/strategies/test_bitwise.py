"""`Ragged(metadata, bitwise=True)`: the bits of a row depend on nothing but the row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, HealthCheck, settings, strategies as st

from eqattn import attention, AttentionMetadata, Blockwise, Causal, KeyPadding, Ragged, Ring
from eqattn.cache import Pages


H, K, D, S, T, BLOCK = 4, 2, 16, 24, 20, 8
STRICT = Ragged(AttentionMetadata(blocksize_q=BLOCK, blocksize_k=BLOCK), bitwise=True)


@jax.jit
def run(q, k, v, offset, lengths):
    mask = Causal() & KeyPadding(lengths)
    out = attention(q, k, v, STRICT, mask=mask, q_offset=offset, return_logsumexp=True)
    return out.attention_outputs, out.logsumexp


def same(found, want, where):
    for x, y in zip(found, want, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.shape == y.shape and x.tobytes() == y.tobytes(), where


def check(seed, row, offset, dtype):
    """One row of queries and keys, in all arrangements."""
    rng = np.random.default_rng(seed)
    new = lambda *shape: jnp.asarray(rng.normal(size=shape) * 10.0 ** rng.uniform(-2, 2), dtype)
    q, k, v = new(1, T, H, D), new(1, S, K, D), new(1, S, K, D)
    length, at = jnp.array([min(offset + T, S)]), jnp.array([offset])
    want = run(q, k, v, at, length)
    # batch: beside other rows, at any place, of other lengths.
    others = [x.at[row].set(y[0]) for x, y in ((new(3, *z.shape[1:]), z) for z in (q, k, v))]
    put = lambda x, y: jnp.asarray(rng.integers(0, S, 3), jnp.int32).at[row].set(x[0])
    found = run(*others, put(at, S), put(length, S))
    same([x[row : row + 1] for x in found], want, "batch")
    # capacity: a larger cache, which holds anything.
    more = [jnp.concatenate([x, new(1, 41, K, D)], 1) for x in (k, v)]
    same(run(q, *more, at, length), want, "capacity")
    # layout: pages in any order.
    table = jnp.asarray(rng.permutation(5)[: S // BLOCK][None], jnp.int32)
    pool = lambda x: new(5, BLOCK, K, D).at[table[0]].set(x.reshape(-1, BLOCK, K, D))
    same(run(q, Pages(pool(k), table), Pages(pool(v), table), at, length), want, "layout")
    # chunks, of which no boundary is that of a block; then a single token, and padded queries.
    cut = lambda a, b: run(q[:, a:b], k, v, at + a, length)
    joined = [jnp.concatenate(x, 1) for x in zip(cut(0, 7), cut(7, T))]
    same(joined, want, "chunks")
    for i in (0, 11, T - 1):
        same(cut(i, i + 1), [x[:, i : i + 1] for x in want], "decode")
    wide = jnp.concatenate([q, new(1, 6, H, D)], 1)
    same([x[:, :T] for x in run(wide, k, v, at, length)], want, "padding")


cases = given(st.integers(0, 2**32), st.integers(0, 2), st.integers(0, 4))
options = dict(deadline=None, suppress_health_check=list(HealthCheck))


@settings(max_examples=15, **options)
@cases
def test_the_bits_of_a_row(seed, row, offset):
    check(seed, row, offset, jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bits_of_many_rows(dtype):
    def one(seed, row, offset):
        check(seed, row, offset, jnp.dtype(dtype))

    settings(max_examples=2000, **options)(cases(one))()


def test_who_promises_what():
    for kind in ("batch", "capacity", "chunks", "decode", "layout", True):
        assert STRICT.supports(bitwise=kind).ok
        for strategy in (Ragged(), Blockwise(), Ring()):
            assert "Ragged(metadata, bitwise=True)" in strategy.supports(bitwise=kind).reason
    with pytest.raises(ValueError, match="bitwise must be one of"):
        Ragged().supports(bitwise="device")
    with pytest.raises(ValueError, match="axis_name='keys'.*one device"):
        Ragged(AttentionMetadata(), axis_name="keys", bitwise=True)
    with pytest.raises(ValueError, match="platform='pallas'.*'xla'"):
        Ragged(AttentionMetadata(platform="pallas"), bitwise=True)
