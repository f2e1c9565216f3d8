"""The results of a call, from its Carry or from rows that are finished already."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._carry import Carry
from .._output import AttentionOutput
from .._problem.problem import Problem


def attended(spec: Problem, output: Array, logsumexp: Array | None) -> dict[str, Callable]:
    """The same results as those of `finish`, where there is no Carry, and perhaps no logsumexp."""
    both = {"outputs": output} | ({} if logsumexp is None else {"logsumexp": logsumexp})
    shapes = {name: (*spec.batch_shape, *x.shape[1:]) for name, x in both.items()}
    return {name: lambda name=name: both[name].reshape(shapes[name]) for name in both}


def as_output(results: Mapping[str, Any]) -> AttentionOutput:
    """The output that has these results, by name. A Carry is a tuple of its arrays."""
    return AttentionOutput(
        attention_weights=results.get("weights"),
        attention_outputs=results["outputs"],
        logsumexp=results.get("logsumexp"),
        carry=Carry(*results["carry"]) if "carry" in results else None,
        max_logits=results.get("max_logits"),
    )


def finish(spec: Problem, carry: Carry, weights: Any, dtype: Any) -> dict[str, Callable]:
    """The results of a fold by name, with sinks, normalised, and in the caller's batch axes and
    dtype. Each is a function, so that only what is asked for is computed.
    """
    before = carry
    if spec.sinks is not None:
        carry = carry.with_sinks(spec.sinks[None, None])

    def unflatten(x: Array) -> Array:
        return x.reshape(*spec.batch_shape, *x.shape[1:])

    def probabilities() -> Array:
        if spec.sinks is None:
            return weights
        # Without sinks p = exp(s - L), with them p' = exp(s - L'), where L and L' are the
        # logsumexps. So p' = p exp(L - L'); the factor is the share that the sinks leave to keys.
        old = before.logsumexp()
        share = jnp.exp(old - jnp.where(old == -jnp.inf, 0, carry.logsumexp()))
        return weights * jnp.swapaxes(share, 1, 2)[..., None]

    parts = (carry.numerator, carry.denominator, carry.max_so_far)
    return {
        "outputs": lambda: unflatten(carry.output().astype(dtype)),
        "weights": lambda: unflatten(probabilities().astype(dtype)),
        "logsumexp": lambda: unflatten(carry.logsumexp()),
        "carry": lambda: tuple(map(unflatten, parts)),
        "max_logits": lambda: jax.lax.stop_gradient(unflatten(before.max_so_far)),
    }
