"""How this suite spares what JAX does for each program, however small it is."""

import threading

import jax
import numpy as np
from jax import lax
from jax._src.interpreters import mlir


_make = mlir.make_ir_context
_of_thread = threading.local()


def _made_once():
    if not hasattr(_of_thread, "context"):
        _of_thread.context = _make()
    return _of_thread.context


def keep_contexts():
    """JAX 0.10 makes a context of MLIR for each program, and loads all dialects into it. That is a
    third of the time of a program of one operation, and a fifth of that of some modules of tests.
    JAX 0.12 makes one for ten programs. Here a thread has one context until `forget_context`.
    """
    mlir.make_ir_context = _made_once


def forget_context():
    """What a context holds grows with each program."""
    vars(_of_thread).clear()


def put_arrays_at_once():
    """JAX compiles the identity for each shape and dtype of a NumPy array that becomes its own.
    `jax.device_put` compiles nothing. Beside a mesh it may put an array elsewhere.
    """
    stage = lax.stage_p.impl

    def put(x):
        alone = isinstance(x, np.ndarray) and jax.sharding.get_abstract_mesh().empty
        return jax.device_put(x) if alone else stage(x)

    lax.stage_p.def_impl(put)
