"""Partial attention as a commutative monoid."""

import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ._misc import accumulation_dtype, as_array, as_dtype, as_size, as_sizes, check_floating


def safe_max(maximum: Array) -> Array:
    """The maximum as an origin for exponents: a constant, and finite where nothing was seen."""
    return jnp.maximum(lax.stop_gradient(maximum), jnp.finfo(maximum.dtype).min)


def change_of_origin(
    now: Array, before: Array, exp: Callable[[Array], Array] = jnp.exp
) -> tuple[Array, Array]:
    r"""The one place where the online softmax moves its origin, for loops and for kernels.

    Sums over the keys so far are relative to their maximum $m$: a key with logit $s$ adds
    $e^{s - m}$. With further keys the maximum is $m' \ge m$, and since
    $e^{s - m'} = e^{s - m} e^{m - m'}$, one factor brings all sums so far to the new origin.

    **Arguments:**

    - `now`: the maximum $m'$ of all logits, `-inf` where nothing was seen.
    - `before`: the maximum $m$ of those before.
    - `exp`: `jnp.exp`, or `jnp.exp2` where logits are in units of log 2.

    **Returns:** the origin of the exponents, $m'$ as a finite constant, and the factor
    $e^{m - m'}$.
    """
    origin = safe_max(now)
    return origin, exp(before - origin)


def online_softmax(logits: Array, before: Array) -> tuple[Array, Array, Array]:
    """A step of the online softmax over the last axis of logits `[rows, keys]`.

    **Arguments:**

    - `logits`: `[rows, keys]`.
    - `before`: the maximum `[rows, 1]` of the logits before.

    **Returns:** the new maximum, the exponentials relative to it, and the factor that brings what
    was relative to the maximum before to the new one.
    """
    now = jnp.maximum(before, logits.max(-1, keepdims=True, initial=-jnp.inf))
    origin, scale = change_of_origin(now, before)
    return now, jnp.exp(logits - origin), scale


