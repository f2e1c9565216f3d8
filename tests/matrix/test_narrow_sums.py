"""Gradients of narrow operands are summed in float32, over blocks, batch, heads and devices, and
rounded once.
"""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqattn
from eqattn import masks as m, scores as sc

from . import oracle, oracle_masks as om
from .build import build
from .cases import AXES
from .library import library_call
from .test_conformance import mesh_of
from .test_operand_dtypes import closure


B, T, H, D = 4, 32, 8, 8
BIASES = {
    "heads": (1, H, 1, 1),
    "rows": (1, 1, T, 1),
    "keys": (1, 1, 1, T),
    "one": (1, 1, 1, 1),
    "batch": (B, 1, 1, T),
    "shared": (1, 1, T, T),
}


def arguments(bias, seed=0):
    """q, k and v in float32, so that only the rounding of the operands' gradients is left."""
    rng = np.random.default_rng(seed)
    shapes = dict(q=(B, T, H, D), k=(B, T, 2, D), v=(B, T, 2, D))
    xs = {n: jnp.asarray(rng.standard_normal(x), jnp.float32) for n, x in shapes.items()}
    narrow = dict(bias=rng.standard_normal(BIASES[bias]), slopes=rng.uniform(0.05, 0.3, H))
    narrow["table"] = rng.standard_normal((8, H))
    xs |= {n: jnp.asarray(x, jnp.bfloat16) for n, x in narrow.items()}
    cts = (rng.standard_normal((B, T, H, D)), rng.standard_normal((B, T, H)))
    return xs, tuple(jnp.asarray(x, jnp.float32) for x in cts)


def attend(strategy, xs, slopes):
    metadata = eqattn.AttentionMetadata(blocksize_q=8, blocksize_k=8)
    strategy = eqattn.AttentionRegistry.create(strategy, metadata)
    score = [slopes(xs["slopes"]), sc.T5Bias(xs["table"], max_distance=16)]
    options = dict(mask=m.Causal(), bias=xs["bias"], score=score, return_logsumexp=True)
    out = eqattn.attention(xs["q"], xs["k"], xs["v"], strategy, **options)
    return out.attention_outputs, out.logsumexp


def gradients(strategy, xs, cts, slopes):
    _, pull = jax.vjp(lambda xs: attend(strategy, xs, slopes), xs)
    return pull(cts)[0]


def half_ulps(x, exact):
    """The root mean square of errors in halves of a unit in the last place of bfloat16."""
    unit = 2.0 ** (np.floor(np.log2(abs(exact))) - 7)
    return float(np.sqrt(np.mean(((np.asarray(x, np.float64) - exact) / (unit / 2)) ** 2)))


def reference(xs, cts):
    exact = {n: np.asarray(x, np.float64) for n, x in xs.items()}
    pairs = dict(distance=om.distance(T, T), bucket=om.t5_bucket(T, T, 8, True, 16))
    problem = oracle.Problem(**exact, scale=D**-0.5, mask=om.causal(T, T), **pairs)
    return oracle.vjp(problem, *[np.asarray(x, np.float64) for x in cts])


CASES = [
    ("blockwise", 1),
    ("dense", 1),
    ("ring", 2),
    ("ring", 8),
    ("ulysses", 8),
    ("all_gather", 8),
]


CROSSED = [(case, slopes) for case in CASES for slopes in (sc.ALiBi, closure)]
# Many devices show what few do, and more of it. All run at night.
FEW = [(("blockwise", 1), sc.ALiBi), (("ring", 8), closure), (("ulysses", 8), sc.ALiBi)]


@pytest.mark.parametrize("strategy, slopes", FEW)
def test_gradients_round_once(strategy, slopes):
    """A single rounding is at most one half-ulp, and its root mean square about 0.58 of one or less:
    0.75 allows for few samples. An array as large as the logits that all devices share is rounded
    on each of them too: that is 0.82, and no more for more devices.
    """
    if strategy == ("dense", 1) and slopes is closure:
        biases = ("shared",)
    else:
        few = slopes is closure or strategy[1] == 8  # which take longest
        biases = ("keys", "shared") if few else BIASES
    errors: dict[str, list] = {}
    for bias in biases:
        xs, cts = arguments(bias)
        with mesh_of(dict(target=strategy)):
            found = jax.jit(lambda xs, cts: gradients(strategy[0], xs, cts, slopes))(xs, cts)
        exact = reference(xs, cts)
        for n in ("bias", "slopes", "table"):
            assert found[n].dtype == jnp.bfloat16
            seen = exact[n] != 0
            assert not np.any(np.asarray(found[n])[~seen])
            name = f"{n} {bias}" if n == "bias" else n
            errors.setdefault(name, []).append(half_ulps(found[n][seen], exact[n][seen]))
    rms = {n: max(x) for n, x in errors.items()}
    few = {"bias one": 1.01}  # one number
    if strategy[0] == "ulysses":
        few["bias shared"] = 0.9
    assert all(x <= few.get(n, 0.75) for n, x in rms.items()), rms


