"""Attention finished where its blocks are visited: which calls it serves, what it reads and writes
in the caller's dtype, and its derivatives, without a kernel and of higher order.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _kernels import normal, of
from jax.sharding import AxisType, PartitionSpec as P
from matrix import bound, oracle, oracle_masks as om

from eqattn import attention, AttentionMetadata, Blockwise, Causal, KeyPadding, Ragged
from eqattn._sweep.grid import KnownTable


kernels, text_of, _ = of("tpu")
B, T, H, K, D = 2, 24, 4, 2, 8


def strategy(platform="interpret", dtype=jnp.float32, **fields):
    sizes = dict(blocksize_q=8, blocksize_k=8, runtime_dtype=dtype)
    return Blockwise(AttentionMetadata(platform=platform, **sizes | fields))


def draw(dtype=jnp.float32):
    shapes = (B, T, H, D), (B, T, K, D), (B, T, K, D)
    return [normal(i, *shape).astype(dtype) for i, shape in enumerate(shapes)]


def equations(f, *args):
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            found.append(eqn)
            for p in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                if hasattr(p, "eqns") or hasattr(p, "jaxpr"):
                    walk(getattr(p, "jaxpr", p))

    walk(jax.make_jaxpr(f)(*args).jaxpr)
    return found


def named(eqns, name):
    return [e for e in eqns if e.primitive.name == name]


def test_who_gets_a_carry():
    """Those who ask for it, and those whose code does not write results at less cost."""
    q, k, v = draw()

    def names(how, q=q, **kw):
        eqns = equations(lambda *x: attention(*x, how, **kw).attention_outputs, q, k, v)
        return {e.primitive.name for e in eqns} & {"attention_fold", "attention_attend"}

    assert names(strategy()) == {"attention_attend"}
    assert names(strategy(), return_logsumexp=True) == {"attention_attend"}
    assert names(strategy(), return_carry=True) == {"attention_fold"}
    assert names(strategy("xla")) == {"attention_fold"}
    # Where a key head has as many rows as keys, `Ragged` does what `Blockwise` does.
    assert names(Ragged(strategy().metadata), q[:, : T // 2]) == {"attention_attend"}
    assert names(Ragged(strategy().metadata), q[:, : T // 2 - 1]) == {"attention_fold"}


def test_arrays_keep_their_dtype():
    """What the backward pass reads and writes of the size of the inputs is bfloat16, and what is
    float32 is a number for each row.
    """
    q, k, v = draw(jnp.bfloat16)
    call = lambda *x: attention(*x, strategy(dtype=jnp.bfloat16), mask=Causal()).attention_outputs
    step = lambda g, *x: jax.vjp(call, *x)[1](g)
    eqns = equations(step, q, q, k, v)
    (forward,) = named(eqns, "attention_attend")
    (backward,) = named(eqns, "attention_sweep")
    assert backward.params["layout"].stage == "backward"
    assert [x.aval.dtype for x in forward.outvars] == [jnp.bfloat16] * 2 + [jnp.float32]
    assert [x.aval.dtype for x in backward.outvars] == [jnp.bfloat16] * 3
    floats = [x.aval for x in (*forward.invars, *backward.invars)]
    wide = [a for a in floats if a.dtype == jnp.float32 and a.size > B * T * H]
    assert not wide, wide
    assert kernels(step, q, q, k, v) == 0  # interpreted


@pytest.mark.parametrize("known", [True, False])
def test_a_known_list_is_a_constant(known):
    """What is known while a program is traced is not sorted by the device at each call."""
    q, k, v = draw()
    mask = Causal() if known else Causal() & KeyPadding(jnp.array([20, 24]))
    how = strategy("auto", backend="tpu")
    loss = lambda *x: attention(*x, how, mask=mask).attention_outputs.sum()
    f = jax.vmap(jax.grad(loss, (0, 1, 2)))
    args = [x[:, None] for x in (q, k, v)] if known else [x[None] for x in (q, k, v)]
    assert kernels(f, *args) == 2
    text = text_of(f, *args)
    assert ("stablehlo.sort" in text) is not known


def test_known_tables_are_equal_by_value():
    table = np.arange(6, dtype=np.int64).reshape(2, 3) % 3
    known = KnownTable.of(table)
    assert known == KnownTable.of(table.astype(np.int8)) != KnownTable.of(table.reshape(3, 2))
    assert hash(known) == hash(KnownTable.of(table))
    np.testing.assert_array_equal(known.array, table)


def judged(got, reference):
    worst = {n: bound.excess(np.asarray(x), reference[n]) for n, x in got.items()}
    assert max(worst.values()) <= 1, worst


def problem(q, k, v, sinks=None):
    fine = [np.float64(x) for x in (q, k, v)]
    sinks = None if sinks is None else np.float64(sinks)
    return oracle.Problem(*fine, scale=D**-0.5, mask=om.causal(T, T), sinks=sinks)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_without_a_kernel(dtype):
    """The program of a CPU for a call that was meant for a TPU: loops finish rows, too."""
    q, k, v = draw(dtype)
    sinks = normal(7, H, 2)
    g, g_lse = normal(8, *q.shape).astype(dtype), normal(9, B, T, H)

    @jax.jit
    def program(q, k, v, sinks, cts):
        def call(q, k, v, sinks):
            how = strategy("auto", dtype, backend="tpu", softmax_aux=sinks)
            out = attention(q, k, v, how, mask=Causal(), return_logsumexp=True)
            return out.attention_outputs, out.logsumexp

        (out, lse), pull = jax.vjp(call, q, k, v, sinks)
        mapped = jax.vmap(call, (0, 0, 0, None))(*[x[:, None] for x in (q, k, v)], sinks)
        return out, lse, pull(cts), [x[:, 0] for x in mapped]

    out, lse, grads, mapped = program(q, k, v, sinks, (g, g_lse))
    precision = bound.precision_of(dtype)
    exact = problem(q, k, v, sinks)
    values = bound.values(exact, precision)
    for x, y in ((out, lse), mapped):
        judged(dict(out=x, lse=y), values)
    want = bound.grads(exact, np.float64(g), np.float64(g_lse), precision)
    judged(dict(zip(("q", "k", "v", "sinks"), grads, strict=True)), want)


def test_reverse_over_reverse():
    """The Hessian is symmetric, so the gradient of a gradient's slope is a derivative of it."""
    q, k, v = draw()
    sinks, g = normal(7, H, 1), normal(8, *q.shape)
    directions = dict(q=normal(10, *q.shape), k=normal(11, *k.shape), v=normal(12, *v.shape))
    directions["sinks"] = normal(13, H, 1)

    def loss(arguments):
        how = strategy(softmax_aux=arguments["sinks"])
        x = [arguments[n] for n in "qkv"]
        return (attention(*x, how, mask=Causal()).attention_outputs * g).sum()

    @jax.jit
    def program(arguments):
        def slope(arguments):
            grads = jax.grad(loss)(arguments)
            return sum((grads[n] * directions[n]).sum() for n in grads)

        return jax.grad(slope)(arguments)

    got = program(dict(q=q, k=k, v=v, sinks=sinks))
    exact = problem(q, k, v, sinks)
    directions = {n: np.float64(x) for n, x in directions.items()}
    want = bound.hvps(
        exact, np.float64(g), np.zeros((B, T, H)), directions, bound.precision_of(np.float32)
    )
    judged(got, want)


