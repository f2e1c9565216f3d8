"""The product of two matrices in a kernel."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def product_of(a: Array, b: Array, contract: tuple[int, int], precision: Any) -> Array:
    """In float32, summed over the named axes."""
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)
