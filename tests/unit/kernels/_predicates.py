"""Masks that choose among predicates and compare them, of which compilers of kernels know little."""

import functools as ft

import jax.numpy as jnp
from jax import lax


MASKS = {
    "by head": lambda b, h, q, k: jnp.where(h == 0, q >= k, q <= k),
    "window of a head": lambda b, h, q, k: (q >= k) & jnp.where(h % 2 == 0, q - k < 64, True),
    "by query": lambda b, h, q, k: jnp.where(q < 9, q >= k, q <= k),
    "by key": lambda b, h, q, k: jnp.where(k < 9, q >= k, k > 5),
    "by both": lambda b, h, q, k: jnp.where(q - k < 9, q % 2 == 0, k % 2 == 0),
    "of rows": lambda b, h, q, k: jnp.where(h == 0, q % 2 == 0, q < 9) | (q == k),
    "a constant": lambda b, h, q, k: jnp.where(jnp.asarray(True), q >= k, q - k < 9),
    "larger": lambda b, h, q, k: jnp.maximum(q >= k, q - k < 5),
    "smaller": lambda b, h, q, k: jnp.minimum(q >= k, k % 3 > h),
    "less": lambda b, h, q, k: (k % 2 == 0) < (q >= k),
    "at most": lambda b, h, q, k: (q < 9) <= (q >= k),
    "more": lambda b, h, q, k: (q >= k) > (q % 3 == 0),
    "at least": lambda b, h, q, k: (q >= k) >= (h == 0),
    "equal": lambda b, h, q, k: (q >= k) == (k > 3),
    "one of three": lambda b, h, q, k: lax.select_n((q + k) % 3, q >= k, q < 9, k % 2 == 0),
    "a branch": lambda b, h, q, k: lax.cond(q > k, lambda: q > 3, lambda: k % 2 == 0),
}


def any_odd(b, h, q, k):
    """Whether an odd number of the masks shows a pair, so that each of them counts."""
    return ft.reduce(jnp.logical_xor, [fn(b, h, q, k) for fn in MASKS.values()])
