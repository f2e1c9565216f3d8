"""The layer against `eqx.nn.MultiheadAttention` itself, and what it adds against float64 NumPy."""

import functools as ft
import inspect
import io
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _draw import normal
from _programs import DEFAULT_CODE

import eqattn
import eqattn.nn as nn
from eqattn import (
    ALiBi,
    AttentionMetadata,
    Blockwise,
    Causal,
    Dense,
    dropout_mask,
    KeyPadding,
    ScoreFn,
    SlidingWindow,
    T5Bias,
)
from eqattn.cache import KVCache


T, S, SIZE, HEADS = 7, 9, 24, 4
KEY = jax.random.key(0)


X, MEMORY = normal(0, T, SIZE), normal(1, S, SIZE)
INPUTS = normal(2, T, 24), normal(3, S, 10), normal(4, S, 11)
ALL_SIZES = dict(key_size=10, value_size=11, output_size=12, qk_size=5, vo_size=3)
BIASES = dict(use_query_bias=True, use_key_bias=True, use_value_bias=True, use_output_bias=True)
CONSTRUCTIONS = {
    "default": {},
    "sizes": ALL_SIZES,
    "biases": BIASES,
    "both": ALL_SIZES | BIASES,
    "query bias only": dict(use_query_bias=True),
    "dropout, off": dict(dropout_p=0.3, inference=True),
    "bfloat16": dict(dtype=jnp.bfloat16),
    "one head": dict(),
}


def pair(name, key=KEY):
    """Equinox's layer and ours, made from the same arguments, and inputs for them."""
    kwargs = CONSTRUCTIONS[name]
    heads = 1 if name == "one head" else HEADS
    inputs = INPUTS if "key_size" in kwargs else (X, MEMORY, MEMORY)
    inputs = [x.astype(kwargs.get("dtype", x.dtype)) for x in inputs]
    layers = [
        kind(heads, SIZE, key=key, **kwargs)
        for kind in (eqx.nn.MultiheadAttention, nn.MultiheadAttention)
    ]
    return *layers, inputs


def close(got, want, **kwargs):
    """For float32: twice 30 roundings of values of order one. bfloat16 has 2^16 coarser ones."""
    assert got.dtype == want.dtype and got.shape == want.shape
    atol = 4e-6 if got.dtype == jnp.float32 else 0.05
    np.testing.assert_allclose(*(np.asarray(x, np.float64) for x in (got, want)), atol=atol, rtol=0)


def leaves(tree):
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in paths}


# As Equinox's ----------------------------------------------------------------------------------


