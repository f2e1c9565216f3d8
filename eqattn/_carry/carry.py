"""The Carry: attention over some of the keys, which forms a commutative monoid under `merge`."""

import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .._misc import accumulation_dtype, as_array, as_dtype, as_size, as_sizes, check_floating
from .rows import logsumexp, on_common_axes, online_softmax, row_mean, safe_max


class Carry(eqx.Module):
    r"""Attention over some of the keys, mergeable with attention over the others.

    It stands for $\sum_j e^{s_j} v_j$ and $\sum_j e^{s_j}$, both stored relative to the largest
    logit: `numerator` $= \sum_j e^{s_j - m} v_j$, `denominator` $= \sum_j e^{s_j - m}$,
    `max_so_far` $= m$. [`merge`][eqattn.Carry.merge] is associative and commutative to rounding
    (commutative bitwise), and `empty` is its exact identity. So keys can be split over blocks,
    devices, cache pages or a shared prefix in any way and order.

    `max_so_far` is a gauge: no result depends on it, and no gradient flows through it. So
    `max_so_far` itself has no gradient, and those of `numerator` and `denominator` are taken as if
    the maximum were a constant. What is made of all three, such as `finalise`, has its whole
    gradient. The gauge is the largest logit of the keys, or of the sinks where `with_sinks` added a
    larger one, as strategies whose metadata has sinks do. So with sinks it may be more than every
    logit of a key, and `from_output` has the logsumexp there. What a call saw is
    `return_max_logits=True` of [`eqattn.attention`][].

    **Arguments:**

    - `numerator`: the weighted sum of the values, `[*b, t, h, v]`, float32 (float64 under x64).
    - `denominator`: the sum of the weights, `[*b, t, h]`.
    - `max_so_far`: the origin of the exponents, `[*b, t, h]`; `-inf` where neither a key nor a sink
        was seen.

    ??? cite "Reference"

        Milakov and Gimelshein, *Online normalizer calculation for softmax*, 2018
        (arXiv:1805.02867).
    """

    numerator: Float[Array, "*bth v"]
    denominator: Float[Array, " *bth"]
    max_so_far: Float[Array, " *bth"]

    def __check_init__(self) -> None:
        parts: tuple[Any, ...] = (self.numerator, self.denominator, self.max_so_far)
        if not all(hasattr(x, "shape") for x in parts):  # trees of axes or filters have no arrays
            return
        numerator, *rows = (x.shape for x in parts)
        if rows != [numerator[:-1]] * 2:
            raise ValueError(
                f"A numerator {numerator} [*b, t, h, v] needs a denominator and a max_so_far "
                f"[*b, t, h], got {rows[0]} and {rows[1]}."
            )

    @classmethod
    def empty(cls, shape: tuple[int, ...], value_dim: int, dtype: Any = jnp.float32) -> "Carry":
        """Returns attention over no keys, which is the identity of `merge`.

        **Arguments:**

        - `shape`: the shape `(*b, t, h)` of the rows.
        - `value_dim`: the size `v` of a value.
        - `dtype`: the dtype of the sums, float32 by default.
        """
        shape, value_dim = as_sizes(shape, "shape"), as_size(value_dim, "value_dim")
        dtype = as_dtype(dtype, "dtype")
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"dtype must be a float, such as jnp.float32, got {dtype}.")
        return cls(
            jnp.zeros((*shape, value_dim), dtype),
            jnp.zeros(shape, dtype),
            jnp.full(shape, -jnp.inf, dtype),
        )

    @classmethod
    def from_logits(
        cls, logits: Float[Array, "*bt h s"], values: Float[Array, "*b s h v"]
    ) -> "Carry":
        """Computes attention over the given keys. Masked pairs have the logit `-inf`. What is not
        finite in a value makes the rows NaN that see it, and reaches no others.

        **Arguments:**

        - `logits`: the logits of `s` keys, `[*b, t, h, s]`.
        - `values`: the values of these keys, `[*b, s, h, v]`.
        """
        logits, values = _floats(logits=logits, values=values)
        *batch, _, h, s = logits.shape if logits.ndim >= 3 else (0, 0, 0)
        if logits.ndim < 3 or values.shape[:-1] != (*batch, s, h):
            raise ValueError(
                f"logits {logits.shape} must be [*b, t, h, s] for values {values.shape} "
                "[*b, s, h, v]; repeat the values' heads to match."
            )
        return cls(*_sums(logits, values))

    @classmethod
    def from_output(
        cls, output: Float[Array, "*bth v"], logsumexp: Float[Array, " *bth"]
    ) -> "Carry":
        r"""Builds a Carry from normalised attention and its logsumexp.

        With the logsumexp $L$ as origin, the denominator is $e^{L - L} = 1$, and the numerator is
        the output. The 1 keeps the derivative by $L$.

        **Arguments:**

        - `output`: the weighted means of the values, `[*b, t, h, v]`.
        - `logsumexp`: `[*b, t, h]`; its gradient is kept. Where no key was seen it is `-inf`, and
            the output may hold anything.
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
        """Builds a Carry from normalised attention `o`, the maximum `m` and the denominator `l`.

        **Arguments:**

        - `output`: the weighted means `o` of the values, `[*b, t, h, v]`.
        - `maximum`, `denominator`: the largest logit `m`, and the sum `l` of exponentials relative
            to it. They are `[*b, t, h]`, or have a last axis of 1 as [`eqattn.ragged_gqa`][] gives
            them. Where `m` is `-inf` or `l` is 0, no key was seen, and the output may hold
            anything.
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
        """Adds the given keys to this Carry. The arguments are those of `from_logits`."""
        return self.merge(Carry.from_logits(logits, values))

    def merge(self, other: "Carry") -> "Carry":
        r"""Returns attention over the keys of both Carries, for the same rows.

        Let $a \ge b$ be the two maxima. The sums that are relative to $a$ stay as they are, and the
        others are multiplied by $e^{b - a}$.
        """
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
        both = [self.max_so_far, other.max_so_far, self.denominator, other.denominator]
        return Carry(*_merged(*on_common_axes([*both, self.numerator, other.numerator])))

    def with_sinks(self, sinks: Float[Array, "*#bth n"]) -> "Carry":
        """This Carry with `n` more logits per row that join the denominator but have no value.

        **Arguments:**

        - `sinks`: the logits `[..., n]`, which broadcast to `[*b, t, h, n]`.

        **Returns:** a Carry whose `max_so_far` is the largest sink where that is more.

        **Raises:** `ValueError` if the sinks do not broadcast. It is also raised for `[h]` sinks if
        there are `h` heads, as one for each head may be meant. Write `[h, 1]` for that, or `[1, h]`
        for sinks that all heads share.
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
        return self.merge(Carry(*_sums_of_sinks(sinks, self.numerator, self.denominator)))

    def logsumexp(self) -> Float[Array, " *bth"]:
        """The logsumexp `log(sum_j exp(s_j))` of the logits, `-inf` where no key was seen."""
        return _logsumexp(self.denominator, self.max_so_far)

    def output(self) -> Float[Array, "*bth v"]:
        """The weighted mean of the values, 0 where no key was seen."""
        return _output(self.numerator, self.denominator)

    def finalise(self) -> tuple[Float[Array, "*bth v"], Float[Array, " *bth"]]:
        """**Returns:** `(output, logsumexp)`, which are 0 and `-inf` for a row that saw no key."""
        return self.output(), self.logsumexp()

    def to_oml(
        self,
    ) -> tuple[Float[Array, "*bth v"], Float[Array, " *bth"], Float[Array, " *bth"]]:
        """**Returns:** the normalised output `o`, the maximum `m` of the logits and of any sinks,
        and the denominator `l` relative to it.
        """
        return self.output(), self.max_so_far, self.denominator


# Outside of a caller's `jax.jit`, each of the following functions is one program, and so is its
# derivative. They are not inlined into traces: the derivative of what is inlined would be compiled
# again at each eager gradient.
@jax.jit
def _sums(logits: Array, values: Array) -> tuple[Array, Array, Array]:
    """The numerator, denominator and maximum of `Carry.from_logits`."""
    dtype = accumulation_dtype(logits.dtype, values.dtype)
    logits, values = logits.astype(dtype), values.astype(dtype)
    nothing = jnp.full((*logits.shape[:-1], 1), -jnp.inf, dtype)
    top, p, _ = online_softmax(logits, nothing)
    product = ft.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    finite = jnp.isfinite(values)
    numerator = product("...ths,...shv->...thv", p, jnp.where(finite, values, 0))
    bad = jnp.where(finite.all(-1), 0, 1).astype(dtype)
    seen = jnp.where(logits == -jnp.inf, 0, 1).astype(dtype)
    poisoned = product("...ths,...sh->...th", seen, bad) != 0
    numerator = jnp.where(poisoned[..., None], jnp.nan, numerator)
    return numerator, p.sum(-1), lax.stop_gradient(top[..., 0])


@jax.jit
def _merged(
    a: Array, b: Array, den: Array, den_b: Array, num: Array, num_b: Array
) -> tuple[Array, Array, Array]:
    """The numerator, denominator and maximum of two Carries, whose maxima are `a` and `b`."""
    a, b = lax.stop_gradient(a), lax.stop_gradient(b)
    top, first = jnp.maximum(a, b), a >= b
    share = jnp.exp(jnp.minimum(a, b) - safe_max(top))

    def add(x, y, first, share):
        # There is only one product, so that a fused multiply-add rounds the same in either
        # order: `merge` commutes bitwise.
        return jnp.where(first, x, y) + jnp.where(first, y, x) * share

    return add(num, num_b, first[..., None], share[..., None]), add(den, den_b, first, share), top


@jax.jit
def _sums_of_sinks(sinks: Array, num: Array, den: Array) -> tuple[Array, Array, Array]:
    """The numerator, denominator and maximum of sinks, for the rows of these sums."""
    sinks = sinks.astype(den.dtype)
    top = lax.stop_gradient(sinks.max(-1, initial=-jnp.inf))
    denominator = jnp.exp(sinks - safe_max(top)[..., None]).sum(-1)
    full = ft.partial(jnp.broadcast_to, shape=den.shape)
    return jnp.zeros_like(num), full(denominator), full(top)


@jax.jit
def _output(numerator: Array, denominator: Array) -> Array:
    return row_mean(numerator, denominator[..., None])


_logsumexp = jax.jit(logsumexp)


def _weight(exponent: Array) -> Array:
    """The number 1 with the derivative by `x` of `exp(x - x0)` at `x0 = x`; 0 where `x` is `-inf`.

    A weight `exp(x)` relative to `x` as its origin is 1. That the origin is a constant keeps the
    derivative, which is that of `log(weight)`.
    """
    seen = exponent != -jnp.inf
    safe = jnp.where(seen, exponent, 0)
    return jnp.where(seen, jnp.exp(safe - lax.stop_gradient(safe)), 0)


def _floats(**arrays: Any) -> list[Array]:
    """The arrays as arrays of JAX. **Raises:** `TypeError`, by name, unless they are floats."""
    found = {name: jnp.asarray(as_array(x, name)) for name, x in arrays.items()}
    check_floating(**found)
    return list(found.values())


def _check_rows(name: str, rows: Array, output: Array) -> None:
    if rows.shape != output.shape[:-1]:
        raise ValueError(
            f"{name} {rows.shape} must be [*b, t, h] for output {output.shape} [*b, t, h, v]; "
            "broadcast it first."
        )
