"""Numbers times a factor that must not overflow, as logits in units of `log 2` might."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np


RANGE = float(jnp.finfo(jnp.float32).min), float(jnp.finfo(jnp.float32).max)
"""The least and the greatest finite number."""


def in_range(x: Any, factor: float) -> Any:
    """A number times a factor, which is finite if the number is.

    The origin of a row that sees nothing is the least finite number. Times `log2(e)` it would
    overflow to -inf, and a masked logit minus its origin would be NaN.
    """
    return x * factor if math.isinf(x) else np.float32(np.clip(float(x) * factor, *RANGE))