def test_equinox_is_the_version_that_this_was_written_for():
    """Every argument of theirs is one of ours: at the same place if positional, with the default.
    Only ours may leave out key and value.
    """
    for name in ("__init__", "__call__"):
        theirs, ours = (
            inspect.signature(getattr(kind, name)).parameters
            for kind in (eqx.nn.MultiheadAttention, nn.MultiheadAttention)
        )
        places = [n for n, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert [n for n, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == places
        for n, p in theirs.items():
            optional = n in ("key_", "value") and p.default is p.empty
            assert (ours[n].kind, ours[n].default) == (p.kind, None if optional else p.default)


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_same_key_same_parameters(name):
    theirs, ours, _ = pair(name)
    a, b = leaves(theirs), leaves(ours)
    assert list(a) == list(b)
    for path in a:
        np.testing.assert_array_equal(a[path], b[path])
        assert (
            np.asarray(b[path]).dtype == np.asarray(a[path]).dtype or path == ".dropout.inference"
        )
    statics = {f.name for f in theirs.__dataclass_fields__.values() if f.metadata.get("static")}
    for field in statics:
        assert getattr(theirs, field) == getattr(ours, field)
    assert set(theirs.__dataclass_fields__) <= set(ours.__dataclass_fields__)


MASKED = "none", "shared", "per head"
# Each argument and each mask. tests/nightly/nn has all pairs.
FEW = [
    ("both", "per head"),
    ("dropout, off", "none"),
    ("bfloat16", "shared"),
    ("one head", "per head"),
]


@pytest.mark.parametrize("name, masked", FEW)
def test_same_results_and_gradients(name, masked):
    theirs, ours, inputs = pair(name)
    mask = np.random.default_rng(5).random((theirs.num_heads, T, S)) < 0.6
    mask[..., 0] = True
    mask = {"none": None, "shared": jnp.asarray(mask[0]), "per head": jnp.asarray(mask)}[masked]

    @eqx.filter_jit
    @ft.partial(eqx.filter_value_and_grad, has_aux=True)
    def run(args):
        layer, *inputs = args
        out = layer(*inputs, mask)
        return jnp.vdot(normal(6, *out.shape, dtype=out.dtype), out), out

    ((_, want), slopes), ((_, got), own) = (run((layer, *inputs)) for layer in (theirs, ours))
    close(got, want)
    if want.dtype == jnp.float32:
        for x, y in zip(jax.tree.leaves(slopes), jax.tree.leaves(own), strict=True):
            np.testing.assert_allclose(x, y, atol=4e-5)


def test_without_jit():
    theirs, ours, inputs = pair("both")
    mask = jnp.asarray(np.random.default_rng(5).random((T, S)) < 0.9)
    close(ours(*inputs, mask=mask), theirs(*inputs, mask=mask))


def test_process_heads():
    theirs, ours, inputs = pair("both")
    seen = []

    def process(q, k, v):
        seen.append((q.shape, k.shape, v.shape))
        return 2 * q, jnp.flip(k, 0), v + q.mean()

    close(ours(*inputs, process_heads=process), theirs(*inputs, process_heads=process))
    assert seen[0] == seen[1] == ((T, HEADS, 5), (S, HEADS, 5), (S, HEADS, 3))


def test_rotary_as_in_the_docs_of_equinox():
    """Their way, by `process_heads`, their way on our layer, and ours."""
    theirs, ours, inputs = pair("default")
    rope = eqx.nn.RotaryPositionalEmbedding(SIZE // HEADS)
    turn = jax.vmap(rope, 1, 1)
    process = lambda q, k, v: (turn(q), turn(k), v)
    want = theirs(*inputs, process_heads=process)
    close(ours(*inputs, process_heads=process), want)
    close(nn.MultiheadAttention(HEADS, SIZE, rotary=nn.Rotary(), key=KEY)(*inputs), want)


@pytest.mark.parametrize("number", ["float32", "uint8"])
def test_numbers_as_masks(number):
    """Equinox hides where a number is 0, as in `jnp.tril(jnp.ones((t, t)))`."""
    theirs, ours, _ = pair("default")
    mask = jnp.tril(jnp.ones((T, T), number))
    close(ours(X, X, X, mask), theirs(X, X, X, mask))
    close(ours(X, X, X, np.asarray(mask)), theirs(X, X, X, mask))


def test_a_query_that_sees_no_key_gives_the_projection_of_zero():
    theirs, ours, inputs = pair("both")
    mask = jnp.ones((T, S), bool).at[2].set(False)
    got, want = ours(*inputs, mask), theirs(*inputs, mask)
    np.testing.assert_array_equal(got[2], ours.output_proj.bias)
    np.testing.assert_allclose(np.delete(got, 2, 0), np.delete(want, 2, 0), atol=4e-6)
    assert np.abs(got[2] - want[2]).max() > 0.01  # they average all values


@pytest.mark.parametrize("name", ["both", "dropout, off", "bfloat16"])
def test_checkpoints_both_ways(name):
    """Also in the middle of a model, where each layer must read as many arrays as the other wrote."""
    theirs, ours, _ = pair(name)
    others = [type(m)(**_arguments(name), key=jax.random.key(1)) for m in (theirs, ours)]
    tail = jnp.arange(3.0)
    for source, target, want in ((theirs, others[1], ours), (ours, others[0], theirs)):
        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, [source, tail])
        file.seek(0)
        got, end = eqx.tree_deserialise_leaves(file, [target, 0 * tail])
        assert eqx.tree_equal(got, want)
        np.testing.assert_array_equal(end, tail)
        skeleton = eqx.filter_eval_shape(lambda: [target, tail])
        file.seek(0)
        assert eqx.tree_equal(eqx.tree_deserialise_leaves(file, skeleton)[0], want)


def _arguments(name):
    return dict(num_heads=1 if name == "one head" else HEADS, query_size=SIZE) | CONSTRUCTIONS[name]


def test_checkpoints_of_another_dropout_or_mode():
    """A checkpoint brings `p` and `inference` along, as in Equinox."""
    make = lambda **kwargs: nn.MultiheadAttention(HEADS, SIZE, key=KEY, **kwargs)
    for saved, like in (
        (make(dropout_p=0.25, inference=True), make(dropout_p=0.5)),
        (make(inference=True), make()),
    ):
        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, saved)
        file.seek(0)
        got = eqx.tree_deserialise_leaves(file, like)
        assert (got.dropout.p, bool(got.dropout.inference)) == (saved.dropout.p, True)


# Dropout ---------------------------------------------------------------------------------------


def dropping(p=0.5, **kwargs):
    return nn.MultiheadAttention(HEADS, SIZE, dropout_p=p, key=KEY, **kwargs)


def test_dropout_is_on_or_off_as_in_equinox():
    theirs = eqx.nn.MultiheadAttention(HEADS, SIZE, dropout_p=0.5, key=KEY)
    ours, key = dropping(), jax.random.key(3)
    off = ours(X, X, X, inference=True)
    for call in (
        lambda m: m(X, X, X, inference=True),
        lambda m: m(X, X, X, key=key, inference=True),
        lambda m: eqx.nn.inference_mode(m)(X, X, X),
        lambda m: eqx.nn.inference_mode(m)(X, X, X, key=key),
        lambda m: eqx.tree_at(lambda m: m.dropout.p, m, 0.0)(X, X, X),
        lambda m: eqx.tree_at(lambda m: m.dropout.p, m, jnp.array(0.0))(X, X, X, key=key),
    ):
        close(call(ours), off)
        close(call(theirs), off)
    for call in (
        lambda m: m(X, X, X, key=key),
        lambda m: m(X, X, X, key=key, inference=False),
        lambda m: eqx.nn.inference_mode(m)(X, X, X, key=key, inference=False),
        lambda m: eqx.nn.inference_mode(eqx.nn.inference_mode(m), False)(X, X, X, key=key),
        lambda m: eqx.filter_jit(m)(X, X, X, key=key),
        lambda m: eqx.tree_at(lambda m: m.dropout.p, m, jnp.array(0.5))(X, X, X, key=key),
    ):
        for layer in (ours, theirs):
            assert np.abs(call(layer) - off).max() > 0.01
        np.testing.assert_allclose(call(ours), ours(X, X, X, key=key), atol=1e-6)
    for layer in (ours, theirs):
        with pytest.raises(RuntimeError, match="requires a key"):
            layer(X, X, X)
        with pytest.raises(RuntimeError, match="requires a key"):
            eqx.nn.inference_mode(layer)(X, X, X, inference=False)


def test_where_dropout_is_known_to_be_off_its_rate_may_be_traced():
    """`eqx.nn.MultiheadAttention` takes each of these but the last two."""
    layer, off, half = dropping(), dropping()(X, X, X, inference=True), jnp.array(0.5)
    stop, put = eqx.nn.inference_mode, lambda p: eqx.tree_at(lambda m: m.dropout.p, layer, p)
    close(jax.jit(lambda m: stop(m)(X, X, X))(layer), off)
    close(jax.jit(lambda p: stop(put(p))(X, X, X))(0.5), off)
    close(eqx.filter_jit(lambda m: m(X, X, X))(stop(put(half))), off)
    close(jax.jit(lambda p: put(p)(X, X, X, inference=True))(0.5), off)
    close(jax.jit(lambda i: put(0.0)(X, X, X, inference=i))(True), off)
    with pytest.raises(ValueError, match="is traced.*An optimiser that updates every leaf"):
        jax.jit(lambda i: layer(X, X, X, inference=i))(True)


def test_a_schedule_of_the_rate_raises_and_is_not_ignored():
    """A layer that was made without dropout dropped nothing where a traced rate was put into it."""
    layer, key = nn.MultiheadAttention(HEADS, SIZE, key=KEY), jax.random.key(3)
    rate = jnp.array(0.5)
    call = lambda m, p: eqx.tree_at(lambda m: m.dropout.p, m, p)(X, X, X, key=key)
    np.testing.assert_array_equal(call(layer, rate), dropping()(X, X, X, key=key))
    with pytest.raises(ValueError, match="is traced.*schedule of the rate has to put"):
        eqx.filter_jit(call)(layer, rate)
    # Where the whole layer is traced, its rate is what it was made with.
    many = jax.vmap(lambda key: nn.MultiheadAttention(HEADS, SIZE, key=key))(jax.random.split(KEY))
    for run in (jax.jit, eqx.filter_jit, jax.vmap):
        one = many if run is jax.vmap else layer
        assert jnp.isfinite(run(lambda m: m(X, X, X, key=key))(one)).all()


def test_dropout_of_equinox_may_be_put_in_its_place():
    key, layer = jax.random.key(0), nn.MultiheadAttention(HEADS, SIZE, dropout_p=0.25, key=KEY)
    put = lambda x: eqx.tree_at(lambda m: m.dropout, layer, x)
    want = eqx.tree_at(lambda m: m.dropout.p, layer, 0.5)(X, X, X, key=key)
    assert np.array_equal(put(eqx.nn.Dropout(0.5))(X, X, X, key=key), want)
    assert np.array_equal(
        put(eqx.nn.Dropout(0.5, inference=True))(X, X, X), layer(X, X, X, inference=True)
    )
    with pytest.raises(TypeError, match="dropout of a layer is an eqx.nn.Dropout, got Identity"):
        put(eqx.nn.Identity())(X, X, X)
    # Code that subclasses Equinox's layer calls it.
    theirs = eqx.nn.Dropout(0.25)(X, key=key)
    assert np.array_equal(layer.dropout(X, key=key), theirs)
    assert layer.dropout(X, inference=True) is X


def test_inference_is_a_flag(unchecked):
    """A text was said to be traced, or was not looked at."""
    for p in (0.0, 0.5):
        layer = nn.MultiheadAttention(HEADS, SIZE, dropout_p=p, key=KEY)
        with pytest.raises(TypeError, match="inference is True or False, got 'no'"):
            layer(X, X, X, inference="no", key=KEY)


def test_setting_p_afterwards_switches_dropout_on():
    layer = eqx.tree_at(lambda m: m.dropout.p, nn.MultiheadAttention(HEADS, SIZE, key=KEY), 0.5)
    key = jax.random.key(3)
    np.testing.assert_array_equal(layer(X, X, X, key=key), dropping()(X, X, X, key=key))
    with pytest.raises(RuntimeError, match="Dropout of 0.5 requires a key"):
        eqx.filter_jit(layer)(X, X, X)
    with pytest.raises(ValueError, match="is traced"):
        jax.jit(lambda m: m(X, X, X))(layer)


def test_dropout_drops_what_dropout_mask_says():
    layer, key = dropping(0.25), jax.random.key(3)
    kept = np.asarray(dropout_mask(key, (), HEADS, T, T, 0.25))
    assert 0.6 < kept.mean() < 0.9
    got = layer(X, X, X, "causal", key=key)
    np.testing.assert_allclose(got, reference(layer, X, X, X, causal, kept=kept / 0.75), atol=4e-6)


def test_plain_transformations_where_dropout_is_off():
    """`eqx.nn.MultiheadAttention` fails both, on its bool leaf."""
    theirs, ours, inputs = pair("biases")
    loss = eqx.filter_jit(lambda layer: (layer(*inputs, inference=True) ** 2).sum())
    with pytest.raises(TypeError, match="got bool"):
        jax.grad(loss)(theirs)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(lambda layer: layer(*inputs))(theirs)
    for layer in (
        ours,
        eqx.nn.inference_mode(ours),
        eqx.nn.inference_mode(ours, False),
        dropping(),
    ):
        value, gradients = jax.jit(jax.value_and_grad(loss))(layer)
        np.testing.assert_allclose(value, loss(layer), rtol=1e-5)
        want = eqx.filter_grad(loss)(layer)
        for x, y in zip(jax.tree.leaves(want), jax.tree.leaves(gradients)):
            np.testing.assert_allclose(x, y, atol=1e-4)
        assert float(gradients.dropout.p) == float(gradients.dropout.inference) == 0
    default = jax.jit(lambda layer: layer(*inputs))
    for layer in (ours, eqx.nn.inference_mode(ours)):
        close(default(layer), ours(*inputs))
    stepped = jax.tree.map(lambda p, g: p - 0.001 * g, ours, jax.grad(loss)(ours))
    assert loss(stepped) < loss(ours)  # also once p and inference are arrays
    assert jax.jit(loss)(stepped) < loss(ours)
    with pytest.raises(ValueError, match="inference=True, or use eqx.filter_jit"):
        jax.jit(lambda layer: layer(X, X, X, key=KEY))(dropping())


def test_filters_and_trees():
    """What is done with Equinox's layer: partition, a tree of bools, structure, equality."""
    layer = nn.MultiheadAttention(HEADS, SIZE, key=KEY)
    for tree in (layer, dropping()):
        parts = eqx.partition(tree, eqx.is_inexact_array)
        assert len(jax.tree.leaves(parts[0])) == 4
        assert eqx.tree_equal(eqx.combine(*parts), tree)
        nothing = jax.tree.map(lambda _: False, tree)
        frozen = eqx.tree_at(lambda m: m.output_proj.weight, nothing, True)
        chosen, _ = eqx.partition(tree, frozen)
        assert [x.shape for x in jax.tree.leaves(chosen)] == [(SIZE, SIZE)]
        everything = jax.tree.map(lambda _: True, tree)
        assert len(jax.tree.leaves(eqx.filter(tree, everything))) == 6
        assert all(isinstance(leaf, float | jax.Array) for leaf in jax.tree.leaves(tree))
    assert "dropout=Dropout(p=0.0, inference=False)" in str(layer)
    assert eqx.tree_equal(layer, nn.MultiheadAttention(HEADS, SIZE, key=KEY))


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("number", [0, 1, 2, 0.1, 1e-3])
def test_a_number_for_each_leaf(dropout_p, number):
    """The axes of `vmap` or a rate of learning. What is no probability counted as one, and the
    structure differed from that of the layer.
    """
    layer = nn.MultiheadAttention(2, 8, dropout_p=dropout_p, key=jax.random.key(0))
    numbers = jax.tree.map(lambda _: number, layer)
    assert jax.tree.structure(numbers) == jax.tree.structure(layer)
    scaled = jax.tree.map(lambda x, rate: x * rate, layer, numbers)
    assert jax.tree.structure(scaled) == jax.tree.structure(layer) or number == 0


@pytest.mark.parametrize("inference", [False, 0, np.float32(0), np.float64(0)])
def test_a_rate_and_a_flag_of_any_type(inference):
    """The rate of a layer made without dropout, which a traced call must not drop in silence."""
    layer = nn.MultiheadAttention(2, 8, key=jax.random.key(0))
    where = lambda layer: (layer.dropout.p, layer.dropout.inference)
    layer = eqx.tree_at(where, layer, (0.5, inference))
    call = lambda layer: layer(*[jnp.ones((3, 8))] * 3, key=jax.random.key(1))
    assert not jnp.allclose(call(layer), layer(*[jnp.ones((3, 8))] * 3, inference=True))
    with pytest.raises(ValueError, match="Whether and how much to drop is traced"):
        jax.jit(call)(layer)


def test_ensembles_by_vmap():
    make = lambda key: nn.MultiheadAttention(2, 8, dropout_p=0.1, key=key)
    keys, x = jax.random.split(jax.random.key(0), 3), jax.random.normal(jax.random.key(1), (5, 8))
    many = jax.vmap(make)(keys)
    call = lambda layer: layer(x, x, x, inference=True)
    want = jnp.stack([call(make(key)) for key in keys])
    axes = (jax.tree.map(lambda _: 0, many),)
    for got in (eqx.filter_vmap(call)(many), jax.vmap(call, axes)(many)):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_ensembles_by_filter_vmap():
    keys = jax.random.split(KEY, 3)
    layers = eqx.filter_vmap(lambda key: nn.MultiheadAttention(HEADS, SIZE, key=key))(keys)
    got = eqx.filter_vmap(lambda layer: layer(X, X, X))(layers)
    for i, key in enumerate(keys):
        close(got[i], nn.MultiheadAttention(HEADS, SIZE, key=key)(X, X, X))


# What it adds ----------------------------------------------------------------------------------


def causal(z):
    h, t, s = z.shape
    return np.where(np.arange(s) <= np.arange(t)[:, None], z, -np.inf)


def reference(layer, query, key_, value, logits=lambda z: z, process=lambda *qkv: qkv, sinks=None, kept=1.0,
              gate=lambda out: out, scale=None):  # fmt: skip
    """Attention with projections in float64. `logits` changes `[h, t, s]`, `process` the heads."""

    def project(linear, x, heads):
        out = np.asarray(x, np.float64) @ np.asarray(linear.weight, np.float64).T
        out = out if linear.bias is None else out + np.asarray(linear.bias, np.float64)
        return out.reshape(len(x), heads, -1)

    q = project(layer.query_proj, query, layer.num_heads)
    k = project(layer.key_proj, key_, layer.num_kv_heads)
    v = project(layer.value_proj, value, layer.num_kv_heads)
    q, k, v = process(q, k, v)
    k, v = (np.repeat(x, layer.num_heads // layer.num_kv_heads, 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    z = logits(np.einsum("thd,shd->hts", q, k) * scale)
    extra = np.zeros((*z.shape[:2], 0)) if sinks is None else sinks
    z = np.concatenate([z, np.broadcast_to(extra, (*z.shape[:2], extra.shape[-1]))], -1)
    p = np.exp(z - z.max(-1, keepdims=True))
    p = (p / p.sum(-1, keepdims=True))[..., : len(key_)] * kept
    out = gate(np.einsum("hts,shv->thv", p, v))
    return project(layer.output_proj, out.reshape(len(query), -1), 1)[:, 0]


def check(layer, *inputs, call=None, tolerance=4e-6, **kwargs):
    got = eqx.filter_jit(layer)(*inputs, **(call or {}))
    np.testing.assert_allclose(got, reference(layer, *inputs, **kwargs), atol=tolerance)


def make(**kwargs):
    return nn.MultiheadAttention(HEADS, SIZE, key=KEY, **kwargs)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_num_kv_heads(kv_heads):
    layer = make(num_kv_heads=kv_heads, **ALL_SIZES)
    assert layer.key_proj.weight.shape == (kv_heads * 5, 10)
    assert layer.value_proj.weight.shape == (kv_heads * 3, 11)
    check(layer, *INPUTS)


MASKS = {
    "causal": ("causal", lambda q, k: k <= q),
    "full": ("full", lambda q, k: k >= 0),
    "offset": (Causal(2), lambda q, k: k <= q + 2),
    "lengths": (KeyPadding(jnp.array(5)) & Causal(), lambda q, k: (k < 5) & (k <= q)),
    "array": (jnp.tril(jnp.ones((T, S), bool)), lambda q, k: k <= q),
}
WINDOWS = None, 2, (3, 0), (None, 1)


@pytest.mark.parametrize("name, window", [(x, WINDOWS[i % 4]) for i, x in enumerate(MASKS)])
def test_masks_and_windows(name, window):
    mask, visible = MASKS[name]
    left, right = (
        {None: (99, 99), 2: (2, 2)}.get(window, window) if not isinstance(window, tuple) else window
    )

    def hide(z):
        q, k = np.arange(T)[:, None], np.arange(S)[None]
        inside = (q - k <= (99 if left is None else left)) & (k - q <= right)
        return np.where(visible(q, k) & inside, z, -np.inf)

    check(make(window=window), X, MEMORY, MEMORY, call=dict(mask=mask), logits=hide)


def test_windows_by_their_fields():
    assert make(window=3).window == make(window=(3, 3)).window == (3, 3)
    assert make().window is None
    np.testing.assert_array_equal(
        make(window=(2, 0))(X, X, X), make()(X, X, X, SlidingWindow(2, 0))
    )


@pytest.mark.parametrize("learned", [False, True])
def test_scale_cap_and_sinks(learned):
    number = (lambda x: jnp.array(x)) if learned else (lambda x: x)
    sinks = normal(7, HEADS, 2)
    layer = make(softmax_scale=number(0.7), logits_soft_cap=number(1.5), softmax_aux=sinks)
    kwargs = dict(
        logits=lambda z: causal(1.5 * np.tanh(z / 1.5)),
        sinks=np.asarray(sinks, float)[:, None],
        scale=0.7,
    )
    check(layer, X, X, X, call=dict(mask="causal"), **kwargs)
    loss = eqx.filter_jit(lambda layer: layer(X, X, X, "causal").var())
    gradients = eqx.filter_grad(loss)(layer)
    plain = jax.grad(loss)(layer)
    assert np.abs(gradients.softmax_aux).min() > 0
    assert len(jax.tree.leaves(layer)) == len(jax.tree.leaves(plain)) == (9 if learned else 7)
    assert make(softmax_scale=2).softmax_scale == 2.0
    for name in ("softmax_scale", "logits_soft_cap") if learned else ():
        assert getattr(gradients, name) != 0
        step = 1e-2
        ends = [
            eqx.tree_at(lambda m: getattr(m, name), layer, getattr(layer, name) + d)
            for d in (step, -step)
        ]
        slope = (loss(ends[0]) - loss(ends[1])) / (2 * step)
        np.testing.assert_allclose(getattr(plain, name), slope, rtol=0.02, atol=1e-6)


def rms(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(weight)


def layer_norm(x, weight):
    x = x - x.mean(-1, keepdims=True)
    return rms(x, weight)


@pytest.mark.parametrize("name, formula, kv_heads", [("rms", rms, 2), ("layer", layer_norm, 4)])
def test_qk_norm(name, formula, kv_heads):
    layer = make(qk_norm=name, num_kv_heads=kv_heads, **ALL_SIZES)
    scales = normal(8, 5) + 2, normal(9, 5) - 2
    layer = eqx.tree_at(lambda m: (m.query_norm.weight, m.key_norm.weight), layer, scales)
    check(layer, *INPUTS, process=lambda q, k, v: (formula(q, scales[0]), formula(k, scales[1]), v))
    gradients = jax.grad(lambda m: m(*INPUTS).var())(layer)
    for norm in (gradients.query_norm, gradients.key_norm):
        assert norm.weight.shape == (5,) and np.abs(norm.weight).max() > 0 and norm.bias is None
    low = make(qk_norm=name, dtype=jnp.bfloat16)
    assert low(*[x.astype(jnp.bfloat16) for x in (X, X, X)]).dtype == jnp.bfloat16


@pytest.mark.parametrize("kind, width", [("elementwise", 3), ("headwise", 1)])
def test_gating(kind, width):
    layer, plain = make(gating=kind, **ALL_SIZES), make(**ALL_SIZES)
    assert layer.gate_proj.weight.shape == (HEADS * width, SIZE)
    assert eqx.tree_equal(eqx.tree_at(lambda m: m.gate_proj, layer, None), plain)  # same keys

    def gate(out):
        logits = (
            np.asarray(INPUTS[0], np.float64) @ np.asarray(layer.gate_proj.weight, np.float64).T
        )
        return out / (1 + np.exp(-logits.reshape(T, HEADS, width)))

    check(layer, *INPUTS, gate=gate)
    gradients = jax.grad(lambda m: m(*INPUTS).var())(layer)
    assert np.abs(gradients.gate_proj.weight).max() > 0


def test_every_parameter_is_drawn_from_a_key_of_its_own():
    layer = nn.MultiheadAttention(HEADS, SIZE, gating="elementwise", key=KEY)
    weights = [x for x in jax.tree.leaves(layer) if jnp.ndim(x) == 2]
    assert len(weights) == 5
    for i, a in enumerate(weights):
        for b in weights[:i]:
            assert abs(np.corrcoef(np.ravel(a), np.ravel(b))[0, 1]) < 0.2


def turn(x, positions, dim, theta=1e4):
    """Su et al.: pairs `(i, i + dim/2)` of the first `dim` features, in float64."""
    out = np.array(x)
    for i in range(dim // 2):
        angle = (np.asarray(positions, float) * theta ** (-2 * i / dim))[:, None]
        a, b = x[..., i], x[..., i + dim // 2]
        out[..., i] = a * np.cos(angle) - b * np.sin(angle)
        out[..., i + dim // 2] = b * np.cos(angle) + a * np.sin(angle)
    return out


@pytest.mark.parametrize("dim", [None, 2])
def test_rotary_positions_masks_and_scores(dim):
    """Explicit positions are those of all three."""
    layer = make(rotary=nn.Rotary(dim=dim), num_kv_heads=2, score=ALiBi.geometric(HEADS))
    q, k = jnp.arange(T) + 100, jnp.arange(S) * 2 + 95

    def logits(z):
        distance = np.asarray(q)[:, None] - np.asarray(k)[None]
        slopes = np.array([2.0 ** (-8 * (i + 1) / HEADS) for i in range(HEADS)])[:, None, None]
        return np.where(distance >= 0, z - slopes * np.abs(distance), -np.inf)

    size = SIZE // HEADS
    process = lambda qh, kh, v: (turn(qh, q, dim or size), turn(kh, k, dim or size), v)
    check(
        layer, X, MEMORY, MEMORY, call=dict(mask="causal", q_positions=q, kv_positions=k),
        logits=logits, process=process, tolerance=1e-5,
    )  # fmt: skip
    if dim is None:
        moved = layer(X, MEMORY, MEMORY, "causal", q_positions=q + 1000, kv_positions=k + 1000)
        whole = layer(X, MEMORY, MEMORY, "causal", q_positions=q, kv_positions=k)
        np.testing.assert_allclose(moved, whole, atol=1e-5)


def test_one_row_at_a_time_is_the_whole():
    """Decoding: a row at its own position against the keys so far."""
    layer = make(
        rotary=nn.Rotary(), qk_norm="rms", gating="headwise", num_kv_heads=2, window=(3, 0)
    )
    whole = layer(X, X, X, "causal")
    for t in range(T):
        row = layer(X[t : t + 1], X, X, "causal", q_positions=jnp.array([t]))
        np.testing.assert_allclose(row[0], whole[t], atol=4e-6)


def test_bias_and_scores():
    """Those of the layer come first; the tables of both are learned, and shared ones may be passed."""
    table, bias = normal(10, 8, HEADS), normal(11, HEADS, T, T)
    t5 = T5Bias(table, bidirectional=False, max_distance=6)
    double = ScoreFn(lambda z, b, h, q, k: 2 * z)

    def logits(z):
        buckets = np.asarray(t5.bucket(jnp.arange(T)[:, None], jnp.arange(T)[None]))
        return causal(2 * (z + np.asarray(bias) + np.asarray(table)[buckets].transpose(2, 0, 1)))

    for layer, score in (
        (make(score=t5), double),
        (make(score=(t5, double)), None),
        (make(), [t5, double]),
    ):
        call = dict(mask="causal", bias=bias, score=score)
        check(layer, X, X, X, call=call, logits=logits, tolerance=1e-5)
    layer = make(score=t5)
    gradients = jax.grad(lambda m: m(X, X, X, "causal").var())(layer)
    used = np.asarray(t5.bucket(jnp.arange(T), jnp.int32(0)))
    assert np.abs(gradients.score.table[np.unique(used)]).min() > 0


def test_alibi_is_learned():
    layer = make(score=ALiBi(jnp.full(HEADS, 0.1)))
    loss = eqx.filter_jit(lambda layer: layer(X, X, X, "causal").var())
    slopes = jax.grad(loss)(layer).score.slopes
    for h in range(HEADS):
        ends = [
            eqx.tree_at(lambda m: m.score.slopes, layer, layer.score.slopes.at[h].add(d))
            for d in (1e-2, -1e-2)
        ]
        np.testing.assert_allclose(
            slopes[h], (loss(ends[0]) - loss(ends[1])) / 2e-2, rtol=0.05, atol=1e-6
        )


def test_order_of_norm_rotary_and_process_heads():
    seen = {}

    def process(q, k, v):
        seen.update(q=q, k=k)
        return q, k, v

    layer = make(qk_norm="rms", rotary=nn.Rotary())
    layer(X, X, X, process_heads=process)
    heads = np.asarray(X, float) @ np.asarray(layer.query_proj.weight, float).T
    want = turn(rms(heads.reshape(T, HEADS, -1), np.ones(6)), np.arange(T), 6)
    np.testing.assert_allclose(seen["q"], want, atol=1e-5)


@pytest.mark.parametrize("name", ["small blocks"])
def test_strategies_agree(name):
    kinds = {
        "blockwise": Blockwise(AttentionMetadata()),
        "dense": Dense(AttentionMetadata()),
        "small blocks": Blockwise(AttentionMetadata(blocksize_q=2, blocksize_k=3)),
    }
    extras = dict(
        num_kv_heads=2, rotary=nn.Rotary(), qk_norm="rms", gating="headwise", window=(4, 1),
        softmax_aux=jnp.ones(HEADS), logits_soft_cap=2.0, softmax_scale=0.5, dropout_p=0.2,
    )  # fmt: skip
    key = jax.random.key(5)
    want = make(**extras)(X, MEMORY, MEMORY, key=key)
    got = make(strategy=kinds[name], **extras)(X, MEMORY, MEMORY, key=key)
    np.testing.assert_allclose(got, want, atol=4e-6)


def test_dtypes_of_strategies():
    """The output of attention is rounded to the strategy's `runtime_dtype`, then cast."""
    coarse = Dense(AttentionMetadata(runtime_dtype=jnp.bfloat16))
    fine, got = make()(X, X, X), make(strategy=coarse)(X, X, X)
    assert got.dtype == jnp.float32
    assert 1e-4 < np.abs(got - fine).max() < 2e-2
    low = make(dtype=jnp.bfloat16, strategy=Dense(AttentionMetadata()))
    inputs = [x.astype(jnp.bfloat16) for x in (X, X, X)]
    close(low(*inputs), make(dtype=jnp.bfloat16)(*inputs))


class Adapted(eqx.Module):
    """A projection with an adapter of low rank and of another dtype."""

    base: eqx.nn.Linear
    down: jax.Array
    up: jax.Array

    def __call__(self, x):
        return self.base(x) + self.up @ (self.down @ x)


def narrowed(tree):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, tree)


def test_values_of_another_dtype_are_rounded_to_the_cache():
    layer = narrowed(nn.MultiheadAttention(HEADS, SIZE, key=KEY))
    adapt = lambda base: Adapted(base, normal(2, 2, SIZE), 0.1 * normal(3, SIZE, 2))
    layer = eqx.tree_at(lambda layer: layer.value_proj, layer, replace_fn=adapt)
    x = narrowed(normal(0, T, SIZE))
    cache = KVCache.empty(1, 64, HEADS, SIZE // HEADS, dtype=jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        cache, got = layer(x, mask="causal", cache=cache)
        want = layer(x, x, x, mask="causal")
    assert cache.value.dtype == jnp.bfloat16 and got.dtype == want.dtype
    np.testing.assert_allclose(*(np.asarray(x, np.float64) for x in (got, want)), rtol=0, atol=0.02)


@pytest.mark.parametrize("name", ["memory", "queries", "adapters"])
def test_heads_of_several_dtypes(name):
    x, y = normal(0, T, SIZE), normal(1, T, SIZE)
    inputs = {"memory": (narrowed(x), y, y), "queries": (x, *narrowed((y, y)))}.get(name)
    inputs = narrowed((x, y, y)) if inputs is None else inputs
    outs = []
    with jax.numpy_dtype_promotion("standard"):
        for kind in (nn.MultiheadAttention, eqx.nn.MultiheadAttention):
            layer = narrowed(kind(HEADS, SIZE, key=KEY))
            if name == "adapters":
                adapt = lambda base: Adapted(base, normal(2, 2, SIZE), 0.1 * normal(3, SIZE, 2))
                where = lambda layer: (layer.query_proj, layer.value_proj)
                layer = eqx.tree_at(where, layer, replace_fn=adapt)
            outs.append(layer(*inputs))
    assert outs[0].dtype == outs[1].dtype == jnp.float32
    np.testing.assert_allclose(*outs, rtol=0, atol=2e-3)


def test_float64(x64):
    layer = make(dtype=jnp.float64, rotary=nn.Rotary())
    x = normal(12, T, SIZE, dtype=jnp.float64)
    size = SIZE // HEADS
    process = lambda q, k, v: (turn(q, np.arange(T), size), turn(k, np.arange(T), size), v)
    check(layer, x, x, x, process=process, tolerance=1e-13)
    assert (
        eqx.nn.MultiheadAttention(HEADS, SIZE, key=KEY).query_proj.weight.dtype
        == make().query_proj.weight.dtype
    )


def test_empty_sequences():
    layer = make(use_output_bias=True)
    assert layer(X[:0], X, X).shape == (0, SIZE)
    nothing = layer(X, X[:0], X[:0])
    np.testing.assert_array_equal(nothing, np.tile(layer.output_proj.bias, (T, 1)))


def test_exchanged_projections():
    """A projection may be any callable module, as LoRA's are."""

    class Doubled(eqx.Module):
        inner: eqx.nn.Linear

        def __call__(self, x, *, key=None):
            return 2 * self.inner(x)

    layer = make(use_output_bias=True)
    doubled = eqx.tree_at(lambda m: m.output_proj, layer, replace_fn=Doubled)
    close(doubled(X, X, X), 2 * layer(X, X, X))


# Cost ------------------------------------------------------------------------------------------


def by_hand(layer, x):
    """The same for a batch, written with batch axes."""
    b, t, _ = x.shape

    def project(linear, x):
        out = jnp.einsum("btd,ed->bte", x, linear.weight)
        return out if linear.bias is None else out + linear.bias[None, None]

    q = project(layer.query_proj, x).reshape(b, t, layer.num_heads, layer.qk_size)
    k = project(layer.key_proj, x).reshape(b, t, layer.num_kv_heads, layer.qk_size)
    v = project(layer.value_proj, x).reshape(b, t, layer.num_kv_heads, layer.vo_size)
    out = eqattn.attention(q, k, v, mask=Causal()).attention_outputs
    return project(layer.output_proj, out.reshape(b, t, -1))


def mapped(layer, x):
    return jax.vmap(lambda x: layer(x, x, x, "causal"))(x)


@pytest.mark.parametrize(
    "shape, kwargs, gradient",
    [((3, 1), {}, False), ((2, 300), dict(num_kv_heads=2, **BIASES), True)],
)
def test_vmap_costs_what_a_batch_by_hand_does(shape, kwargs, gradient):
    layer = nn.MultiheadAttention(4, 64, key=KEY, **kwargs)
    x = normal(13, *shape, 64)
    results, costs = [], []
    for fn in (mapped, by_hand):
        if gradient:
            fn = jax.grad(lambda layer, x, fn=fn: fn(layer, x).sum(), (0, 1))
        compiled = jax.jit(fn).lower(layer, x).compile(DEFAULT_CODE)
        cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
        costs.append((cost["flops"], cost["bytes accessed"], memory.temp_size_in_bytes))
        results.append(jax.tree.leaves(compiled(layer, x)))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3 if gradient else 4e-6)
    assert costs[0] == costs[1]


def test_plain_jit_traces_once():
    """Layers that are equal but rebuilt, as after every step of training, share one trace."""
    traces = []

    @jax.jit
    def run(layer, x):
        traces.append(1)
        return layer(x, x, x, "causal")

    extras = dict(
        rotary=nn.Rotary(1e6, scaling=nn.Llama3Scaling()), softmax_scale=0.3, window=(3, 0)
    )
    for seed in range(3):
        layer = nn.MultiheadAttention(
            HEADS, SIZE, key=jax.random.key(seed), strategy=Blockwise(AttentionMetadata()), **extras
        )
        run(layer, X)
        run(jax.tree.map(lambda leaf: leaf, layer), X)
    assert len(traces) == 1


# Errors ----------------------------------------------------------------------------------------


def with_metadata(**kwargs):
    return make(strategy=Dense(AttentionMetadata(**kwargs)))


LAYER = make()
BATCH = normal(14, 2, T, SIZE)
ERRORS = [
    # Equinox's
    (lambda: LAYER(X, X, MEMORY), ValueError, "key and value must both be sequences of equal length"),
    (lambda: LAYER(X, X, X, process_heads=lambda q, k, v: (q, k[:3], v)), ValueError, r"process_heads must not change the shape of the heads.*\(3, 4, 6\)"),
    (lambda: LAYER(X, MEMORY, MEMORY, jnp.ones((T, T), bool)), ValueError, r"mask must have shape \(query_seq_length, kv_seq_length\).*\(7, 9\).*got \(7, 7\)"),
    (lambda: LAYER(X, X, X, jnp.ones((2, T, T), bool)), ValueError, r"\(4, 7, 7\), got \(2, 7, 7\).*DenseMask"),
    (lambda: LAYER(X, X, X, jnp.ones((1, T), bool)), ValueError, r"got \(1, 7\)"),
    # its own
    (lambda: LAYER(BATCH, BATCH, BATCH), ValueError, r"query must be one sequence.*\(2, 7, 24\).*jax.vmap"),
    (lambda: LAYER(X, BATCH, X), ValueError, r"key_ must be one sequence"),
    (lambda: LAYER(X, X, BATCH), ValueError, r"value must be one sequence"),
    (lambda: LAYER(X, X, X, "triangular"), ValueError, "mask must be one of 'causal', 'full', or None; got 'triangular'"),
    (lambda: LAYER(X, X, X, True), TypeError, "mask must be a mask module, a boolean array"),
    (lambda: LAYER(X, X, X, score="alibi"), TypeError, "score must be score modules"),
    (lambda: LAYER(X, X, X, q_positions=jnp.arange(3)), ValueError, "q_positions"),
    (lambda: make(rotary=nn.Rotary())(X, X, X, q_positions=jnp.arange(3)), ValueError, r"\(7,\).*got shape \(3,\)"),
    (lambda: make(qk_norm="l2"), ValueError, "qk_norm must be one of 'rms', 'layer', or None; got 'l2'"),
    (lambda: make(gating="swiglu"), ValueError, "gating must be one of 'elementwise', 'headwise'"),
    (lambda: make(num_kv_heads=3), ValueError, "num_kv_heads must divide num_heads=4, got 3"),
    (lambda: make(num_kv_heads=0), ValueError, "num_kv_heads must divide num_heads=4, got 0"),
    (lambda: make(window=-1), ValueError, "must be at least 0, got -1"),
    (lambda: make(window=(1, 2, 3)), ValueError, r"window must be an int or \(left, right\)"),
    (lambda: make(window=1.5), TypeError, "must be a Python int"),
    (lambda: make(dropout_p=1.0), ValueError, r"dropout_p must be in \[0, 1\), got 1.0"),
    (lambda: make(dropout_p=-0.1), ValueError, r"dropout_p must be in \[0, 1\)"),
    (lambda: make(rotary=1e4), TypeError, "rotary must be a Rotary"),
    (lambda: make(rotary=nn.Rotary(), qk_size=5), ValueError, "up to the head's 5, got 5"),
    (lambda: make(rotary=nn.Rotary(dim=8)), ValueError, "up to the head's 6, got 8"),
    (lambda: make(softmax_scale=float("inf")), ValueError, "softmax_scale must be finite"),
    (lambda: make(logits_soft_cap=-1.0), ValueError, "logits_soft_cap must be positive"),
    (lambda: make(softmax_aux=jnp.zeros(3)), ValueError, r"\[num_heads\] = \[4\]"),
    (lambda: make(score="alibi"), TypeError, "score must be score modules"),
    (lambda: make(strategy="dense"), TypeError, "strategy must be an AttentionImpl.*AttentionRegistry.create"),
    (lambda: with_metadata(softmax_scale=0.5), ValueError, "metadata has softmax_scale=0.5.*give MultiheadAttention softmax_scale="),
    (lambda: with_metadata(logits_soft_cap=5.0), ValueError, "give MultiheadAttention logits_soft_cap="),
    (lambda: with_metadata(softmax_aux=jnp.zeros(4)), ValueError, "give MultiheadAttention softmax_aux="),
    (lambda: with_metadata(dropout_prob=0.5), ValueError, "metadata has dropout_prob=0.5.*give MultiheadAttention dropout_p="),
]  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("call, kind, message", ERRORS, ids=[m for *_, m in ERRORS])
def test_errors(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("i", range(3))
def test_equinox_raises_the_same(i):
    theirs = eqx.nn.MultiheadAttention(HEADS, SIZE, key=KEY)
    with pytest.raises(ValueError) as error:
        (
            lambda: theirs(X, X, MEMORY),
            lambda: theirs(X, X, X, process_heads=lambda q, k, v: (q, k[:3], v)),
            lambda: theirs(X, MEMORY, MEMORY, jnp.ones((T, T), bool)),
        )[i]()
    assert re.search(ERRORS[i][2].split("equal")[0].split(".*")[0], str(error.value))


@pytest.mark.usefixtures("unchecked")
def test_features_that_do_not_fit():
    """Where a matrix product fails in Equinox, the message says which sizes to look at."""
    with pytest.raises(TypeError, match="contracting dimensions|incompatible shapes"):
        eqx.nn.MultiheadAttention(HEADS, SIZE, key=KEY)(X[:, :5], X, X)
    with pytest.raises(ValueError, match=r"\(7, 5\) has 5 features.*made for 24.*query_size"):
        LAYER(X[:, :5], X, X)


def test_a_strategy_put_there_by_tree_at_is_checked_too():
    layer = with_default(Dense(AttentionMetadata(softmax_scale=jnp.array(2.0))))
    with pytest.raises(ValueError, match="metadata has softmax_scale"):
        layer(X, X, X)


def with_default(strategy):
    return eqx.tree_at(lambda m: m.strategy, LAYER, strategy, is_leaf=lambda x: x is None)


def test_deterministic_is_deprecated():
    layer = dropping()
    with pytest.warns(UserWarning, match="deterministic=.*deprecated"):
        got = layer(X, X, X, deterministic=True)
    np.testing.assert_array_equal(got, layer(X, X, X, inference=True))


def test_annotations_are_true():
    """The suite checks types at run time; this checks that it does so here too."""
    with pytest.raises(Exception, match="Type-check error"):
        LAYER(X.astype(jnp.int32), X, X)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("inference", [False, np.bool_(True)])
def test_plain_gradients_where_settings_are_integers_or_numpy_flags(inference):
    layer = nn.MultiheadAttention(2, 8, dropout_p=0, key=jax.random.key(0))
    layer = eqx.tree_at(lambda x: x.dropout.inference, layer, inference)
    wanted = nn.MultiheadAttention(2, 8, key=jax.random.key(0))
    x = normal(0, 5, 8)
    grad = jax.grad(lambda layer: jnp.sum(layer(x)))
    for y, z in zip(jax.tree.leaves(grad(layer)), jax.tree.leaves(grad(wanted)), strict=True):
        np.testing.assert_array_equal(y, z)
