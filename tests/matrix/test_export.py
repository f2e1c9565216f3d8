"""Programs exported for any batch and any length: what is loaded is within the bound of the oracle,
with its gradients.
"""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import eqattn
from eqattn import masks as m, scores as sc

from . import bound, oracle, oracle_masks as om


H, K, D, V, BLOCK = 4, 2, 8, 5, 4


@pytest.fixture(autouse=True)
def exportable(unchecked):
    """A symbolic size is no `int`, which is all that annotations name."""


def listed(b, t, s, ends):
    """Four keys of each query."""
    first = ends.reshape(b, 1, 1, 1) + 3 * np.arange(t, dtype=np.int32).reshape(1, 1, t, 1)
    return ((first + np.arange(4, dtype=np.int32).reshape(1, 1, 1, 4) ** 2) % s).astype(np.int32)


def mask_of(name, ends, t, s):
    if name == "selected":
        indices = listed(ends.shape[0], t, s, ends)
        return m.Causal(4) & m.Selected(indices) & m.KeyPadding(ends)
    return {
        "none": None,
        "causal": m.Causal(),
        "lengths": m.KeyPadding(ends),
        "window": m.SlidingWindow(5, 2),
        "function": m.MaskFn(lambda b, h, q, k: k < ends[b] + h),
        "and": m.Causal() & m.SlidingWindow(6, 0) & m.KeyPadding(ends),
        "array": None,
    }[name]


def visible(name, b, t, s, ends):
    lengths = lambda: om.lengths(t, s, ends)
    head = np.arange(H)[:, None, None]
    keys = np.arange(s)
    at_most_four = lambda: (listed(b, t, s, ends)[..., None] == keys).any(-2)
    return {
        "none": lambda: None,
        "causal": lambda: om.causal(t, s),
        "lengths": lengths,
        "window": lambda: om.window(t, s, 5, 2),
        "function": lambda: np.broadcast_to(
            np.arange(s) < ends[:, None, None, None] + head, (b, H, t, s)
        ),
        "and": lambda: om.causal(t, s) & om.window(t, s, 6, 0) & lengths(),
        "selected": lambda: om.causal(t, s, 4) & lengths() & at_most_four(),
        "array": lambda: np.arange(t * s).reshape(t, s) % 3 > 0,
    }[name]()


def call_of(strategy, name):
    def call(arguments, ends, array):
        metadata = eqattn.AttentionMetadata(
            blocksize_q=BLOCK, blocksize_k=BLOCK, softmax_aux=arguments["sinks"]
        )
        out = eqattn.attention(
            *[arguments[x] for x in "qkv"],
            strategy=eqattn.AttentionRegistry.create(strategy, metadata),
            mask=array if name == "array" else mask_of(name, ends, *array.shape),
            bias=arguments["bias"],
            score=sc.ALiBi(arguments["slopes"]),
            return_logsumexp=True,
        )
        return out.attention_outputs, out.logsumexp

    return call


def shapes(b, t, s):
    arguments = dict(
        q=(b, t, H, D), k=(b, s, K, D), v=(b, s, K, V), bias=(1, H, t, s), sinks=(H,), slopes=(H,)
    )
    float32 = lambda shape: jax.ShapeDtypeStruct(shape, np.float32)
    ends, array = jax.ShapeDtypeStruct((b,), np.int32), jax.ShapeDtypeStruct((t, s), np.bool_)
    return jax.tree.map(float32, arguments, is_leaf=lambda x: isinstance(x, tuple)), ends, array


def exported(strategy, name, text):
    b, t, s = jax.export.symbolic_shape(text)
    program = jax.jit(call_of(strategy, name))
    whole = jax.export.export(program)(*shapes(b, t, s))
    return jax.export.deserialize(whole.serialize(vjp_order=1))


