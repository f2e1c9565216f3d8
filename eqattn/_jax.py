"""Every JAX name that is not part of its documented API, in one place.

`tests/test_jax.py` runs all of it on the oldest and the newest supported JAX.
"""

import contextlib
import functools

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.extend.core import (
    ClosedJaxpr as ClosedJaxpr,
    jaxpr_as_fun as jaxpr_as_fun,
    Literal as Literal,
    Primitive as Primitive,
    primitives as primitives,
)
from jax.interpreters import ad as ad, batching as batching, mlir as mlir


def compiled(jitted):
    """A jitted function that stays so where `jax.disable_jit` is in force."""

    @functools.wraps(jitted)
    def call(*args, **kwargs):
        with jax.disable_jit(False):
            return jitted(*args, **kwargs)

    return call


def compile_eagerly(primitive, static: tuple[str, ...]) -> None:
    """Makes a call of a primitive outside of any trace compile it, as JAX does with its own.

    Its own stay compiled where `jax.disable_jit` is in force. Here the compiled call binds the
    primitive again, inside of a trace; else the two would call each other for ever.
    """
    primitive.def_impl(compiled(jax.jit(primitive.bind, static_argnames=static)))


def varying_axes(*arrays) -> frozenset:
    """Mesh axes that any of the arrays varies over, inside `shard_map(..., check_vma=True)`."""
    types = [getattr(jax.typeof(a), "manual_axis_type", None) for a in arrays]
    return frozenset().union(*[t.varying for t in types if t is not None])


def varies(aval) -> bool:
    """Whether an abstract value varies over some manual mesh axis."""
    axes = getattr(aval, "manual_axis_type", None)
    return axes is not None and bool(axes.varying)


def is_narrow(x) -> bool:
    """Whether sums of `x` need a wider dtype."""
    return jnp.issubdtype(x.dtype, jnp.floating) and jnp.dtype(x.dtype).itemsize < 4


def summed_wide(fn, x):
    """`fn(x)` for a linear function `fn` whose transpose is a sum, over devices perhaps. Of narrow
    numbers it is one of float32: XLA:CPU dies of some narrow sums over devices.
    """
    if not is_narrow(x):
        return fn(x)

    @jax.custom_jvp
    def apply(x):
        return fn(x)

    @apply.defjvp
    def _(primals, tangents):
        (x,), (t,) = primals, tangents
        return apply(x), fn(t.astype(jnp.float32)).astype(x.dtype)

    return apply(x)


def vary(array, axes: frozenset):
    """Marks an array as varying over `axes`; differentiable, its transpose is a sum over them."""
    missing = tuple(axes - varying_axes(array))
    return summed_wide(lambda x: lax.pcast(x, missing, to="varying"), array) if missing else array


def abstract(array, shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
    """An abstract block of `array` that varies over the same mesh axes."""
    aval = array if isinstance(array, jax.core.ShapedArray) else jax.typeof(array)
    axes = getattr(aval, "manual_axis_type", None)
    if axes is None or not axes.varying:
        return jax.ShapeDtypeStruct(shape, dtype)
    spec = jax.sharding.PartitionSpec(*[None] * len(shape))
    sharding = jax.sharding.NamedSharding(aval.sharding.mesh, spec)
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=axes, sharding=sharding)


def typed_by_mesh(mesh):
    """A context in which arrays that are typed by a mesh have that mesh, if there is none yet."""
    if jax.sharding.get_abstract_mesh().empty:
        return jax.sharding.use_abstract_mesh(mesh)
    return contextlib.nullcontext()


def automatic(mesh):
    """The mesh with all its axes automatic."""
    return mesh.update(axis_types=(jax.sharding.AxisType.Auto,) * len(mesh.axis_names))


def explicit_axes(array) -> tuple[str, ...]:
    """The explicit axes of the mesh that an array's type is sharded over."""
    sharding = getattr(jax.typeof(array), "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    return () if mesh is None or mesh.empty else tuple(mesh.explicit_axes)


def sharding_of(array) -> tuple:
    """The partition of each axis in an array's type."""
    spec = tuple(jax.typeof(array).sharding.spec)
    return spec + (None,) * (jnp.ndim(array) - len(spec))


def is_zero(tangent) -> bool:
    """Whether a tangent or cotangent is symbolically zero (or of an integer)."""
    return type(tangent) is ad.Zero or tangent.dtype == jax.dtypes.float0


def partitioned_automatically(ctx) -> bool:
    """Whether the module being lowered is split over devices by the compiler (not by us)."""
    axes = ctx.module_context.axis_context
    if hasattr(axes, "num_devices"):
        return axes.num_devices > 1
    mesh = getattr(axes, "mesh", None)
    if mesh is None:
        return False
    automatic = set(mesh.axis_names) - set(getattr(axes, "manual_axes", mesh.axis_names))
    return any(mesh.shape[a] > 1 for a in automatic)


def only_varies(eqn) -> bool:
    """Whether an equation is the identity that marks a value as varying over a mesh axis."""
    return eqn.primitive.name == "pvary"


def interpret(jaxpr, consts, args, evaluate, literal=lambda v: v.val) -> list:
    """A jaxpr at arguments of any kind.

    **Arguments:**

    - `evaluate`: `(equation, its arguments) -> its results`.
    - `literal`: what a literal is as an argument.
    """
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args]))
    read = lambda v: literal(v) if isinstance(v, Literal) else env[v]
    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, evaluate(eqn, [read(v) for v in eqn.invars])))
    return [read(v) for v in jaxpr.outvars]


def evaluated(eqn, xs) -> list:
    """What an equation says at other arguments."""
    with eqn.ctx.manager:
        ys = eqn.primitive.bind(*xs, **eqn.primitive.get_bind_params(eqn.params))
    return ys if eqn.primitive.multiple_results else [ys]


def replay(closed: ClosedJaxpr, *args) -> list:
    """A jaxpr evaluated at arguments that may vary over more mesh axes than it was traced for."""

    def evaluate(eqn, xs):
        if only_varies(eqn):
            return [vary(x, frozenset(eqn.params["axes"])) for x in xs]
        if eqn.primitive is primitives.jit_p:
            return replay(eqn.params["jaxpr"], *xs)
        return evaluated(eqn, xs)

    return interpret(closed.jaxpr, closed.consts, args, evaluate)
