"""Strategies with `bitwise=True`: the bits of a row depend on nothing but the row."""

import functools as ft

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
from eqattn.cache import Pages


H, K, D, BLOCK = 4, 2, 16, 8
METADATA = AttentionMetadata(blocksize_q=BLOCK, blocksize_k=BLOCK)
KERNELS = METADATA.replace(platform="interpret")
STRICT = {cls.__name__: cls(METADATA, bitwise=True) for cls in (Blockwise, Ragged)}
STRICT |= {f"{cls.__name__} in kernels": cls(KERNELS, bitwise=True) for cls in (Blockwise, Ragged)}
QUICK = "batch", "decode"
KINDS = "batch", "padding", "capacity", "layout", "chunks", "decode"
# The blocks at the edge of a window are partial for some rows and full for others.
MASK = Causal() & SlidingWindow(13, 0, sinks=1)


@ft.cache
def compiled(fn, statics, optimised):
    """A program, compiled as users do, or for speed as the other tests are: see conftest.py."""
    options = {"xla_backend_optimization_level": 3} if optimised else None
    return jax.jit(fn, static_argnums=statics, compiler_options=options)


def visit(name, gradients, rows, columns, where):
    """Output, logsumexp and, if asked for, gradients, by the names of what they belong to.

    `rows` are a query, its cotangents and a bias; `columns` keys and values; `where` an offset and
    the number of keys.
    """
    (q, ct, ct_lse, bias), (k, v), (offset, lengths) = rows, columns, where
    mask = MASK & KeyPadding(lengths)

    def call(q, bias, k, v):
        out = attention(
            q, k, v, STRICT[name], mask=mask, bias=bias, q_offset=offset, return_logsumexp=True
        )
        return out.attention_outputs, out.logsumexp

    if not gradients:
        return dict(zip(("out", "lse"), call(q, bias, k, v)))
    outs, pull = jax.vjp(call, q, bias, k, v)
    found = dict(zip(("out", "lse", "q", "bias", "k", "v"), (*outs, *pull((ct, ct_lse)))))
    return found | {"bias": found["bias"].swapaxes(1, 2)}  # [b, t, h, s], as all that rows have


def same(found, want, where, names=None):
    for name in want if names is None else names:
        x, y = np.asarray(found[name]), np.asarray(want[name])
        assert x.shape == y.shape and x.tobytes() == y.tobytes(), (where, name)


def check(name, gradients, shape, seed, row, offset, dtype, kinds=KINDS):
    """One row of `shape` queries and keys in all arrangements. A gradient of keys or values is a sum
    over queries: it is compared where these are the same.
    """
    rng, (t, s) = np.random.default_rng(seed), shape
    call = ft.partial(compiled(visit, (0, 1), gradients), name, gradients)
    new = lambda *shape: jnp.asarray(rng.normal(size=shape) * 10.0 ** rng.uniform(-2, 2), dtype)

    def rows_of(b, t):
        ct_lse = jnp.asarray(rng.normal(size=(b, t, H)), jnp.float32)
        return new(b, t, H, D), new(b, t, H, D), ct_lse, new(b, H, t, s)

    rows, columns = rows_of(1, t), (new(1, s, K, D), new(1, s, K, D))
    where = jnp.array([offset]), jnp.array([min(offset + t, s)])
    want = call(rows, columns, where)
    of_rows = [name for name in ("out", "lse", "q", "bias") if name in want]

    # batch: beside other rows, at any place, of other lengths.
    put = lambda xs, ys: jax.tree.map(lambda x, y: x.at[row].set(y[0]), xs, ys)
    others = tuple(jnp.asarray(rng.integers(0, s + 1, 3), jnp.int32) for _ in where)
    several = put(rows_of(3, t), rows), put((new(3, s, K, D), new(3, s, K, D)), columns)
    found = call(*several, put(others, where)) if "batch" in kinds else {}
    same({n: x[row : row + 1] for n, x in found.items()}, want, "batch", found)

    # capacity: a larger cache, which holds anything.
    longer = tuple(jnp.concatenate([x, new(1, 41, K, D)], 1) for x in columns)
    *first, bias = rows
    more = (*first, jnp.concatenate([bias, new(1, H, t, 41)], 3))
    found = call(more, longer, where) if "capacity" in kinds else {}
    own = {"k": np.s_[:, :s], "v": np.s_[:, :s], "bias": np.s_[..., :s]}
    same({n: x[own.get(n, ...)] for n, x in found.items()}, want, "capacity", found)

    # layout: pages in any order.
    if "layout" in kinds and isinstance(STRICT[name], Ragged) and s % BLOCK == 0:
        table = jnp.asarray(rng.permutation(5)[: s // BLOCK][None], jnp.int32)
        pool = lambda x: new(5, BLOCK, K, D).at[table[0]].set(x.reshape(-1, BLOCK, K, D))
        paged = tuple(Pages(pool(x), table) for x in columns)
        found = dict(call(rows, paged, where))
        for name in {"k", "v"} & set(found):
            found[name] = found[name].content[table[0]].reshape(1, s, K, D)
        same(found, want, "layout")

    # chunks, of which no boundary is that of a block; then a single token, and padded queries.
    def part(a, b):
        *some, bias = rows
        own = *[x[:, a:b] for x in some], bias[:, :, a:b]
        return call(own, columns, (where[0] + a, where[1]))

    if "chunks" in kinds and t > BLOCK:
        parts = part(0, 7), part(7, t)
        joined = {n: jnp.concatenate([x[n] for x in parts], 1) for n in of_rows}
        same(joined, want, "chunks", of_rows)
    for i in {0, t // 2, t - 1} if "decode" in kinds else ():
        same(part(i, i + 1), {n: want[n][:, i : i + 1] for n in of_rows}, "decode")
    q, ct, ct_lse, bias = rows
    wide = lambda x, axis=1: jnp.pad(x, [(0, 6 * (i == axis)) for i in range(x.ndim)])
    padded = jnp.concatenate([q, new(1, 6, H, D)], 1), wide(ct), wide(ct_lse), wide(bias, 2)
    found = call(padded, columns, where) if "padding" in kinds else {}
    found = {n: x[:, :t] if n in of_rows else x for n, x in found.items()}
    same(found, want, "padding", found)


def cases(examples):
    numbers = given(st.integers(0, 2**32), st.integers(0, 2), st.integers(0, 4))
    options = settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return lambda test: options(numbers(test))


@cases(15)
def test_the_bits_of_a_row(seed, row, offset):
    check("Ragged", False, (20, 24), seed, row, offset, jnp.float32)


@cases(3)
def test_the_bits_of_a_row_in_kernels(seed, row, offset):
    """Interpreted. A row alone, of several, and token by token; all else is slow."""
    check("Blockwise in kernels", False, (11, 16), seed, row, offset, jnp.float32, QUICK)


def test_the_gradients_of_a_step():
    """That of a bias was a sum over the rows that pad its block, which is compiled to other bits."""
    check("Ragged", True, (20, 24), 468725, 0, 0, jnp.bfloat16, ("decode",))


@pytest.mark.slow
def test_the_gradient_of_a_single_block():
    """What is compiled for the only turn of a loop may add up in another order."""
    check("Blockwise", True, (8, 8), 0, 1, 0, jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(20, 24), (8, 8), (11, 40)])
@pytest.mark.parametrize("name", STRICT)
def test_the_bits_of_many_rows(name, shape, dtype):
    """700 cases of each shape, so 2,100 of each dtype for each strategy. Gradients in kernels are
    no part of the contract.
    """

    def one(seed, row, offset):
        gradients = "kernels" not in name
        check(name, gradients, shape, seed, row, offset, jnp.dtype(dtype))

    cases(700)(one)()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in STRICT if "kernels" in name])
