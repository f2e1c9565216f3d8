"""`dot_product_attention` against `jax.nn`'s, and against float64 where that is wrong."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _draw import normal
from matrix.oracle import exact

from eqattn import Blockwise, dot_product_attention


B, T, S, N, K, H = 2, 21, 17, 4, 2, 8


def qkv(dtype=jnp.float32, batch=(B,)):
    return tuple(
        normal(i, *batch, *shape, dtype=dtype)
        for i, shape in enumerate([(T, N, H), (S, K, H), (S, K, H)])
    )


def seen(seed, *shape):
    """A random mask in which every query sees the first key."""
    mask = np.random.default_rng(seed).random(shape) < 0.6
    mask[..., 0] = True
    return jnp.asarray(mask)


def int32(*values):
    return jnp.asarray(values, jnp.int32)


CALLS = {
    "plain": {},
    "causal": dict(is_causal=True, scale=0.2),
    "window int": dict(local_window_size=6, scale=jnp.float32(0.2)),
    "window tuple": dict(local_window_size=(6, 4), bias=normal(7, B, 1, 1, S)),
    "window left": dict(local_window_size=(5, 0), is_causal=True, bias=normal(7, S, S)),
    "window list": dict(local_window_size=[6, 4], mask=seen(3, N, 1, S)),
    "key lengths": dict(key_value_seq_lengths=int32(5, S), bias=normal(7, 1, 1, T, S)),
    "query lengths": dict(query_seq_lengths=int32(T, 8), bias=normal(7, 1, N, T, 1), scale=2),
    "both lengths": dict(query_seq_lengths=int32(9, T), key_value_seq_lengths=int32(S, 3)),
    "lengths causal": dict(
        query_seq_lengths=int32(1, 20), key_value_seq_lengths=int32(16, 2), is_causal=True
    ),
    "xla": dict(implementation="xla", bias=normal(7, N, T, S)),
    "mask": dict(mask=seen(1, B, N, T, S), bias=normal(7, B, N, T, S)),
    "mask shared": dict(mask=seen(2, 1, 1, T, S), is_causal=True),
    "mask per key": dict(mask=seen(4, B, 1, 1, S)),
    "all": dict(
        bias=normal(8, 1, N, T, S),
        mask=seen(5, B, 1, T, S),
        scale=0.4,
        is_causal=True,
        local_window_size=(S + T, 0),
        query_seq_lengths=int32(T, 11),
        key_value_seq_lengths=int32(7, S),
    ),
}
NARROW = ("causal", "both lengths", "mask", "all")
# Each parameter, and each of its forms. tests/nightly/compat has all calls.
FEW = "window tuple", "window left", "query lengths", "lengths causal", "xla", "mask", "all"


def same(a, b, tol):
    """Two float32 computations agree. A leaf smaller than the query (a scalar or broadcast
    gradient) sums over pairs that largely cancel, in another order: its rounding grows with the
    root of their number. The conformance suite judges these by their error bound.
    """
    assert jax.tree.structure(a) == jax.tree.structure(b)
    pairs = 2 * N * T * S
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert x.shape == y.shape and x.dtype == y.dtype
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        terms = pairs / max(y.size, 1) if y.size < 2 * T * N else 1
        allowed = tol * max(1.0, np.abs(y).max()) + 2**-24 * np.sqrt(terms) * 4
        assert np.abs(x - y).max() <= allowed


def value_and_grads(fn, arrays, kwargs):
    """Output, residual, and the gradients of every float input through the output."""
    w = normal(9, *jnp.shape(arrays[0]))
    floats = {n: x for n, x in kwargs.items() if isinstance(x, jax.Array) and n in FLOATS}
    others = {n: x for n, x in kwargs.items() if n not in floats}

    def loss(arrays, floats):
        out, lse = fn(*arrays, **floats, **others, return_residual=True)
        live = lse > -1e30  # what a masked row has is compared elsewhere
        lse = jnp.where(live, lse, jnp.zeros_like(lse))
        total = (out.astype(jnp.float32) * w).sum()
        return total, (out, live, lse)

    run = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    grads, (out, live, lse) = run(arrays, floats)
    return grads, out, live, lse


def ours_and_theirs(arrays, kwargs):
    ours = value_and_grads(dot_product_attention, arrays, kwargs)
    with jax.numpy_dtype_promotion("standard"):  # `jax.nn` needs it for bfloat16
        return ours, value_and_grads(jax.nn.dot_product_attention, arrays, kwargs)


FLOATS = ("bias", "scale")


@pytest.mark.parametrize(
    "call, dtype",
    [(call, jnp.float32) for call in FEW]
    + [("causal", jnp.bfloat16), ("both lengths", jnp.bfloat16)],
)
def test_like_jax_nn(call, dtype):
    kwargs, arrays = dict(CALLS[call]), qkv(dtype)
    if "window" in call:  # so that every query sees a key
        arrays = (arrays[0][:, :S], *arrays[1:])
    same(*ours_and_theirs(arrays, kwargs), 1e-5 if dtype == jnp.float32 else 3e-2)


@pytest.mark.parametrize("call", ["causal"])
def test_without_batch(call):
    ours, theirs = ours_and_theirs(qkv(batch=()), CALLS[call])
    same(ours, theirs, 1e-5)
    assert ours[1].shape == (T, N, H) and ours[3].shape == (T, N)


def test_3d_query_with_4d_keys_and_numpy():
    q, k, v = (np.asarray(x) for x in qkv(batch=()))
    kwargs = dict(key_value_seq_lengths=np.array([5], np.int32), return_residual=True)
    ours = dot_product_attention(q, k[None], v[None], **kwargs)
    same(ours, jax.nn.dot_product_attention(q, k[None], v[None], **kwargs), 3e-6)


def test_float64(x64):
    arrays = tuple(x.astype(jnp.float64) for x in qkv())
    kwargs = dict(is_causal=True, return_residual=True)
    out, lse = dot_product_attention(*arrays, **kwargs)
    with jax.numpy_dtype_promotion("standard"):
        same((out, lse), jax.nn.dot_product_attention(*arrays, **kwargs), 1e-6)
    same(out, jnp.asarray(exact(*arrays, visible=np.tril(np.ones((T, S), bool)))[0]), 1e-13)


def test_residual_has_its_gradient():
    """`jax.nn` drops this cotangent silently; here it is that of the logsumexp."""
    q, k, v = qkv()

    def ours(q):
        return jnp.sum(jnp.sin(dot_product_attention(q, k, v, return_residual=True)[1]))

    def logsumexp(q):
        groups = q.shape[2] // k.shape[2]
        logits = jnp.einsum("btnh,bsnh->btns", q, jnp.repeat(k, groups, 2)) * q.shape[-1] ** -0.5
        return jnp.sum(jnp.sin(jax.nn.logsumexp(logits, -1)))

    same(jax.grad(ours)(q), jax.grad(logsumexp)(q), 3e-6)


def test_traced_window_and_transformations():
    arrays = tuple(x[:, :S] for x in qkv())

    def fn(*xs, window):
        return dot_product_attention(*xs, local_window_size=(window, 0), is_causal=True)

    expected = jax.nn.dot_product_attention(*arrays, local_window_size=(3, 0), is_causal=True)
    same(jax.jit(fn)(*arrays, window=jnp.asarray(3)), expected, 3e-6)
    same(jax.vmap(lambda q, k, v: fn(q, k, v, window=3))(*arrays), expected, 3e-6)


@pytest.mark.parametrize(
    "by, dtype",
    [
        ("mask", jnp.bfloat16),
        ("window", jnp.float32),
        ("key lengths", jnp.float32),
        ("query lengths", jnp.bfloat16),
    ],
)
def test_rows_that_see_nothing(by, dtype):
    arrays = qkv(dtype)
    q, k = np.arange(T)[:, None], np.arange(S)
    lengths = np.array([0, S])[:, None, None, None]
    queries = np.array([T, 2])[:, None, None, None]
    kwargs, mask = {
        "mask": (
            dict(mask=jnp.asarray(q % 3 > 0) & jnp.ones((T, S), bool)),
            (q % 3 > 0) & (k >= 0),
        ),
        "window": (dict(local_window_size=(1, 0)), (k <= q) & (k >= q - 1)),
        "key lengths": (dict(key_value_seq_lengths=int32(0, S)), (k < lengths) & (q >= 0)),
        "query lengths": (dict(query_seq_lengths=int32(T, 2)), (q < queries) & (k >= 0)),
    }[by]
    mask = np.broadcast_to(mask, (B, N, T, S))
    expected, lse, p = exact(*arrays, visible=mask)
    grads, out, live, ours = value_and_grads(dot_product_attention, arrays, kwargs)
    tol = 3e-6 if dtype == jnp.float32 else 2e-2
    assert np.abs(np.asarray(out, np.float64) - expected).max() < tol
    np.testing.assert_array_equal(live, mask.any(-1).transpose(0, 2, 1))
    assert np.abs(np.asarray(ours, np.float64) - np.where(live, lse, 0)).max() < 10 * tol
    np.testing.assert_array_equal(np.asarray(out)[~np.asarray(live)], 0)
    dq, _, dv = grads[0]
    np.testing.assert_array_equal(np.asarray(dq)[~np.asarray(live)], 0)
    w = np.asarray(normal(9, *out.shape), np.float64)
    expected = np.einsum("bnts,btnh->bsnh", p, w).reshape(B, S, K, N // K, H).sum(3)
    assert np.abs(np.asarray(dv, np.float64) - expected).max() < 4 * tol


def test_padding_may_hold_anything():
    q, k, v = qkv()
    lengths = dict(query_seq_lengths=int32(T, 8), key_value_seq_lengths=int32(5, S))
    clean = value_and_grads(dot_product_attention, (q, k, v), lengths)
    garbage = q.at[1, 8:].set(jnp.nan), k.at[0, 5:].set(jnp.inf), v.at[0, 5:].set(jnp.nan)
    jax.tree.map(
        np.testing.assert_array_equal,
        value_and_grads(dot_product_attention, garbage, lengths),
        clean,
    )


q, k, v = qkv()
BAD = {
    "rank": dict(query=q[None]),
    "mask rank": dict(mask=jnp.ones((1, 1, 1, T, S), bool)),
    "bias rank": dict(bias=jnp.ones((1, 1, 1, T, S))),
    "value dim": dict(value=v[..., :4]),
    "value dtype": dict(value=v.astype(jnp.bfloat16)),
    "query dtype": dict(query=q.astype(jnp.bfloat16)),
    "query dim": dict(query=q[..., :4]),
    "batch": dict(query=q[:1]),
    "heads": dict(query=q[:, :, :3]),
    "mask dtype": dict(mask=jnp.ones((T, S))),
    "mask shape": dict(mask=jnp.ones((T, S - 1), bool)),
    "mask heads": dict(mask=jnp.ones((2, T, S), bool)),
    "bias shape": dict(bias=jnp.ones((3, 1, T, S))),
    "lengths dtype": dict(key_value_seq_lengths=jnp.ones(B)),
    "lengths shape": dict(query_seq_lengths=int32(1)),
    "lengths rank": dict(query_seq_lengths=jnp.int32(1)),
    "window": dict(local_window_size=(1, 2, 3)),
    "implementation": dict(implementation="triton"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_like_jax_nn(case, unchecked):
    arrays = {"query": q, "key": k, "value": v} | BAD[case]
    # `jax.nn` leaves some shapes to an assertion or to broadcasting.
    with pytest.raises((ValueError, TypeError, AssertionError)):
        jax.nn.dot_product_attention(**arrays)
    with pytest.raises(ValueError) as info:
        dot_product_attention(**arrays)
    assert any(c.isdigit() for c in str(info.value)) or "got" in str(info.value)


def test_further_errors(unchecked):
    with pytest.raises(ValueError, match="cuDNN"):
        dot_product_attention(q, k, v, implementation="cudnn")
    with pytest.raises(ValueError, match="-1"):
        dot_product_attention(q, k, v, local_window_size=-1)
    with pytest.raises(ValueError, match="scale"):
        dot_product_attention(q, k, v, scale=jnp.ones(3))
    with pytest.raises(TypeError, match="int32"):
        dot_product_attention(*(x.astype(jnp.int32) for x in (q, k, v)))


def test_signature():
    ours, theirs = (
        inspect.signature(f).parameters
        for f in (dot_product_attention, jax.nn.dot_product_attention)
    )
    assert list(ours) == list(theirs)
    for a, b in zip(ours.values(), theirs.values()):
        assert (a.kind, a.default) == (b.kind, b.default), a.name


def test_platform_reaches_the_strategy(monkeypatch):
    chosen = []
    dispatch = Blockwise.dispatch

    def spy(self, *args, **kwargs):
        chosen.append(self.metadata.platform.value)
        return dispatch(self, *args, **kwargs)

    monkeypatch.setattr(Blockwise, "dispatch", spy)
    for implementation in (None, "xla"):
        dot_product_attention(q, k, v, implementation=implementation)
    assert chosen == ["auto", "xla"]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int8"])
@pytest.mark.parametrize("jit", [False, True])
def test_a_window_of_an_array_of_unsigned_integers(dtype, jit):
    q, k, v = (normal(i, 1, 6, 2, 4) for i in range(3))
    call = lambda left: dot_product_attention(q, k, v, local_window_size=(left, 0))
    found = (jax.jit(call) if jit else call)(jnp.asarray(2, dtype))
    np.testing.assert_allclose(found, call(2), atol=1e-6)
