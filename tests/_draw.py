"""Random inputs."""

import jax.numpy as jnp
import numpy as np


def normal(seed, *shape, dtype=jnp.float32):
    """`dtype` None: float64 under x64, else float32."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)
