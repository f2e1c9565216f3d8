"""Strategies with `bitwise=True`: the bits of a row depend on nothing but the row."""

import _bits as bits
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, HealthCheck, settings, strategies as st
from jax.sharding import AxisType

from eqattn import (
    AllGather,
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    KeyPadding,
    Ragged,
    Ring,
    Selected,
    SlidingWindow,
    Zigzag,
)


H, K, D, BLOCK = 4, 2, 16, 8
METADATA = AttentionMetadata(blocksize_q=BLOCK, blocksize_k=BLOCK)
KERNELS = METADATA.replace(platform="interpret")
STRICT = {cls.__name__: cls(METADATA, bitwise=True) for cls in (Blockwise, Ragged)}
# Of the blocks that a block of queries sees, the first and the last are partial, others may be full.
MASK = Causal() & SlidingWindow(29, 0, sinks=1)


def many(count, case, name, gradients, dtype, kinds=bits.ALL):
    """So many cases of hypothesis, each of all rows of the case in all arrangements."""

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2**32))
    def one(seed):
        bits.check(bits.CASES[case], name, gradients, jnp.dtype(dtype), seed, kinds)

    one()


def test_the_bits_of_a_row():
    """One arrangement at a time, to say which it is that changes bits."""
    many(15, "window", "Ragged", False, "float32", bits.KINDS)


def test_steps_in_kernels_keep_the_size_of_a_block():
    """A block of one query, with one head for each key head, has products of a vector, which are
    rounded otherwise.
    """
    (q, k, v), _ = random_call(0, jnp.float32)
    q = q[:, :, :K]
    strict = Blockwise(KERNELS, bitwise=True)

    @jax.jit
    def run(q, start):
        out = attention(q, k, v, strict, mask=MASK, q_offset=start, return_logsumexp=True)
        return out.attention_outputs, out.logsumexp

    whole = run(q, 0)
    for i in range(30, 64, 3):
        for x, y in zip(run(q[:, i : i + 1], i), whole):
            assert np.asarray(x[:, 0]).tobytes() == np.asarray(y[:, i]).tobytes(), i


def test_the_bits_of_a_row_whose_keys_are_dropped():
    """With this seed, a row was -0 in a call of twelve queries, and +0 in one of six."""
    bits.check(bits.CASES["dropout"], "Blockwise", False, jnp.dtype("float32"), 41, ("chunks",))


@pytest.mark.parametrize("cls", [Blockwise, Ragged])
def test_no_zero_has_a_sign(cls):
    """A sum that is too small for a number is zero, of either sign, where small ones are flushed."""
    v = jnp.zeros((1, 16, K, 4)).at[:, 0].set(1.2e-38).at[:, 8].set(-1.3e-38)
    q, k = jnp.zeros((1, 3, H, D)), jnp.zeros((1, 16, K, D))
    out = np.asarray(attention(q, k, v, STRICT[cls.__name__]).attention_outputs)
    assert not np.signbit(out[out == 0]).any()


@pytest.mark.parametrize("given, filled", [(3, 8), (8, 8), (9, 16), (1, 1), (None, 16)])
def test_blocks_have_whole_vectors_of_queries(given, filled):
    """Or one query. What is left over of a vector may be computed by other code."""
    for cls in (Blockwise, Ragged, AllGather):
        strict = cls(AttentionMetadata(blocksize_q=given), bitwise=True)
        assert strict.block_sizes() == (filled, 128)
        assert cls(AttentionMetadata(blocksize_q=given)).block_sizes() == (given, None)


def test_default_blocks_do_not_depend_on_the_capacity():
    """That of a cache: they were the largest that divide it. In one of 299 tokens, row 1 sees keys of
    the last block.
    """
    rng, lengths = np.random.default_rng(0), jnp.array([250, 260])
    q, k, v = (jnp.asarray(rng.normal(size=(2, n, K, D)), jnp.float32) for n in (1, 260, 260))

    @jax.jit
    def run(q, k, v):
        where = dict(mask=Causal() & KeyPadding(lengths), q_offset=lengths - 1)
        out = attention(q, k, v, Ragged(), return_logsumexp=True, **where)
        return out.attention_outputs, out.logsumexp

    found = []
    for capacity in (299, 512):
        wider = lambda x, n=capacity: jnp.pad(
            x, [(0, 0), (0, n - 260), (0, 0), (0, 0)], constant_values=jnp.nan
        )
        found.append(run(q, wider(k), wider(v)))
    assert all(x.tobytes() == y.tobytes() for x, y in zip(*jax.tree.map(np.asarray, found)))
    assert not Ragged().supports(bitwise="capacity")  # in a cache of less than a block, it may


# Any number of devices.


def same(found, want, where):
    for name, x in want.items():
        assert found[name].shape == x.shape and found[name].tobytes() == x.tobytes(), (where, name)


