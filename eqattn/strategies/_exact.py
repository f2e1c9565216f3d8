"""What every strategy of this library has in common: arguments in, a Carry folded, output."""

import abc
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, PRNGKeyArray

from .._carry import Carry
from .._masks import Causal
from .._output import AttentionOutput
from .._problem import as_mask, Problem, problem
from ._base import AttentionImpl, choose_bias, choose_dropout_key


class AbstractExact(AttentionImpl):
    """Exact attention as a fold over (query, key) pairs.

    A subclass says in which order pairs are visited, by `fold`. It has no derivative code.
    """

    @abc.abstractmethod
    def fold(self, problem: Problem) -> tuple[Carry, Array | None]:
        """The Carry `[B, T, H, ...]` of a problem without its sinks, and the probabilities
        `[B, H, T, S]` (before sinks) if the strategy has them.
        """

    def forward_native(
        self,
        q: Array,
        k: Array,
        v: Array,
        mask=None,
        bias: Array | None = None,
        init_bias: Callable[[], Array] | None = None,
        deterministic: bool = False,
        dropout_rng: PRNGKeyArray | None = None,
        causal: bool = True,
        *,
        score=None,
        q_offset=None,
        q_positions=None,
        kv_positions=None,
        return_weights: bool = False,
        return_logsumexp: bool = False,
        return_carry: bool = False,
    ) -> AttentionOutput:
        """Attention of `q` `[*b, t, h, d]` over `k` `[*b, s, k, d]` and `v` `[*b, s, k, v]`.

        **Arguments:**

        - `mask`: a mask module or a boolean array broadcastable to `[*b, h, t, s]`.
        - `bias`: added to the logits, broadcastable to `[*b, h, t, s]`. Mask and bias combine.
        - `init_bias`: called for a bias if both mask and bias are None.
        - `deterministic`: switches dropout off.
        - `dropout_rng`: a JAX key; required if dropout is active.
        - `causal`: hides the keys after each query (top-left aligned), in addition to `mask`.

        The keyword arguments are those of [`eqattn.attention`][].
        """
        dropout_rng = choose_dropout_key(self.metadata, deterministic, dropout_rng)
        if return_weights and (reason := self.unsupported({"return_weights": True})):
            raise ValueError(reason)
        bias = choose_bias(mask, bias, init_bias)
        mask = as_mask(mask)
        if causal:
            mask = Causal() if mask is None else Causal() & mask
        spec = problem(
            q,
            k,
            v,
            self.metadata,
            mask=mask,
            bias=bias,
            score=score,
            dropout_key=dropout_rng,
            q_offset=q_offset,
            q_positions=q_positions,
            kv_positions=kv_positions,
            precision=getattr(self, "precision", None),
        )
        carry, weights = self.fold(spec)
        return finish(
            spec,
            carry,
            weights,
            dtype=self.metadata.runtime_dtype,
            return_weights=return_weights,
            return_logsumexp=return_logsumexp,
            return_carry=return_carry,
        )


def finish(
    spec: Problem, carry: Carry, weights, *, dtype, return_weights, return_logsumexp, return_carry
) -> AttentionOutput:
    """Sinks, normalisation, and the caller's batch axes and dtype."""
    before = carry.logsumexp() if return_weights else None
    if spec.sinks is not None:
        carry = carry.with_sinks(spec.sinks[None, None])

    def unflatten(x):
        return x.reshape(*spec.batch_shape, *x.shape[1:])

    output = checkpoint_name(unflatten(carry.output().astype(dtype)), "attention_output")
    logsumexp = carry.logsumexp() if return_logsumexp or return_weights else None
    if return_weights:
        if spec.sinks is not None:
            share = jnp.exp(before - lax.select(before == -jnp.inf, before * 0, logsumexp))
            weights = weights * jnp.swapaxes(share, 1, 2)[..., None]
        weights = unflatten(weights.astype(dtype))
    if logsumexp is not None:
        logsumexp = checkpoint_name(unflatten(logsumexp), "attention_logsumexp")
    return AttentionOutput(
        attention_weights=weights if return_weights else None,
        attention_outputs=output,
        logsumexp=logsumexp if return_logsumexp else None,
        carry=Carry(*map(unflatten, (carry.numerator, carry.denominator, carry.max_so_far)))
        if return_carry
        else None,
    )
