"""What every strategy of this library has in common: arguments in, a Carry folded, output."""

import abc
from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import auto_axes, PartitionSpec as P
from jaxtyping import Array, PRNGKeyArray

from .._carry import Carry
from .._compat import explicit_axes, sharding_of
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
        wanted = dict(
            return_weights=return_weights,
            return_logsumexp=return_logsumexp,
            return_carry=return_carry,
        )

        def run(self, q, k, v, options):
            spec = problem(
                q, k, v, self.metadata, precision=getattr(self, "precision", None), **options
            )
            return finish(spec, *self.fold(spec), dtype=self.metadata.runtime_dtype, **wanted)

        options = dict(
            mask=mask,
            bias=bias,
            score=score,
            dropout_key=dropout_rng,
            q_offset=q_offset,
            q_positions=q_positions,
            kv_positions=kv_positions,
        )
        if explicit_axes(q):
            return _without_explicit_axes(run, (self, q, k, v, options), q, v, wanted)
        return run(self, q, k, v, options)


def _without_explicit_axes(run, args, q, v, wanted) -> AttentionOutput:
    """Runs where the compiler propagates shardings; results are sharded like the query."""
    arrays, static = eqx.partition(args, eqx.is_array)
    *batch, t, heads, _ = sharding_of(q)
    rows = P(*batch, t, heads)
    values = P(*batch, t, heads, sharding_of(v)[-1])
    out = AttentionOutput(
        attention_weights=P(*batch, heads, t, None) if wanted["return_weights"] else None,
        attention_outputs=values,
        logsumexp=rows if wanted["return_logsumexp"] else None,
        carry=(values, rows, rows) if wanted["return_carry"] else None,
    )

    def inner(arrays):
        result = run(*eqx.combine(arrays, static))
        carry = result.carry
        parts = carry and (carry.numerator, carry.denominator, carry.max_so_far)
        return result.replace(carry=parts)

    result = auto_axes(inner, axes=explicit_axes(q), out_sharding=out)(arrays)
    return result.replace(carry=result.carry and Carry(*result.carry))


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