def test_two_tangents():
    """Forward over forward: tangents are sweeps, too, and so have tangents."""
    q, k, v = draw()
    f = lambda x: attention(x, k, v, strategy(), mask=Causal()).attention_outputs
    along = lambda x: jax.jvp(f, (x,), (q,))[1]
    got = jax.jit(lambda x: jax.jvp(along, (x,), (q,))[1])(q)

    def exact(step):  # by a complex step: exact to rounding
        x = np.asarray(q, np.complex128) * (1 + 1j * step)
        return oracle.forward(problem(q, k, v).replace(q=x)).out

    # o((1 + t) q) = o + t o' + t^2 o'' / 2 with t = i h, so that its real part is o - h^2 o'' / 2.
    h = 1e-4
    second = 2 * (exact(0.0).real - exact(h).real) / h**2
    np.testing.assert_allclose(got, second, rtol=1e-4, atol=1e-4)


def test_in_a_shard_map_that_is_checked():
    """Where JAX knows which arrays vary over the mesh: sinks do not, and what they meet does."""
    mesh = jax.make_mesh((2,), ("dp",), (AxisType.Auto,), devices=jax.devices()[:2])
    q, k, v = draw()
    sinks, g = normal(7, H, 1), normal(8, *q.shape)

    def loss(q, k, v, sinks, g):
        how = strategy("auto", backend="tpu", softmax_aux=sinks)
        out = attention(q, k, v, how, mask=Causal()).attention_outputs
        return jax.lax.psum((out * g).sum(), "dp")

    rows = P("dp")
    over_devices = jax.shard_map(
        loss, mesh=mesh, in_specs=(rows, rows, rows, P(), rows), out_specs=P()
    )
    got = jax.jit(jax.grad(over_devices, (0, 1, 2, 3)))(q, k, v, sinks, g)
    precision = bound.precision_of(np.float32)
    want = bound.grads(problem(q, k, v, sinks), np.float64(g), np.zeros((B, T, H)), precision)
    judged(dict(zip(("q", "k", "v", "sinks"), got, strict=True)), want)


@pytest.mark.parametrize("backend", ["cpu", "tpu", "triton"])
@pytest.mark.parametrize("kind", [Blockwise, Ragged])
def test_a_sink_of_minus_infinity_has_no_gradient(kind, backend):
    """Nor a tangent: it takes nothing, also where a head has no other."""
    q, k, v = draw()
    absent = np.array([[0, 1], [0, 0], [1, 1], [1, 0]], bool)
    sinks = jnp.where(absent, -jnp.inf, normal(7, H, 2))
    g, g_lse = normal(8, *q.shape), normal(9, B, T, H)
    how = dict(platform="xla") if backend == "cpu" else dict(platform="interpret", backend=backend)

    def loss(*args):
        given = kind(AttentionMetadata(softmax_aux=args[3], **how))
        out = attention(*args[:3], given, mask=Causal(), return_logsumexp=True)
        return (out.attention_outputs * g).sum() + (out.logsumexp * g_lse).sum()

    gradients = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(q, k, v, sinks)
    # A sink of -1000 has a share of exactly 0, too, and the oracle's formulas are finite there.
    exact = problem(q, k, v, np.where(absent, -1000.0, sinks))
    want = bound.grads(exact, np.float64(g), np.float64(g_lse), bound.precision_of(jnp.float32))
    judged(dict(zip(("q", "k", "v", "sinks"), gradients, strict=True)), want)
    assert (gradients[3][absent] == 0).all()
    if backend != "triton":  # It has no forward mode.
        tangent = jax.jit(lambda x, dx: jax.jvp(lambda x: loss(q, k, v, x), (x,), (dx,))[1])
        ones = jnp.ones_like(sinks)
        np.testing.assert_allclose(tangent(sinks, ones), gradients[3].sum(), rtol=1e-4)