class Carry(eqx.Module):
    r"""Attention over some of the keys, mergeable with attention over the others.

    It stands for $\sum_j e^{s_j} v_j$ and $\sum_j e^{s_j}$, both stored relative to the largest
    logit: `numerator` $= \sum_j e^{s_j - m} v_j$, `denominator` $= \sum_j e^{s_j - m}$,
    `max_so_far` $= m$. [`merge`][eqattn.Carry.merge] is associative and commutative to rounding
    (commutative bitwise), and `empty` is its exact identity, so keys can be split over blocks,
    devices, cache pages or a shared prefix in any way and order.

    `max_so_far` is a gauge: no result depends on it, and no gradient flows through it. It is the
    largest logit of the keys, or of the sinks where `with_sinks` added a larger one, as strategies
    whose metadata has sinks do. So with sinks it may be more than every logit of a key.

    **Arguments:**

    - `numerator`: `[*b, t, h, v]`, float32 (float64 under x64).
    - `denominator`: `[*b, t, h]`.
    - `max_so_far`: `[*b, t, h]`, `-inf` where neither a key nor a sink was seen.

    ??? cite "Reference"

        Milakov and Gimelshein, *Online normalizer calculation for softmax*, 2018
        (arXiv:1805.02867).
    """

    numerator: Float[Array, "*bth v"]
    denominator: Float[Array, " *bth"]
    max_so_far: Float[Array, " *bth"]

    def __check_init__(self) -> None:
        parts: tuple[Any, ...] = (self.numerator, self.denominator, self.max_so_far)
        if not all(hasattr(x, "shape") for x in parts):  # a tree of axes or filters
            return
        numerator, *rows = (x.shape for x in parts)
        if rows != [numerator[:-1]] * 2:
            raise ValueError(
                f"A numerator {numerator} [*b, t, h, v] needs a denominator and a max_so_far "
                f"[*b, t, h], got {rows[0]} and {rows[1]}."
            )

    @classmethod
    def empty(cls, shape: tuple[int, ...], value_dim: int, dtype: Any = jnp.float32) -> "Carry":
        """Attention over no keys: the identity of `merge`.

        **Arguments:**

        - `shape`: `(*b, t, h)`.
        - `value_dim`: the size `v` of a value.
        """
        shape, value_dim = as_sizes(shape, "shape"), as_size(value_dim, "value_dim")
        dtype = as_dtype(dtype, "dtype")
        return cls(
            jnp.zeros((*shape, value_dim), dtype),
            jnp.zeros(shape, dtype),
            jnp.full(shape, -jnp.inf, dtype),
        )

    @classmethod
    def from_logits(
        cls, logits: Float[Array, "*bt h s"], values: Float[Array, "*b s h v"]
    ) -> "Carry":
        """Attention over the given keys. Masked pairs have the logit `-inf`.

        **Arguments:**

        - `logits`: `[*b, t, h, s]`.
        - `values`: `[*b, s, h, v]`.
        """
        logits, values = _floats(logits=logits, values=values)
        *batch, _, h, s = logits.shape if logits.ndim >= 3 else (0, 0, 0)
        if logits.ndim < 3 or values.shape[:-1] != (*batch, s, h):
            raise ValueError(
                f"logits {logits.shape} must be [*b, t, h, s] for values {values.shape} "
                "[*b, s, h, v]; repeat the values' heads to match."
            )
        dtype = accumulation_dtype(logits.dtype, values.dtype)
        logits, values = logits.astype(dtype), values.astype(dtype)
        nothing = jnp.full((*logits.shape[:-1], 1), -jnp.inf, dtype)
        top, p, _ = online_softmax(logits, nothing)
        numerator = jnp.einsum("...ths,...shv->...thv", p, values, precision=lax.Precision.HIGHEST)
        return cls(numerator, p.sum(-1), lax.stop_gradient(top[..., 0]))

    @classmethod
    def from_output(
        cls, output: Float[Array, "*bth v"], logsumexp: Float[Array, " *bth"]
    ) -> "Carry":
        """From normalised attention and its logsumexp (`-inf` where no key was seen).

        **Arguments:**

        - `output`: `[*b, t, h, v]`.
        - `logsumexp`: `[*b, t, h]`; its gradient is kept. Where it is `-inf`, the output may hold
            anything.
        """
        output, logsumexp = _floats(output=output, logsumexp=logsumexp)
        _check_rows("logsumexp", logsumexp, output)
        dtype = accumulation_dtype(output.dtype, logsumexp.dtype)
        output, logsumexp = output.astype(dtype), logsumexp.astype(dtype)
        weight = _weight(logsumexp)
        output = jnp.where((logsumexp != -jnp.inf)[..., None], output, 0)
        return cls(output * weight[..., None], weight, lax.stop_gradient(logsumexp))

    @classmethod
    def from_oml(
        cls,
        output: Float[Array, "*bth v"],
        maximum: Float[Array, "..."],
        denominator: Float[Array, "..."],
    ) -> "Carry":
        """From normalised attention `o`, the maximum `m` and the denominator `l` relative to it.

        **Arguments:**

        - `output`: `[*b, t, h, v]`.
        - `maximum`, `denominator`: `[*b, t, h]`, or with a last axis of 1 as
            [`eqattn.ragged_gqa`][] gives them. Where the one is `-inf` or the other is 0, no key
            was seen, and the output may hold anything.
        """
        output, maximum, denominator = _floats(
            output=output, maximum=maximum, denominator=denominator
        )
        column = (*output.shape[:-1], 1)
        maximum, denominator = (
            x[..., 0] if x.shape == column else x for x in (maximum, denominator)
        )
        _check_rows("maximum", maximum, output)
        _check_rows("denominator", denominator, output)
        dtype = accumulation_dtype(output.dtype, maximum.dtype, denominator.dtype)
        output, maximum, denominator = (x.astype(dtype) for x in (output, maximum, denominator))
        seen = (maximum != -jnp.inf) & (denominator != 0)
        output = jnp.where(seen[..., None], output, 0)
        denominator = jnp.where(seen, denominator, 0) * _weight(maximum)
        return cls(output * denominator[..., None], denominator, lax.stop_gradient(maximum))

    def update(self, logits: Float[Array, "*bt h s"], values: Float[Array, "*b s h v"]) -> "Carry":
        """With the given keys added; see `from_logits` for the arguments."""
        return self.merge(Carry.from_logits(logits, values))

    def merge(self, other: "Carry") -> "Carry":
        """Attention over the keys of both, for the same rows."""
        if not isinstance(other, Carry):
            raise TypeError(
                f"A Carry merges with a Carry, got {type(other).__name__}; "
                "attention(..., return_carry=True).carry is one."
            )
        if self.numerator.shape != other.numerator.shape:
            raise ValueError(
                f"Carries of {self.numerator.shape} and {other.numerator.shape} (numerators "
                "[*b, t, h, v]) do not merge; broadcast them to the same rows first."
            )
        a, b = lax.stop_gradient(self.max_so_far), lax.stop_gradient(other.max_so_far)
        top, first = jnp.maximum(a, b), a >= b
        share = jnp.exp(jnp.minimum(a, b) - safe_max(top))

        def add(x, y, first, share):
            # Only one product, so that fused multiply-adds round the same in either order.
            return jnp.where(first, x, y) + jnp.where(first, y, x) * share

        return Carry(
            add(self.numerator, other.numerator, first[..., None], share[..., None]),
            add(self.denominator, other.denominator, first, share),
            top,
        )

    def with_sinks(self, sinks: Float[Array, "*#bth n"]) -> "Carry":
        """With `n` logits per row that join the denominator but have no value.

        **Arguments:**

        - `sinks`: `[..., n]`, broadcastable to `[*b, t, h, n]`.

        **Returns:** the Carry in which `max_so_far` is the largest of the sinks where that is more.

        **Raises:** `ValueError` if they do not broadcast, and for as many sinks `[h]` as heads,
        which could be one of each: write `[h, 1]`, or `[1, h]` for sinks of all heads.
        """
        (sinks,), shape = _floats(sinks=sinks), self.denominator.shape
        if sinks.ndim == 1 and shape and sinks.shape[0] == shape[-1] > 1:
            raise ValueError(
                f"sinks of shape {sinks.shape} may be one for each head or shared by all; reshape "
                f"them to {(shape[-1], 1)} or {(1, shape[-1])}."
            )
        rows = sinks.shape[:-1]
        fits = 1 <= sinks.ndim <= len(shape) + 1
        if not fits or any(n not in (1, m) for n, m in zip(rows[::-1], shape[::-1])):
            raise ValueError(
                f"sinks of shape {sinks.shape} do not broadcast to [*b, t, h, n] for rows {shape}; "
                "the last axis is n, the others are 1 or full."
            )
        sinks = sinks.astype(self.denominator.dtype)
        top = lax.stop_gradient(sinks.max(-1, initial=-jnp.inf))
        denominator = jnp.exp(sinks - safe_max(top)[..., None]).sum(-1)
        return self.merge(
            Carry(
                jnp.zeros_like(self.numerator),
                jnp.broadcast_to(denominator, shape),
                jnp.broadcast_to(top, shape),
            )
        )

    def logsumexp(self) -> Float[Array, " *bth"]:
        """`log(sum_j exp(s_j))`, `-inf` where no key was seen."""
        seen = self.denominator != 0
        safe = jnp.where(seen, self.denominator, 1)
        return jnp.where(seen, safe_max(self.max_so_far) + jnp.log(safe), -jnp.inf)

    def output(self) -> Float[Array, "*bth v"]:
        """The weighted mean of the values, 0 where no key was seen."""
        return _mean(self.numerator, self.denominator[..., None])

    def finalise(self) -> tuple[Float[Array, "*bth v"], Float[Array, " *bth"]]:
        """**Returns:** `(output, logsumexp)`; a row that saw no key has output 0 and `-inf`."""
        return self.output(), self.logsumexp()

    def to_oml(
        self,
    ) -> tuple[Float[Array, "*bth v"], Float[Array, " *bth"], Float[Array, " *bth"]]:
        """**Returns:** normalised output `o`, maximum `m` (of logits, and of sinks if there are
        any) and denominator `l`.
        """
        return self.output(), self.max_so_far, self.denominator


