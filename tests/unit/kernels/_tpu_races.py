"""The kernels for TPUs as a TPU would run them: copies in threads of their own, that may race, and
memory that holds NaN until something is written there.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from eqattn._sweep import attend as _attend, fold as _fold, sweep as _sweep
from eqattn.kernels.tpu import _traverse


_HOT = {
    _attend.attend_p: _attend.execute,
    _fold.fold_p: _fold.execute,
    _sweep.sweep_p: _sweep.execute,
}


def without_races(f: Callable, *args: Any, cores: int = 1) -> tuple[list, int]:
    """What `f` returns, flat, and how many kernels it ran, of which none had a race.

    Its calls of attention choose `platform="interpret"`. `cores`: of the device.
    """
    params = pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", num_cores_or_threads=cores
    )
    kernel = ft.partial(_traverse.traverse, interpret=params)
    closed = jax.make_jaxpr(f)(*args)
    counts = []

    @jax.jit
    def run(*leaves):
        outs, count = _run(closed.jaxpr, closed.consts, leaves, kernel)
        counts.append(count)
        return outs

    got = jax.block_until_ready(run(*jax.tree.leaves(args)))
    assert not interpret_pallas_call.races.races_found
    return got, counts[0]


def _run(jaxpr, consts, args, kernel):
    """A jaxpr with `kernel` in place of the hot visits."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args]))
    read = lambda v: v.val if isinstance(v, jax.extend.core.Literal) else env[v]
    count = 0
    for eqn in jaxpr.eqns:
        xs, p = [read(v) for v in eqn.invars], eqn.params
        code = _HOT.get(eqn.primitive)
        if code is not None and p["layout"].stage in ("fold", "backward"):
            ys = code(*xs, **p, vectorise=False, traverse=kernel, finishes=True)
            count += 1
        elif eqn.primitive.name in ("jit", "custom_jvp_call"):
            called = p.get("jaxpr") or p["call_jaxpr"]
            ys, more = _run(called.jaxpr, called.consts, xs, kernel)
            count += more
        else:
            ys = eqn.primitive.bind(*xs, **p)
            ys = ys if eqn.primitive.multiple_results else [ys]
        env.update(zip(eqn.outvars, ys))
    return [read(v) for v in jaxpr.outvars], count