def test_gradients_in_kernels(name):
    """Not promised, and seen to hold but between a prompt and a step."""
    kinds = [kind for kind in KINDS if kind != "decode"]

    def one(seed, row, offset):
        check(name, True, (11, 16), seed, row, offset, jnp.float32, kinds)

    cases(20)(one)()


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
        run = compiled(sharded, (0,), optimised)
        found = run(Blockwise if n == 1 else AllGather, *arrays, cts)
    return jax.tree.map(np.asarray, found)


def many(seed, dtype, b=2, t=64):
    rng = np.random.default_rng(seed)
    new = lambda *shape: jnp.asarray(rng.normal(size=shape) * 10.0 ** rng.uniform(-2, 2), dtype)
    arrays = new(b, t, H, D), new(b, t, K, D), new(b, t, K, D)
    return arrays, (new(b, t, H, D), jnp.asarray(rng.normal(size=(b, t, H)), jnp.float32))


def test_any_number_of_devices():
    given = many(0, jnp.float32)
    want = on_devices(1, *given)
    same(on_devices(4, *given), want, "devices")


def test_one_query_on_any_number_of_devices():
    """As in decoding: fewer queries than devices, in a block of 8."""
    (q, k, v), (out, lse) = many(1, jnp.float32, t=32)
    given = (q[:, :1], k, v), (out[:, :1], lse[:, :1])
    same(on_devices(2, *given), on_devices(1, *given), "devices")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_number_of_devices_in_many_cases(dtype):
    """2,000 rows in all: 250 batches of each dtype, of two rows and on 2 and 4 devices."""
    for seed in range(250):
        given = many(seed, dtype)
        want = on_devices(1, *given, optimised=True)
        for n in (2, 4):
            same(on_devices(n, *given, optimised=True), want, (n, seed))


@pytest.mark.parametrize("cls", [Blockwise, pytest.param(Ragged, marks=pytest.mark.slow)])
def test_a_batch_that_is_sharded(cls):
    """Over an automatic axis that the metadata name: the loops are those of one device."""
    (q, k, v), _ = many(0, jnp.float32)
    strategy = STRICT[cls.__name__]
    fn = jax.jit(lambda *xs: attention(*xs, strategy, mask=MASK).attention_outputs)
    want = np.asarray(fn(q, k, v))
    with jax.set_mesh(jax.make_mesh((2,), ("dp",), (AxisType.Auto,), devices=jax.devices()[:2])):
        put = lambda x: jax.device_put(x, jax.P("dp"))
        found = np.asarray(fn(put(q), put(k), put(v)))
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
        strict = cls(KERNELS, bitwise=True)
        assert all(strict.supports(bitwise=kind).ok for kind in promised[cls])
        assert strict.may_run_kernels and not STRICT[cls.__name__].may_run_kernels
    other = Blockwise(KERNELS.replace(backend="gpu"), bitwise=True)
    assert "on gpu, kernels of Blockwise have blocks of their own" in other.supports().reason
    with pytest.raises(ValueError, match="platform='interpret'.*AllGather.*'xla' or 'auto'"):
        attention(*many(0, jnp.float32)[0], AllGather(KERNELS, bitwise=True))
    with pytest.raises(ValueError, match="layout=Zigzag.*Contiguous"):
        AllGather(METADATA, layout=Zigzag(), bitwise=True)
    listed = Selected(jnp.zeros((1, 1, 1), jnp.int32))
    assert "list of keys" in STRICT["Blockwise"].supports(mask=listed).reason
    with pytest.raises(ValueError, match=r"keys \(2, 24, 2, 16\).*not whole blocks of 8.*pad"):
        on_devices(2, *many(0, jnp.float32, t=24))