def narrow_sums(text):
    """The sums over devices of narrow numbers in a lowered or compiled module."""
    found = re.findall(r"= \(?(?:bf16|f16)\[[^=]*(?:all-reduce|reduce-scatter)(?:-start)?\(", text)
    operations = r'"stablehlo\.(?:all_reduce|reduce_scatter)"\(.*?\}\) : \((tensor<[^>]*>)'
    found += [x for x in re.findall(operations, text, re.DOTALL) if re.search("bf16|f16", x)]
    return found


def narrow_program(strategy, bias, manual, dtype):
    """The gradient of everything narrow on a mesh of batch and tokens, and its arguments."""
    xs, (ct, _) = arguments(bias)
    xs = {n: x.astype(dtype) for n, x in xs.items()}
    kind = AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("dp", "sp"), (kind, kind), devices=jax.devices()[:4])
    name = dict(axis_name="sp")

    def fn(xs):
        metadata = eqattn.AttentionMetadata(blocksize_q=8, blocksize_k=8, runtime_dtype=dtype)
        cls = eqattn.AttentionRegistry.get(strategy)
        score = [sc.ALiBi(xs["slopes"]), sc.T5Bias(xs["table"]), closure(xs["slopes"])]
        return eqattn.attention(
            xs["q"], xs["k"], xs["v"], cls(metadata, **name), bias=xs["bias"], score=score
        ).attention_outputs

    specs = {n: P("dp", "sp") if n in "qkv" else P() for n in xs}
    if manual:  # sums over devices are ours where JAX knows what varies
        fn = jax.shard_map(fn, mesh=mesh, in_specs=(specs,), out_specs=P("dp", "sp"))
    else:
        xs = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in xs.items()}
    loss = lambda xs: jnp.sum(fn(xs).astype(jnp.float32) * ct)
    return mesh, jax.jit(jax.grad(loss)), xs


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("strategy, bias", [("ring", "heads"), ("ulysses", "heads")])
def test_no_sum_over_devices_is_narrow(strategy, bias, manual, dtype):
    mesh, program, xs = narrow_program(strategy, bias, manual, dtype)
    with jax.set_mesh(mesh):
        lowered = program.lower(xs)
        assert "all_reduce" in lowered.as_text() or "all-reduce" in lowered.compile().as_text()
        assert not narrow_sums(lowered.as_text())
        assert not narrow_sums(lowered.compile().as_text())


@pytest.mark.parametrize("name", ["bias", "closure", "scale"])
def test_what_devices_add_of_their_keys_is_rounded_once(name):
    """A bias that is one number moves nothing, nor does one that a score closes over, nor the scale
    where all keys are one vector. What each device adds to its gradient cancels, which leaves what
    each of them has rounded.
    """
    xs, (ct, _) = arguments("one", seed=2)
    mesh = jax.make_mesh((4,), ("keys",), (AxisType.Auto,), devices=jax.devices()[:4])
    key = jnp.broadcast_to(xs["k"][:, :1], xs["k"].shape) if name == "scale" else xs["k"]

    def loss(x):
        scale = x.reshape(()) if name == "scale" else None
        metadata = eqattn.AttentionMetadata(mesh=mesh, softmax_scale=scale)
        score = eqattn.ScoreFn(lambda s, b, h, q, k: s + x.reshape(()).astype(s.dtype))
        kw = dict(bias=dict(bias=x), closure=dict(score=score), scale={})[name]
        strategy = eqattn.Ragged(metadata, axis_name="keys")
        out = eqattn.attention(xs["q"], key, xs["v"], strategy, **kw)
        return jnp.sum(out.attention_outputs.astype(jnp.float32) * ct)

    assert xs["bias"].dtype == jnp.bfloat16
    assert abs(jax.jit(jax.grad(loss))(xs["bias"])).max() < 1e-4


def test_narrow_sums_are_found():
    """That the test above can fail."""
    mesh = jax.make_mesh((2,), ("sp",), (AxisType.Auto,), devices=jax.devices()[:2])
    for fn in (jax.lax.psum, lambda x, n: jax.lax.psum_scatter(x, n, tiled=True)):
        f = jax.shard_map(lambda x: fn(x, "sp"), mesh=mesh, in_specs=P("sp"), out_specs=P(),
                          check_vma=False)  # fmt: skip
        assert narrow_sums(jax.jit(f).lower(jnp.ones(8, jnp.bfloat16)).as_text())


KILLING = """
import jax, jax.numpy as jnp
from eqattn import ALiBi, attention, AttentionMetadata, Causal
from eqattn.strategies import Ring

auto = (jax.sharding.AxisType.Auto,) * 3
mesh = jax.make_mesh((1, 2, 2), ("dp", "sp", "tp"), auto, devices=jax.devices()[:4])
q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16, 4, 8), jnp.bfloat16)

def loss(slopes):
    ring = Ring(AttentionMetadata(runtime_dtype=jnp.bfloat16))
    out = attention(q, k, v, ring, mask=Causal(), score=ALiBi(slopes)).attention_outputs
    return out.astype(jnp.float32).var()

with jax.set_mesh(mesh):
    gradient = jax.jit(jax.grad(loss))(jnp.full(4, 0.1, jnp.bfloat16))
assert gradient.dtype == jnp.bfloat16 and (gradient > 0).all(), gradient
"""