def sharded(cls, q, k, v, cts):
    strategy = cls(METADATA, bitwise=True)

    def call(q):
        out = attention(q, k, v, strategy, mask=MASK, return_logsumexp=True)
        return out.attention_outputs, out.logsumexp

    outs, pull = jax.vjp(call, q)
    return dict(zip(("out", "lse", "q"), (*outs, *pull(cts))))


def on_devices(n, arrays, cts, optimised=False):
    """Output, logsumexp and the gradient of the query on `n` devices."""
    mesh = jax.make_mesh((n,), ("sp",), (AxisType.Auto,), devices=jax.devices()[:n])
    with jax.set_mesh(mesh):
        options = {"xla_backend_optimization_level": 3} if optimised else None
        run = jax.jit(sharded, static_argnums=0, compiler_options=options)
        found = run(Blockwise if n == 1 else AllGather, *arrays, cts)
    return jax.tree.map(np.asarray, found)


def random_call(seed, dtype, b=2, t=64):
    rng = np.random.default_rng(seed)
    new = lambda *shape: jnp.asarray(rng.normal(size=shape) * 10.0 ** rng.uniform(-2, 2), dtype)
    arrays = new(b, t, H, D), new(b, t, K, D), new(b, t, K, D)
    return arrays, (new(b, t, H, D), jnp.asarray(rng.normal(size=(b, t, H)), jnp.float32))


def test_any_number_of_devices():
    given = random_call(0, jnp.float32)
    want = on_devices(1, *given)
    same(on_devices(4, *given), want, "devices")


@pytest.mark.parametrize("cls", [Blockwise])
def test_a_batch_that_is_sharded(cls):
    """Over an automatic axis that the metadata name: the loops are those of one device."""
    (q, k, v), _ = random_call(0, jnp.float32)
    strategy = STRICT[cls.__name__]
    fn = jax.jit(lambda *xs: attention(*xs, strategy, mask=MASK).attention_outputs)
    want = np.asarray(fn(q, k, v))
    with jax.set_mesh(jax.make_mesh((2,), ("dp",), (AxisType.Auto,), devices=jax.devices()[:2])):
        put = lambda x: jax.device_put(x, jax.P("dp"))
        found = np.asarray(fn(put(q), put(k), put(v)))
        # Each device runs them by itself: XLA does not split them, and could not have other loops.
        assert "shard_map" in str(jax.make_jaxpr(fn)(q, k, v))
    assert found.tobytes() == want.tobytes()


def test_who_promises_what():
    promised = {
        Ragged: {"batch", "capacity", "chunks", "decode", "layout", True},
        Blockwise: {"batch", "capacity", "chunks", "decode"},
        AllGather: {"devices"},
    }
    for kind in ("batch", "capacity", "chunks", "decode", "layout", "devices", True):
        for cls, kinds in promised.items():
            assert cls(METADATA, bitwise=True).supports(bitwise=kind).ok == (kind in kinds)
            assert not cls(METADATA).supports(bitwise=kind).ok
        remedy = "AllGather" if kind == "devices" else "Ragged"
        assert f"{remedy}(metadata, bitwise=True)" in Ring().supports(bitwise=kind).reason
    with pytest.raises(ValueError, match="bitwise must be one of"):
        Ragged().supports(bitwise="device")
    with pytest.raises(ValueError, match="axis_name='keys'.*one device"):
        Ragged(AttentionMetadata(), axis_name="keys", bitwise=True)
    for cls in (Blockwise, Ragged):
        dropped = cls(METADATA, bitwise=True).supports
        assert "dropout drops depends on the place" in dropped(bitwise="batch", dropout=True).reason
        assert dropped(bitwise="chunks", dropout=True) and not dropped(bitwise=True, dropout=True)
        strict = cls(KERNELS, bitwise=True)
        assert all(strict.supports(bitwise=kind).ok for kind in promised[cls])
        in_loops = STRICT[cls.__name__]
        assert strict.may_run_kernels(jnp.float32) and not in_loops.may_run_kernels(jnp.float32)
    other = Blockwise(KERNELS.replace(backend="gpu"), bitwise=True)
    assert "on gpu, kernels of Blockwise have blocks of their own" in other.supports().reason
    with pytest.raises(ValueError, match="platform='interpret'.*AllGather.*'xla' or 'auto'"):
        attention(*random_call(0, jnp.float32)[0], AllGather(KERNELS, bitwise=True))
    with pytest.raises(ValueError, match="layout=Zigzag.*Contiguous"):
        AllGather(METADATA, layout=Zigzag(), bitwise=True)
    listed = Selected(jnp.zeros((1, 1, 1), jnp.int32))
    assert "list of keys" in STRICT["Blockwise"].supports(mask=listed).reason
    with pytest.raises(ValueError, match=r"keys \(2, 24, 2, 16\).*not whole blocks of 8.*pad"):
        on_devices(2, *random_call(0, jnp.float32, t=24))
