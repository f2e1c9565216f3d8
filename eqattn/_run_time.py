"""Errors that are raised when a program runs, on all of its devices at once."""

import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

from ._jax import batching, compile_eagerly, mesh_of_program, mlir, Primitive


def raise_if(x: Int[Array, "..."], wrong: Bool[Any, "..."], message: str) -> Int[Array, "..."]:
    """Returns some integers, unless any entry of `wrong` is true: then the program raises.

    `equinox.error_if` does so on the first device. Others would wait for it in the next collective,
    until XLA ends the process. It is `equinox.error_if` here on each device, which knows of all.

    In a `jax.shard_map` of the caller's, each device raises for what it has itself.
    """
    if isinstance(wrong, np.ndarray):  # known while the program is traced
        wrong = bool(wrong.any())
    if isinstance(wrong, bool):
        return eqx.error_if(x, wrong, message)
    return _raised(x, wrong, message)


@ft.partial(jax.jit, static_argnums=2, inline=True)
def _raised(x: Array, wrong: Array, message: str) -> Array:
    mesh = jax.sharding.get_abstract_mesh()
    zero = raise_p.bind(jnp.any(wrong), message=message, mesh=mesh)
    # With `EQX_ON_ERROR=nan`, Equinox does not raise, and makes it the largest number.
    return jnp.where(zero == 0, x + zero.astype(x.dtype), jnp.iinfo(x.dtype).max)


def _zero_unless(wrong: Array, message: str) -> Array:
    """Zero, which the compiler cannot know, as a function of one bool that may raise."""
    return eqx.error_if(jnp.zeros((), jnp.int32), wrong, message)


def _lowering(ctx: Any, wrong: Any, *, message: str, mesh: Any) -> Any:
    # A program may be traced without a mesh. When it is lowered, all of its devices are known.
    mesh, fn = mesh_of_program(ctx, mesh), ft.partial(_zero_unless, message=message)
    if mesh is None:
        return mlir.lower_fun(fn, multiple_results=False)(ctx, wrong)
    on_each = jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)

    def in_context(wrong):
        with jax.sharding.use_abstract_mesh(mesh):
            return on_each(wrong)

    return mlir.lower_fun(in_context, multiple_results=False)(ctx, wrong)


def _batch(args: Any, dims: Any, **kw: Any) -> tuple[Array, None]:
    ((wrong,), (dim,)) = args, dims
    return raise_p.bind(wrong.any(dim), **kw), None


raise_p = Primitive("attention_raise")
compile_eagerly(raise_p, ("message", "mesh"))
raise_p.def_abstract_eval(lambda wrong, **_: wrong.update(dtype=jnp.dtype("int32")))
batching.primitive_batchers[raise_p] = _batch
mlir.register_lowering(raise_p, _lowering)
