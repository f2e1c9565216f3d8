"""How rolls of kernels for TPUs are interpreted in this suite."""

import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.primitives import roll_p
from jax.interpreters import mlir


def rolled(x, shift, *, axis, stride, stride_axis):
    """What `pltpu.roll` says of itself: each row moves by `stride` more than the row before."""
    if stride is None:
        return jnp.roll(x, shift, axis)
    along = lambda a: jnp.expand_dims(np.arange(x.shape[a]), tuple({*range(x.ndim)} - {a}))
    at = (along(axis) - shift - stride * along(stride_axis)) % x.shape[axis]
    return jnp.take_along_axis(x, jnp.broadcast_to(at, x.shape), axis, mode="promise_in_bounds")


def interpret_rolls_at_once():
    """JAX rolls one row after another, in as many operations: tests of what the diagonals of blocks
    share took 2.6 times as long by it. What is compiled for a TPU does not come here.
    """
    mlir.register_lowering(roll_p, mlir.lower_fun(rolled, multiple_results=False))
