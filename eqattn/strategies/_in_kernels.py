"""Which masks and scores kernels can hold, and why not."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import Literal
from .._pairs import over_block
from .._problem.lookups import without_lookups
from .._problem.problem import is_unsure, of_a_user
from .._sweep.lowering import Lowering
from ..masks._base import AbstractMask, leaf_terms, placed, split_list, visible
from ..scores._base import AbstractScore


def counts_up(strategy: Any, mask: AbstractMask | None, *positions: Any) -> bool:
    """Whether positions count up where kernels visit tokens, for some sizes. Then they may read
    what depends on `q - k` by diagonals. `reads_differences` decides for a problem.

    **Arguments:**

    - `strategy`: an `AbstractFoldStrategy`.
    - `positions`: those of queries and keys that a call has, or None.
    """
    # Kernels gather the keys of a list.
    moved = any(term.moves_positions or term.selects for term in leaf_terms(mask))
    elsewhere = strategy.reads_stored or strategy.shards_tokens()
    return not (moved or elsewhere or strategy.fixed) and all(x is None for x in positions)


def untried_in(
    kernels: Lowering,
    mask: AbstractMask | None,
    scores: Sequence[AbstractScore],
    differences: bool,
) -> str:
    """Why kernels are not tried with a mask and scores; empty if they are. The last argument is
    that of `known_refusal`.
    """
    for part in (*leaf_terms(mask), *scores):
        axes: list[str] = []
        # This only looks at the operands, and computes none.
        jax.eval_shape(lambda: [axes.append(o.axes) or o.array for o in part.operands()])
        if any(x.endswith("f") for x in axes):
            return f"an operand of {type(part).__name__} has features, which kernels do not read"
    # XLA code would run in the kernels' blocks, which are small for it. What is looked up takes
    # some milliseconds, so those whose kernels are known are left out.
    masks = [x for x in leaf_terms(mask) if not x.selects and is_unsure(x)]
    scores = [*filter(is_unsure, scores)]
    if kernels.required:
        # A visit that lacks an operation raises, too. It alone knows for sure whether positions
        # count up, as `Ragged` copies some keys into order.
        own = [x for x in scores if of_a_user(x)]
        reason = _operation_without_kernel(kernels, masks, [], differences=True)
        return reason or _operation_without_kernel(kernels, [], own, differences)
    return _operation_without_kernel(kernels, masks, scores, differences)


def known_refusal(
    kernels: Lowering,
    mask: AbstractMask | None,
    scores: Sequence[AbstractScore],
    dtype: Any,
    differences: bool,
) -> str:
    """Why no call of any shape can run in kernels; empty if some can.

    **Arguments:**

    - `dtype`: that of the queries, or None for any.
    - `differences`: whether positions count up, so that what is looked up by `q - k` may be found
        outside of kernels.
    """
    # Without x64, a call sees arrays of 64 bits as arrays of 32.
    dtype = None if dtype is None else jax.dtypes.canonicalize_dtype(dtype)
    reason = "" if dtype is None else kernels.unsupported_dtype(dtype)
    reason = reason or untried_in(kernels, mask, scores, differences)
    if not reason:
        listed = any(term.selects for term in leaf_terms(mask))
        masks = split_list(mask)[1:] if listed else [mask]  # A list is not left to kernels.
        masks = [x for x in masks if isinstance(x, AbstractMask)]
        reason = _operation_without_kernel(kernels, masks, scores, differences)
    return reason or kernels.unavailable()


def other_kernels(kernels: Lowering, *asked: Any) -> str:
    """The platform whose kernels can run what `kernels` cannot, as it is written in messages; empty
    if there is none. The other arguments are those of `known_refusal`.
    """
    name, other = kernels.instead() or ("", None)
    return "" if other is None or known_refusal(other, *asked) else f"{name!r}, "


def _left_to_kernels(
    kernels: Lowering, part: AbstractMask | AbstractScore, differences: bool
) -> Any:
    """The jaxpr of a mask or a score over a block of 2 keys and 2 queries. Lookups by query or by
    key are left out, as they are done outside of kernels. So are those by `differences`, where the
    kernels repeat diagonals.
    """
    part = without_lookups(part, differences and kernels.repeats_diagonals)

    def block(axes, dtype):
        return jax.ShapeDtypeStruct((1 + ("s" in axes), 1 + ("t" in axes)), dtype)

    is_score = isinstance(part, AbstractScore)
    args = [block("ts", jnp.float32)] * is_score
    args += [block(axes, jnp.int32) for axes in ("", "", "t", "s")]
    args += [block(operand.axes, operand.array.dtype) for operand in part.operands()]
    fn = part.transform if is_score else visible(part)
    return _without_unused(jax.make_jaxpr(lambda *xs: over_block(fn, xs))(*args).jaxpr)


def _without_unused(jaxpr: Any) -> Any:
    """A jaxpr without the equations that no result follows from, as kernels leave them out."""
    needed, kept = {v for v in jaxpr.outvars if not isinstance(v, Literal)}, []
    for eqn in reversed(jaxpr.eqns):
        if needed & set(eqn.outvars):
            kept.append(eqn)
            needed |= {v for v in eqn.invars if not isinstance(v, Literal)}
    return jaxpr.replace(eqns=kept[::-1])


def _operation_without_kernel(
    kernels: Lowering,
    masks: Sequence[AbstractMask],
    scores: Sequence[AbstractScore],
    differences: bool,
) -> str:
    """Why the compiler of kernels cannot translate a mask or a score; empty if it can.

    Each is traced over a small block, of 2 keys and 2 queries, and its operations are looked up.
    Interpreted kernels are asked, too: they show what compiled ones compute.
    """
    at = np.arange(2, dtype=np.int32)[None]
    masks = [placed(x, (), 1, at, at)[0] for x in masks]
    for part in (*masks, *scores):
        jaxpr, kind = _left_to_kernels(kernels, part, differences), type(part).__name__
        if of_a_user(part):
            if reason := kernels.unsupported_function(jaxpr, isinstance(part, AbstractMask)):
                return f"a {kind} {reason}"
        elif name := kernels.unsupported_primitive(jaxpr):
            return f"{kind} has a {name}, which the compiler of kernels does not know"
    return ""
