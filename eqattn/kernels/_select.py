"""What kernels there are, for which visits, and why there is none for the others."""

import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from .._jax import partitioned_automatically
from .._sweep.grid import Layout
from .._sweep.lowering import register_kernel, Tag


_NO_KERNEL = set(
    "acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt cond cosh cumlogsumexp cummax "
    "cummin cumprod cumsum digamma dynamic_slice dynamic_update_slice erfc expm1 gather igamma "
    "igammac lgamma polygamma reduce reduce_precision reduce_prod reduce_xor "
    "regularized_incomplete_beta rev scan scatter scatter-add scatter-max scatter-min scatter-mul "
    "scatter-sub sinh sort top_k while zeta".split()
)


def too_general(jaxpr: Any) -> str:
    """The name of an operation in a block function that the compiler of kernels does not know."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _NO_KERNEL:
            return eqn.primitive.name
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner) and (name := too_general(getattr(inner, "jaxpr", inner))):
                return name
    return ""


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns")


def no_kernel(ctx, layout: Layout, visits: Sequence) -> str:
    """Why no kernel for TPUs can run a visit of the grid; empty if one can."""
    if partitioned_automatically(ctx):
        return (
            "the compiler cannot split it over the devices of a mesh; call under jax.set_mesh with "
            "a mesh all of whose axes shard batch or heads, as metadata.partition_axis says and as "
            "divides them, or a ring; or call in jax.shard_map"
        )
    if layout.listed > 2**17 or max(layout.sides) >= 2**14:
        return f"its list of {layout.listed} pairs of blocks is too long; give larger block sizes"
    if jnp.result_type(float) == jnp.float64:
        return "it computes in 32 bits and jax_enable_x64 is set"
    name = next(filter(None, (too_general(j.jaxpr) for _, j in visits)), "")
    return name and f"its mask or score has a {name}, which the compiler of kernels does not know"


@register_kernel
def tpu_kernel(ctx, layout: Layout, tag: Tag | None, visits: Sequence) -> Any:
    """The kernel for TPUs of a visit, None where it has none."""
    platforms = tuple(ctx.module_context.platforms)
    hot = tag is not None and tag.stage in (("fold",) if layout.ragged else ("fold", "backward"))
    kernel = layout.kernel if hot else ""
    if kernel == "pallas" and platforms != ("tpu",):
        raise ValueError(
            f"platform='pallas' on a TPU cannot run on {platforms}: use platform='interpret' "
            "there, or 'auto'."
        )
    if kernel == "interpret" and jnp.result_type(float) == jnp.float64:
        raise ValueError("platform='interpret': kernels compute in 32 bits; unset jax_enable_x64.")
    chosen = kernel == "interpret"
    if kernel and not chosen and platforms == ("tpu",):
        reason = no_kernel(ctx, layout, visits)
        if reason and kernel == "pallas":
            raise ValueError(
                f"platform='pallas': there is no kernel for this call ({reason}); "
                "platform='auto' or 'xla' runs it as XLA code."
            )
        chosen = not reason
    if not chosen:
        return None
    from . import tpu

    return ft.partial(tpu.traverse, interpret=kernel == "interpret")
