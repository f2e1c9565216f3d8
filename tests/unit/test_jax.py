"""Every name that is not part of JAX's documented API does what the library expects of it."""

import ast
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import eqattn
from eqattn import _jax


ROOT = pathlib.Path(eqattn.__file__).parent


def mesh(kind):
    return jax.make_mesh((1,), ("x",), axis_types=(kind,), devices=jax.devices()[:1])


def test_semi_private_imports_live_in_one_module():
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            for name in names:
                assert not name.startswith("jax._src"), path
                semi = name.startswith(("jax.interpreters", "jax.extend"))
                assert not semi or path.name == "_jax.py", path


def test_a_primitive_with_every_rule():
    """The registration that the library relies on: evaluation, jvp, transpose, vmap, lowering."""
    twice = _jax.Primitive("test_twice")
    twice.def_impl(lambda x: 2 * x)
    twice.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
    _jax.mlir.register_lowering(twice, _jax.mlir.lower_fun(lambda x: 2 * x, multiple_results=False))
    _jax.ad.deflinear(twice, lambda ct: [twice.bind(ct)])
    _jax.batching.primitive_batchers[twice] = lambda args, dims: (twice.bind(*args), dims[0])
    x = jnp.arange(3.0)
    assert jax.jit(jax.vmap(jax.grad(twice.bind)))(x).tolist() == [2, 2, 2]
    assert jax.jvp(twice.bind, (x,), (x,))[1].tolist() == [0, 2, 4]


def test_jaxprs_are_called_again():
    closed = jax.make_jaxpr(lambda x: (x + 1, x * 2))(1.0)
    assert [float(y) for y in _jax.jaxpr_as_fun(closed)(3.0)] == [4, 6]
    literals = jax.make_jaxpr(lambda x: x + 1.0)(1.0).jaxpr.eqns[0].invars
    assert [isinstance(v, _jax.Literal) for v in literals] == [False, True]


def test_symbolic_zeros_and_undefined_primals():
    assert _jax.is_zero(_jax.ad.Zero(jax.typeof(jnp.ones(2))))
    assert _jax.is_zero(np.zeros(2, jax.dtypes.float0))
    assert not _jax.is_zero(jnp.zeros(2))
    assert not _jax.ad.is_undefined_primal(jnp.ones(2))


@pytest.mark.parametrize("check", [True, False])
def test_varying_axes(check):
    seen = []

    @functools.partial(
        jax.shard_map, mesh=mesh(AxisType.Auto), in_specs=P("x"), out_specs=P("x"), check_vma=check
    )
    def f(x):
        everywhere = jnp.ones(2)
        seen.append((_jax.varying_axes(x, everywhere), _jax.varying_axes(everywhere)))
        seen.append((_jax.varies(jax.typeof(x)), _jax.varies(jax.typeof(everywhere))))
        block = _jax.abstract(x, (2,), jnp.float32)
        seen.append((block.shape, jax.make_jaxpr(jnp.sin)(block).out_avals[0].shape))
        mixed = _jax.vary(everywhere, _jax.varying_axes(x))
        seen.append(_jax.varying_axes(mixed))
        return x + mixed

    jax.jit(f)(jnp.ones(2))
    axes = frozenset({"x"}) if check else frozenset()
    assert seen == [(axes, frozenset()), (check, False), ((2,), (2,)), axes]


def test_what_varies_is_replayed():
    """With literals, with what does not vary, and in functions that are jitted."""
    table = jnp.arange(4)
    traced = lambda i, n: jnp.where(
        (i < 2) & jax.lax.pcast(True, (), to="varying"), table[i % n], 7
    )
    closed = jax.make_jaxpr(traced)(1, 2)

    @functools.partial(
        jax.shard_map, mesh=mesh(AxisType.Auto), in_specs=P("x"), out_specs=P("x"), check_vma=True
    )
    def f(i):
        return _jax.replay(closed, i[0], jnp.int32(2))[0][None]

    assert jax.jit(f)(jnp.ones(1, int)).tolist() == [1]


def test_axes_that_a_map_hides():
    seen = []

    def f(x):
        seen.append(_jax.mapped_axes(jax.typeof(x).sharding.mesh))
        return x

    with jax.set_mesh(mesh(AxisType.Explicit)):
        x = jax.device_put(jnp.ones((2, 3)), P("x"))
        jax.jit(f)(x), jax.jit(jax.vmap(f))(x), jax.jit(jax.vmap(f, in_axes=1))(x)
    assert seen == [frozenset(), frozenset({"x"}), frozenset()]


def test_shardings_of_types():
    assert _jax.explicit_axes(jnp.ones(2)) == ()
    with jax.set_mesh(mesh(AxisType.Explicit)):
        x = jax.device_put(jnp.ones((2, 3)), P("x"))
        seen = []
        jax.jit(lambda x: seen.append((_jax.explicit_axes(x), _jax.sharding_of(x))) or x)(x)
    assert seen == [(("x",), ("x", None))]


def test_partitioned_automatically_is_asked_for_while_lowering():
    asked = []
    probe = _jax.Primitive("test_probe")
    probe.def_impl(lambda x: x)
    probe.def_abstract_eval(lambda x: x)

    def rule(ctx, x):
        asked.append(_jax.partitioned_automatically(ctx))
        return [x]

    _jax.mlir.register_lowering(probe, rule)
    jax.jit(probe.bind).lower(jnp.ones(2))
    assert asked == [False]
    two = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(two, P("x"))
    spec = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=sharding)
    jax.jit(probe.bind).trace(spec).lower(lowering_platforms=("cpu",))
    assert asked == [False, True]


def test_the_mark_of_varying_values_is_recognised():
    @functools.partial(
        jax.shard_map, mesh=mesh(AxisType.Auto), in_specs=P("x"), out_specs=P("x"), check_vma=True
    )
    def f(x):
        def g(y):
            return _jax.vary(y, frozenset({"x"}))

        marks.extend(e for e in jax.make_jaxpr(g)(jnp.ones(2)).jaxpr.eqns)
        return x

    marks = []
    jax.jit(f)(jnp.ones(2))
    assert [_jax.only_varies(e) for e in marks] == [True]
    add = jax.make_jaxpr(lambda x: x + 1)(1.0).jaxpr.eqns[0]
    assert not _jax.only_varies(add)
