"""The only module that uses names of JAX outside of its documented API.

`tests/unit/test_jax.py` runs all of it on the oldest and the newest supported JAX.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.extend.core import (
    jaxpr_as_fun as jaxpr_as_fun,
    jaxprs_in_params,
    Literal as Literal,
    Primitive as Primitive,
    primitives as primitives,
)
from jax.interpreters import (
    ad as ad,
    batching as batching,
    mlir as mlir,
    partial_eval as pe,
)


def compiled(jitted):
    """A jitted function that stays compiled where `jax.disable_jit` is in force."""

    @functools.wraps(jitted)
    def call(*args, **kwargs):
        with jax.disable_jit(False):
            return jitted(*args, **kwargs)

    return call


def compile_eagerly(primitive, static: tuple[str, ...]) -> None:
    """Lets a call of a primitive outside of any trace compile it, as JAX does with its own.

    The implementation of the primitive is a jitted function that binds it again. It must stay
    jitted where `jax.disable_jit` is in force, as JAX's own primitives do. Without the trace inside
    of it, bind and implementation would call each other for ever.

    **Arguments:**

    - `primitive`: the primitive.
    - `static`: the names of its parameters, which are static.
    """
    primitive.def_impl(compiled(jax.jit(primitive.bind, static_argnames=static)))


def inputs_read(closed) -> list[bool]:
    """Which inputs the results of a closed jaxpr depend on."""
    return pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.out_avals))[1]


def with_inputs(closed, kept: list[bool]):
    """A closed jaxpr without constants, of those of its inputs that are `kept`. Its results depend
    on no others.
    """
    outputs = [True] * len(closed.out_avals)
    return closed.replace(jaxpr=pe.dce_jaxpr(closed.jaxpr, outputs, instantiate=kept)[0])


def varying_axes(*arrays) -> frozenset:
    """The mesh axes that any of the arrays varies over in a `shard_map(..., check_vma=True)`."""
    types = [getattr(jax.typeof(a), "manual_axis_type", None) for a in arrays]
    return frozenset().union(*[t.varying for t in types if t is not None])


def varies(aval) -> bool:
    """Whether an abstract value varies over some manual mesh axis."""
    axes = getattr(aval, "manual_axis_type", None)
    return axes is not None and bool(axes.varying)


def is_narrow(x) -> bool:
    """Whether `x` has floats of less than 32 bits, so that sums of it need a wider dtype."""
    return jnp.issubdtype(x.dtype, jnp.floating) and jnp.dtype(x.dtype).itemsize < 4


def shadow_of(x):
    """What `summed_wide` takes as the `shadow` of an array; None if sums of it are wide anyway."""
    return x.astype(jnp.float32) if is_narrow(x) else None


def summed_wide(fn, x, *args, shadow=None, moved=None):
    """The result of a function that is linear in an array, and whose transpose is taken in float32
    for narrow numbers.

    The derivative of a linear `fn` is `fn` itself, here of a tangent that is cast to float32 first
    and back afterwards. The transpose of these three steps sums cotangents in float32. XLA:CPU
    crashes on some sums of narrow numbers over devices, which such transposes are.

    Where `fn` is applied in each turn of a loop, the turns add up cotangents, too. So the first
    step is taken before the loop, where it makes the shadow. No turn reads what the shadow holds:
    only its tangent is used, and XLA drops the array.

    **Arguments:**

    - `fn`: a function of `x` and `args`.
    - `x`: an array.
    - `args`: integers, such as indices. In a loop, `fn` must not close over arrays.
    - `shadow`: `shadow_of(x)`, made before a loop; None makes it here. With a `moved` it is an
        array, also of wide numbers.
    - `moved`: what `fn` is of the tangent of the shadow, if that has another shape than `x`.
    """
    if moved is None and not is_narrow(x):
        return fn(x, *args)

    @jax.custom_jvp
    def apply(x, shadow, *args):
        return fn(x, *args)

    @apply.defjvp
    def _(primals, tangents):
        (x, shadow, *args), (_, t, *_) = primals, tangents
        out = apply(x, shadow, *args)
        return out, (moved or fn)(t, *args).astype(out.dtype)

    return apply(lax.stop_gradient(x), shadow_of(x) if shadow is None else shadow, *args)


def vary(array, axes: frozenset):
    """An array marked as varying over `axes`. The transpose of this is a sum over them."""
    missing = tuple(axes - varying_axes(array))
    return summed_wide(lambda x: lax.pcast(x, missing, to="varying"), array) if missing else array


def abstract(array, shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
    """An abstract array of a shape and dtype that varies over the same mesh axes as `array`."""
    aval = array if isinstance(array, jax.core.ShapedArray) else jax.typeof(array)
    axes = getattr(aval, "manual_axis_type", None)
    if axes is None or not axes.varying:
        return jax.ShapeDtypeStruct(shape, dtype)
    spec = jax.sharding.PartitionSpec(*[None] * len(shape))
    sharding = jax.sharding.NamedSharding(aval.sharding.mesh, spec)
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=axes, sharding=sharding)


def typed_by_mesh(mesh):
    """A context with the given mesh, for arrays whose types name it, unless one is set already."""
    if jax.sharding.get_abstract_mesh().empty:
        return jax.sharding.use_abstract_mesh(mesh)
    return contextlib.nullcontext()


def automatic(mesh):
    """The mesh with the type of all its axes set to automatic."""
    return mesh.update(axis_types=(jax.sharding.AxisType.Auto,) * len(mesh.axis_names))


def explicit_axes(array) -> tuple[str, ...]:
    """The explicit axes of the mesh in an array's type; none if it has no mesh."""
    sharding = getattr(jax.typeof(array), "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    return () if mesh is None or mesh.empty else tuple(mesh.explicit_axes)


def mapped_axes(mesh) -> frozenset:
    """The explicit axes of a mesh that shard what a `jax.vmap` around this call maps over.

    The types of arrays hide these axes, and no `jax.shard_map` inside may name them. One that names
    no axes is manual over all others.
    """
    found = set(mesh.axis_names)

    def look():
        found.difference_update(jax.sharding.get_abstract_mesh().manual_axes)
        return jnp.zeros(())

    P = jax.sharding.PartitionSpec
    jax.eval_shape(jax.shard_map(look, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False))
    return frozenset(found)


def sharding_of(array) -> tuple:
    """The mesh axes that shard each axis of an array, by its type; None where none does."""
    spec = tuple(jax.typeof(array).sharding.spec)
    return spec + (None,) * (jnp.ndim(array) - len(spec))


def names_of(entry) -> tuple[str, ...]:
    """The mesh axes of an entry of a specification."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def without_explicit_axes(run: Callable, args: tuple, typed, out_sharding) -> Any:
    """Calls `run(*args)` where the compiler propagates shardings, if the mesh in the type of the
    array `typed` has explicit axes. `out_sharding` are the specs of what it returns.
    """
    if not (axes := explicit_axes(typed)):
        return run(*args)
    arrays, static = eqx.partition(args, eqx.is_array)
    inner: Any = jax.sharding.auto_axes(
        lambda arrays: run(*eqx.combine(arrays, static)), axes=axes, out_sharding=out_sharding
    )
    with typed_by_mesh(jax.typeof(typed).sharding.mesh):
        return inner(arrays)


def keeping_sharding(move: Callable, x: Any) -> Any:
    """Calls `move`, whose result has the shape of `x`, and on explicit axes its sharding."""
    spec = jax.sharding.PartitionSpec(*sharding_of(x))
    return without_explicit_axes(move, (x,), x, spec)


def entries_at(x: Any, indices: Any) -> Any:
    """Does `x[indices]`. On explicit axes, the result is sharded as the indices and the other axes
    of `x` are.
    """
    take = lambda x, indices: x[indices]
    typed = next((a for a in (x, indices) if explicit_axes(a)), None)
    if typed is None:
        return take(x, indices)
    lead = sharding_of(indices)
    used = {name for entry in lead for name in names_of(entry)}
    rest = [None if used.intersection(names_of(entry)) else entry for entry in sharding_of(x)[1:]]
    spec = jax.sharding.PartitionSpec(*lead, *rest)
    return without_explicit_axes(take, (x, indices), typed, spec)


def is_zero(tangent) -> bool:
    """Whether a tangent or cotangent is symbolically zero, or belongs to an integer."""
    return type(tangent) is ad.Zero or tangent.dtype == jax.dtypes.float0


def zero_tangent(x):
    """The symbolically zero tangent of an array, of integers too."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def compiles_for_cpu(ctx) -> bool:
    """Whether the module that is lowered is for a CPU only."""
    return tuple(ctx.module_context.platforms) == ("cpu",)


def partitioned_automatically(ctx) -> bool:
    """Whether the compiler will split the module that is lowered over several devices.

    Axes that a `shard_map` around it has made manual are split already, and do not count.
    """
    axes = ctx.module_context.axis_context
    if hasattr(axes, "num_devices"):
        return axes.num_devices > 1
    mesh = getattr(axes, "mesh", None)
    if mesh is None:
        return False
    automatic = set(mesh.axis_names) - set(getattr(axes, "manual_axes", mesh.axis_names))
    return any(mesh.shape[a] > 1 for a in automatic)


def mesh_of_program(ctx, traced):
    """A mesh of all devices over which the compiler will split the module that is lowered. It is
    None if there is one device, and in a `shard_map` around it. In an eager `jax.vmap` over an
    explicit axis it is None, too, as no `shard_map` is manual over all axes there.

    **Arguments:**

    - `traced`: the mesh in whose context the program was traced. A `shard_map` is lowered for that.
    """
    count = getattr(ctx.module_context.axis_context, "num_devices", 1)
    mesh = jax.sharding.AbstractMesh((count,), ("devices",))
    mesh = traced if not traced.empty and traced.size == count else mesh
    return None if count == 1 or mapped_axes(mesh) else mesh


def only_varies(eqn) -> bool:
    """Whether an equation is the identity that marks a value as varying over a mesh axis."""
    return eqn.primitive.name == "pvary"


def literal_value(v):
    """The value of a literal, which has a dtype: JAX keeps some as numbers of Python."""
    return v.val if hasattr(v.val, "dtype") else v.aval.dtype.type(v.val)


CALLS = {
    primitives.jit_p: "jaxpr",
    primitives.custom_jvp_call_p: "call_jaxpr",
    primitives.custom_vjp_call_p: "call_jaxpr",
}
"""Calls that an interpreter replaces by their bodies, and the parameters that hold these."""


def interpret(jaxpr, consts, args, evaluate, literal=literal_value) -> list:
    """The results of a jaxpr at arguments of any kind, intervals for example.

    **Arguments:**

    - `jaxpr`: an open jaxpr.
    - `consts`, `args`: the arguments for its constants and for its inputs.
    - `evaluate`: a function `(equation, list of its arguments) -> list of its results`.
    - `literal`: a function from a literal to an argument, by default its value.
    """
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args]))
    read = lambda v: literal(v) if isinstance(v, Literal) else env[v]
    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, evaluate(eqn, [read(v) for v in eqn.invars])))
    return [read(v) for v in jaxpr.outvars]


def evaluated(eqn, xs) -> list:
    """The results of an equation at other arguments."""
    with eqn.ctx.manager:
        ys = eqn.primitive.bind(*xs, **eqn.primitive.get_bind_params(eqn.params))
    return ys if eqn.primitive.multiple_results else [ys]


def replay(closed, *args) -> list:
    """A jaxpr evaluated at arguments that may vary over more mesh axes than it was traced for."""

    def evaluate(eqn, xs):
        if only_varies(eqn):
            return [vary(x, frozenset(eqn.params["axes"])) for x in xs]
        if eqn.primitive is primitives.jit_p:
            return replay(eqn.params["jaxpr"], *xs)
        axes = varying_axes(*xs)
        if axes and not list(jaxprs_in_params(eqn.params)):
            # Its arguments varied alike when it was traced, and must do so here, literals too.
            xs = [vary(x, axes) for x in xs]
        return evaluated(eqn, xs)

    return interpret(closed.jaxpr, closed.consts, args, evaluate)
