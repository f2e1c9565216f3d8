"""A row of a softmax: its origin, a step of the online form, and how its sums end."""

import functools as ft
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec as P, reshard
from jaxtyping import Array

from .._jax import abstract, explicit_axes, names_of, sharding_of


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