def check(loaded, name, b, t, s):
    rng = np.random.default_rng(b)
    like, _, _ = shapes(b, t, s)
    arguments = {n: rng.standard_normal(x.shape).astype(np.float32) for n, x in like.items()}
    arguments["slopes"] = abs(arguments["slopes"]) / 5
    ends = rng.integers(1, s + 1, b).astype(np.int32)
    array = np.arange(t * s).reshape(t, s) % 3 > 0
    cts = [rng.standard_normal((b, t, H, *x)).astype(np.float32) for x in ((V,), ())]
    (out, lse), pull = jax.vjp(lambda a: loaded.call(a, ends, array), arguments)
    (grads,) = pull(tuple(map(jnp.asarray, cts)))
    exact = {n: x.astype(np.float64) for n, x in arguments.items()}
    problem = oracle.Problem(
        **exact, scale=D**-0.5, mask=visible(name, b, t, s, ends), distance=om.distance(t, s, 0)
    )
    precision = bound.precision_of(np.float32)
    references = bound.values(problem, precision)
    references |= bound.grads(problem, *[x.astype(np.float64) for x in cts], precision=precision)
    ratios = {
        n: bound.excess(np.asarray(x), references[n])
        for n, x in {"out": out, "lse": lse, **grads}.items()
    }
    assert max(ratios.values()) <= 1, ratios


MASKS = ["none", "causal", "lengths", "window", "function", "and", "array"]
CASES = [("blockwise", name) for name in MASKS] + [("ragged", "and")]


# The others show that a mask keeps symbolic sizes, as these do. They run at night.
FEW = [("blockwise", "and"), ("blockwise", "function"), ("ragged", "and")]
# A list of keys, whose number of keys is that of the lists.
LISTED = [("blockwise", "selected"), ("ragged", "selected")]


@pytest.mark.parametrize("strategy, name", [*FEW, *LISTED])
def test_any_batch(strategy, name):
    loaded = exported(strategy, name, "b, 7, 13")
    for b in (1, 3):
        check(loaded, name, b, 7, 13)


@pytest.mark.parametrize("cls", [eqattn.Ring, eqattn.Ulysses, eqattn.AllGather])
def test_several_devices_need_a_batch_that_is_known(cls):
    """JAX ends the process when it loads any `jax.shard_map` over several devices in a program with
    open sizes. A program with a known batch runs there.
    """
    mesh = eqattn.ring_mesh(devices=jax.devices()[:2])
    strategy = cls(eqattn.AttentionMetadata(mesh=mesh))
    call = jax.jit(lambda *xs: eqattn.attention(*xs, strategy, mask="causal").attention_outputs)
    tokens = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "sp"))
    like = lambda b: [jax.ShapeDtypeStruct((b, 8, 2, 4), jnp.float32, sharding=tokens)] * 3
    (b,) = jax.export.symbolic_shape("b")
    with pytest.raises(ValueError, match="Export a program for each size"):
        jax.export.export(call)(*like(b))
    program = jax.export.deserialize(jax.export.export(call)(*like(3)).serialize())
    xs = jax.random.normal(jax.random.key(0), (3, 3, 8, 2, 4))
    exact = [np.asarray(x, np.float64) for x in xs]
    problem = oracle.Problem(*exact, scale=0.5, mask=np.tri(8, dtype=bool)[None, None])
    want = bound.values(problem, bound.precision_of(np.float32))["out"]
    got = jax.jit(program.call)(*(jax.device_put(x, tokens) for x in xs))
    assert bound.excess(np.asarray(got), want) <= 1