def test_narrow_slopes_do_not_kill_the_process():
    """XLA:CPU ends the process at some sums of bfloat16 over devices."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, "-c", KILLING]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]


LISTED = [(("blockwise", 1), True), (("ragged", 1), False)]


@pytest.mark.parametrize("target, beside", LISTED)
def test_gradients_of_two_visits_round_once(target, beside):
    """Listed keys and those of a window `beside` them are visited one after the other. Either part may be much larger than their sum.
    Where parts were rounded, the root mean square of errors was 51 to 94 half-ulps in these cases.
    """
    rng = np.random.default_rng(0)
    q, k, v, ct = (jnp.asarray(rng.normal(size=(1, 64, 2, 8)), jnp.bfloat16) for _ in range(4))
    listed = np.sort(rng.permuted(np.tile(np.arange(64), (64, 1)), axis=1)[:, :12])
    visible = om.window(64, 64, 8, 0) & beside
    visible[..., np.arange(64)[:, None], listed] = True
    mask = m.Selected(jnp.asarray(listed[None, None], jnp.int32))
    mask = mask | m.SlidingWindow(8, 0) if beside else mask
    strategy = eqattn.AttentionRegistry.create(target[0], eqattn.AttentionMetadata())

    @jax.jit
    def gradients(q, k, v):
        f = lambda *x: eqattn.attention(*x, strategy, mask=mask).attention_outputs
        return jax.vjp(f, q, k, v)[1](ct)

    with mesh_of(dict(target=target)):
        found = gradients(q, k, v)
    problem = oracle.Problem(*map(np.float64, (q, k, v)), scale=8**-0.5, mask=visible)
    want = oracle.vjp(problem, np.float64(ct), np.zeros((1, 64, 2)))
    for x, name in zip(found, "qkv", strict=True):
        assert half_ulps(np.float64(x), want[name]) <= 0.75, name


def test_gradients_of_queries_over_key_shards_round_once():
    """Each of eight devices has the gradient by its own keys: that was 31 half-ulps."""
    rng = np.random.default_rng(0)
    q, k, v, ct = (jnp.asarray(rng.normal(size=(1, 64, 2, 8)), jnp.bfloat16) for _ in range(4))
    mesh = jax.make_mesh((8,), ("sp",), (AxisType.Auto,), devices=jax.devices()[:8])
    strategy = eqattn.Ragged(eqattn.AttentionMetadata(mesh=mesh), axis_name="sp")
    f = jax.jit(lambda q: eqattn.attention(q, k, v, strategy).attention_outputs)
    found = jax.vjp(f, q)[1](ct)[0]
    problem = oracle.Problem(*map(np.float64, (q, k, v)), scale=8**-0.5)
    want = oracle.vjp(problem, np.float64(ct), np.zeros((1, 64, 2)))["q"]
    assert half_ulps(np.float64(found), want) <= 0.75


def test_gradients_of_a_cascade_round_once():
    """Those of shared pages are sums over rows, and all others are sums over levels. Where the parts
    were rounded, queries had errors of 10 half-ulps, and tables of 8.
    """
    case = {axis: values[0] for axis, values in AXES.items()}
    case |= {"target": ("cascade", 1), "mask": "causal", "length": (2, 21), "lead": (24,)}
    case |= {"heads": (8, 2), "dtype": "bfloat16", "operands": "bfloat16", "score": "both"}
    built = build(case | {"scale": "array"})
    readers = (built.kept.owner == np.arange(24)[:, None, None]).sum(1)
    assert readers.max() > 3, "no page has many rows"
    call, dynamic = library_call(built)
    pull = lambda xs, cts: jax.vjp(lambda xs: call(xs, dynamic), xs)[1](cts)[0]
    found = jax.jit(pull)(built.variants[0], (built.ct_out, built.ct_lse))
    few = {"scale": 1.01}  # one number
    for name, want in built.grads().items():
        if name in found:
            exact = want.primal
            x = np.asarray(found[name], np.float64).reshape(exact.shape)
            seen = abs(exact) > 1e-9  # Some entries of a table are read by no pair.
            assert half_ulps(x[seen], exact[seen]) <= few.get(name, 0.75), name


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("backend", ["tpu", "triton"])
def test_kernels_multiply_listed_keys_in_their_dtype(backend, beside):
    """Also where the host is a CPU, whose own products are wide."""
    q = jax.ShapeDtypeStruct((1, 64, 2, 32), jnp.bfloat16)
    mask = m.Selected(jnp.zeros((1, 1, 64, 12), jnp.int32))
    mask = mask | m.SlidingWindow(8, 0) if beside else mask
    how = dict(platform="interpret", backend=backend, blocksize_q=16, blocksize_k=16)
    strategy = eqattn.Blockwise(eqattn.AttentionMetadata(**how))
    program = jax.make_jaxpr(lambda q: eqattn.attention(q, q, q, strategy, mask=mask))(q)
    assert set(re.findall(r"operand_dtype=(\w+)", str(program))) == {"bfloat16"}
