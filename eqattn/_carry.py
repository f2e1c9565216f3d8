"""Attention over some of the keys, as a Carry, and the arithmetic of a row of it.

The Carry: attention over some of the keys, which forms a commutative monoid under `merge`.

A row of a softmax: its origin, a step of the online form, and how its sums end.
"""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec as P, reshard
from jaxtyping import Array, Float

from ._jax import abstract, explicit_axes, names_of, sharding_of
from ._misc import accumulation_dtype, as_array, as_dtype, as_size, as_sizes, check_floating


def safe_max(maximum: Array) -> Array:
    """The maximum as an origin for exponents: a constant, and finite where nothing was seen.

    There the maximum is `-inf`, and `-inf - (-inf)` would be NaN. Relative to the least finite
    number, the exponential of `-inf` is 0, as it should be.
    """
    return finite_origin(lax.stop_gradient(maximum))


def finite_origin(origin: Array) -> Array:
    """The origin itself, with its derivative, and finite where nothing was seen."""
    return jnp.maximum(origin, jnp.finfo(origin.dtype).min)


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
    """A step of the online softmax over the last axis of the logits.

    **Arguments:**

    - `logits`: the logits `[rows, keys]` of further keys.
    - `before`: the maximum `[rows, 1]` of the logits before.

    **Returns:** the new maximum, the exponentials relative to it, and the factor that brings sums
    relative to the maximum before to the new one.
    """
    now = jnp.maximum(before, logits.max(-1, keepdims=True, initial=-jnp.inf))
    origin, scale = change_of_origin(now, before)
    return now, jnp.exp(logits - origin), scale


def logsumexp(denominator: Array, maximum: Array) -> Array:
    """The logsumexp of a row from its denominator and its maximum, `-inf` if nothing was seen."""
    seen = denominator != 0
    safe = jnp.where(seen, denominator, 1)
    return jnp.where(seen, safe_max(maximum) + jnp.log(safe), -jnp.inf)


def joint_logit(logits: Array) -> Array:
    """The one logit that adds to a softmax what all logits of the last axis do: their logsumexp.

    Where all are `-inf`, its derivative is 0, and that of `jax.nn.logsumexp` is NaN.
    """
    top = logits.max(-1, initial=-jnp.inf)
    return logsumexp(jnp.exp(logits - safe_max(top)[..., None]).sum(-1), top)


def guarded_quotient(total: Array, weight: Array) -> Array:
    """The quotient `total / weight`, 0 where the weight is 0."""
    seen = weight != 0
    return jnp.where(seen, total, 0) / jnp.where(seen, weight, 1)


@ft.partial(jax.custom_jvp, nondiff_argnums=(2,))
def row_mean(numerator: Array, denominator: Array, once: bool = True) -> Array:
    """The quotient `numerator / denominator`, 0 where the denominator is 0.

    **Arguments:**

    - `once`: whether the quotient must be rounded only once. Else XLA may multiply by the rounded
        reciprocal of a whole row.
    """
    # If the rows were broadcast by the division itself, XLA would compute their rounded reciprocals
    # in a further pass, and multiply by them.
    if once:
        denominator = jnp.broadcast_to(denominator, numerator.shape)
    return guarded_quotient(numerator, denominator)


@row_mean.defjvp
def _row_mean_jvp(once, primals, tangents):
    """The derivative of the mean `y = n / l` of a row, written so that its transpose is accurate.

    By the quotient rule, `dy = dn / l - n dl / l^2`, which is computed as `dy = (dn - y dl) / l`.
    Given the cotangent `ct` of `y`, the transpose of this form is

        ct_n = ct / l,    ct_l = -sum_v y_v (ct / l)_v.

    With `n = sum_j e_j v_j` and `l = sum_j e_j`, the gradient of a logit is
    `e_j (ct_n . v_j + ct_l)`, in which the two nearly cancel. So both contain the same rounded
    `ct / l`, whose error cancels with them, and the sum in `ct_l` is one of a tree, see `_widen`.
    """
    numerator, denominator = primals
    mean = row_mean(numerator, denominator, once)
    widened = _widen(tangents[1], numerator.shape[-1])
    return mean, row_mean(tangents[0] - mean * widened, denominator, False)


def _widen(x: Array, n: int) -> Array:
    """An array `[..., 1]` repeated to `[..., n]`, such that its transpose is an accurate sum.

    On a CPU, XLA adds the entries of a row one after the other. That loses up to `n / 2` roundings
    where the two cotangents of `row_mean` nearly cancel. So there the row is made by doubling: its
    transpose adds by halves and loses `log2(n)`. Other platforms sum in a tree already, and would
    write the row to memory at each doubling.
    """
    return lax.platform_dependent(
        x, cpu=ft.partial(_doubled, n=n), default=ft.partial(_repeated, n=n)
    )


def _doubled(x: Array, n: int) -> Array:
    # The row of n is the row of ceil(n / 2), followed by its first floor(n / 2) entries.
    if n <= 1:
        return x[..., :n]
    half = _doubled(x, (n + 1) // 2)
    return jnp.concatenate([half, half[..., : n // 2]], -1)


def _repeated(x: Array, n: int) -> Array:
    return jnp.broadcast_to(x, (*x.shape[:-1], n))


def row_sums(x: Array) -> Array:
    """The sum over the last axis, as accurate as the transpose of `_widen`, which it is."""
    like = abstract(x, (*x.shape[:-1], 1), x.dtype)
    (total,) = jax.linear_transpose(ft.partial(_widen, n=x.shape[-1]), like)(x)
    return total[..., 0]


def named_output(*arrays: Array) -> list[Array]:
    """Gives the results of a visit the name by which a policy of `jax.checkpoint` can keep them.

    Rules of derivatives do so with the results that tangents read. With a name on what is made of
    these later, a backward pass would have to visit all pairs again.
    """
    return [checkpoint_name(x, "attention_output") for x in arrays]


def on_common_axes(arrays: Sequence[Array]) -> list[Array]:
    """Some arrays of the same rows, on the explicit mesh axes of all of them. JAX selects among
    arrays only if their types name the same. Each axis is sharded as in the first array in which it
    is, over what shards no earlier axis.
    """
    meshes = [jax.typeof(x).sharding.mesh for x in arrays if explicit_axes(x)]
    if not meshes:
        return list(arrays)
    specs, spec, used = [sharding_of(x) for x in arrays], [], set()
    for axis in range(max(map(len, specs))):
        found = None
        for entry in (s[axis] for s in specs if axis < len(s)):
            names = {*names_of(entry)}
            if names and not names & used:
                found, used = entry, used | names
                break
        spec.append(found)

    def place(x, own):
        wanted = tuple(spec[: len(own)])
        if own == wanted:
            return x
        return reshard(x, NamedSharding(meshes[0], P(*wanted)))

    return list(map(place, arrays, specs))


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
            to it. They are `[*b, t, h]`, or have a last axis of 1 as
            [`eqattn.compat.ragged_gqa`][] gives them. Where `m` is `-inf` or `l` is 0, no key was
            seen, and the output may hold anything.
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