@pytest.mark.parametrize("platform", ["xla", "interpret"])
@pytest.mark.parametrize("block", [1, 64])
def test_lists_of_any_batch(platform, block):
    """Lists of keys and of blocks, each batch element having its own."""
    (b,) = jax.export.symbolic_shape("b")
    like = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    strategy = eqattn.Blockwise(eqattn.AttentionMetadata(platform=platform))

    def call(indices, q, k, v):
        mask = m.Selected(indices, block, block)
        return eqattn.attention(q, k, v, strategy, mask=mask).attention_outputs

    rows, t = 128 // block, 128
    arrays = (like(jnp.float32, b, t, 1, D) for _ in range(3))
    program = jax.export.export(jax.jit(call))(like(jnp.int32, b, 1, rows, 1), *arrays)
    loaded = jax.export.deserialize(program.serialize())
    rng = np.random.default_rng(0)
    for n in (1, 3):
        indices = rng.integers(0, rows, (n, 1, rows, 1), np.int32)
        q, k, v = rng.normal(size=(3, n, t, 1, D)).astype(np.float32)
        seen = om.selected(t, t, indices, block, block)
        given = [np.float64(x) for x in (q, k, v)]
        problem = oracle.Problem(*given, scale=D**-0.5, mask=seen)
        want = bound.values(problem, bound.precision_of(np.float32))["out"]
        assert bound.excess(np.asarray(loaded.call(indices, q, k, v)), want) <= 1


SHOWN = np.arange(40) % 3 > 0
OWN = {
    "tree": lambda row: dict(mask=m.Tree(row)),
    "offset": lambda row: dict(
        mask=m.MaskFn(lambda b, h, q, k: jnp.asarray(SHOWN)[q - k + 12]), q_offset=row[:, 0]
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_what_each_row_has_of_its_own(name):
    """A tree, or an offset by which a mask reads a table. Both raised from inside of JAX."""
    (b,) = jax.export.symbolic_shape("b")
    like = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    call = lambda row, q, k, v: eqattn.attention(q, k, v, **OWN[name](row)).attention_outputs
    arrays = (like(jnp.float32, b, 7, 1, D) for _ in range(3))
    loaded = jax.export.export(jax.jit(call))(like(jnp.int32, b, 7), *arrays)
    rng = np.random.default_rng(0)
    for n in (1, 3):
        # A parent comes before its token, and a root has -1. The first number of a row is its offset.
        row = rng.integers(0, np.maximum(np.arange(7), 1), (n, 7), np.int32)
        row[:, 0] = -1 if name == "tree" else rng.integers(0, 9, n)
        seen = np.zeros((n, 1, 7, 7), bool)
        for i in range(n):
            for query in range(7):
                if name == "tree":
                    token = query
                    while token >= 0:
                        seen[i, 0, query, token], token = True, row[i, token]
                else:
                    seen[i, 0, query] = SHOWN[row[i, 0] + query - np.arange(7) + 12]
        q, k, v = rng.normal(size=(3, n, 7, 1, D)).astype(np.float32)
        given = [np.float64(x) for x in (q, k, v)]
        problem = oracle.Problem(*given, scale=D**-0.5, mask=seen)
        want = bound.values(problem, bound.precision_of(np.float32))["out"]
        assert bound.excess(np.asarray(loaded.call(row, q, k, v)), want) <= 1


@pytest.mark.parametrize("strategy, name", FEW)
def test_any_batch_and_length(strategy, name):
    loaded = exported(strategy, name, f"b, {BLOCK}*t, {BLOCK}*s")
    for b, t, s in ((1, 4, 4), (3, 12, 8)):
        check(loaded, name, b, t, s)


@pytest.mark.parametrize("name", ["and", "array"])
def test_dense_takes_lengths_of_any_size(name):
    loaded = exported("dense", name, "b, t, s")
    for b, t, s in ((1, 1, 1), (2, 5, 3), (3, 1, 7)):
        check(loaded, name, b, t, s)


@pytest.mark.parametrize("strategy", ["blockwise", "ragged"])
@pytest.mark.parametrize("text, missing", [("2, t, 8", "query"), ("2, 8, 2*s", "key")])
def test_a_length_whose_blocks_are_not_of_one_size_raises(strategy, text, missing):
    with pytest.raises(ValueError, match=rf"{missing} has .* tokens.*blocksize_.*'4\*n'"):
        exported(strategy, "causal", text)