@ft.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _mean(numerator: Array, denominator: Array, once: bool = True) -> Array:
    """`numerator / denominator`, 0 where the denominator is; rounded `once`, or as XLA likes."""
    if once:  # else XLA would multiply by the rounded reciprocal, which it finds in a further pass
        denominator = jnp.broadcast_to(denominator, numerator.shape)
    seen = denominator != 0
    return jnp.where(seen, numerator, 0) / jnp.where(seen, denominator, 1)


@_mean.defjvp
def _mean_jvp(once, primals, tangents):
    """Its two cotangents nearly cancel in the gradient of a logit. So `ct / denominator` is rounded
    once for both, and the sum in the second is one of a tree (see `_widen`).
    """
    numerator, denominator = primals
    mean = _mean(numerator, denominator, once)
    widened = _widen(tangents[1], numerator.shape[-1])
    return mean, _mean(tangents[0] - mean * widened, denominator, False)


def _widen(x: Array, n: int) -> Array:
    """`[..., 1]` repeated to `[..., n]`, in such a way that its transpose is an accurate sum.

    XLA adds the entries of a row one after the other on a CPU, which loses up to `n / 2` roundings
    where the two cotangents of `_mean` nearly cancel. There the row is made by doubling, so that
    its transpose adds by halves and loses `log2(n)`. Other platforms sum in a tree already, and
    what is doubled would be written out to memory at each step.
    """
    return lax.platform_dependent(
        x, cpu=ft.partial(_doubled, n=n), default=ft.partial(_repeated, n=n)
    )


def _doubled(x: Array, n: int) -> Array:
    if n <= 1:
        return x[..., :n]
    half = _doubled(x, (n + 1) // 2)
    return jnp.concatenate([half, half[..., : n // 2]], -1)


def _repeated(x: Array, n: int) -> Array:
    return jnp.broadcast_to(x, (*x.shape[:-1], n))


def _weight(exponent: Array) -> Array:
    """1 with the derivative of `exp(exponent)` relative to itself; 0 at `-inf`."""
    seen = exponent != -jnp.inf
    safe = jnp.where(seen, exponent, 0)
    return jnp.where(seen, jnp.exp(safe - lax.stop_gradient(safe)), 0)


def _floats(**arrays: Any) -> list[Array]:
    """Arrays, given by their names, as JAX's. **Raises:** `TypeError` unless they are floats."""
    found = {name: jnp.asarray(as_array(x, name)) for name, x in arrays.items()}
    check_floating(**found)
    return list(found.values())


def _check_rows(name: str, rows: Array, output: Array) -> None:
    if rows.shape != output.shape[:-1]:
        raise ValueError(
            f"{name} {rows.shape} must be [*b, t, h] for output {output.shape} [*b, t, h, v]; "
            "broadcast it first."
        )
