"""Measures rounding errors of the outputs and the gradients, in their natural unit.

The unit of an output is what rounding every term of its sum once could cost. With the unit roundoff
`u` of the dtype, that is

    out_i = sum_j p_ij v_j      has the unit    u sum_j p_ij |v_j|.

The unit of a gradient is made likewise: `u` times its formula with every term made positive. With
`a_ij = |g_i| . |v_j|`, the units are

    dv_j:    u sum_i p_ij |g_i|
    dq_i:    u scale sum_j p_ij (a_ij + sum_l p_il a_il) |k_j|
    dk_j:    u scale sum_i p_ij (a_ij + sum_l p_il a_il) |q_i|

as `ds_ij = p_ij (g_i . v_j - sum_l p_il g_i . v_l)`. In the units, the smallest normal float32 over
`u` is added to each probability, so that its underflow does not count as an error. The reference is
computed in float64, from the rounded inputs.
"""

from collections.abc import Iterator, Sequence

import jax
import numpy as np

from . import peers
from .cases import Case, DIM, Row, Target


_NAMES = ("out", "dq", "dk", "dv")
_TINY = float(np.finfo(np.float32).tiny)
_LIMIT = 1.02  # the aim: the largest root mean square error, relative to torch's


def draw(case: Case) -> list[np.ndarray]:
    """Draws inputs of the distribution that the case is named after, rounded to its dtype."""
    q, k, v, g = peers.draw(case)
    name = case.name.split("-", 2)[2]
    if name == "logits64":
        q, k = 8 * q, 8 * k
    elif name == "outlier-keys":
        k[:, np.random.default_rng(1).integers(0, case.tokens, max(case.tokens // 16, 1))] *= 20
    elif name == "v-mean-10":
        v = v + 10
    return [np.asarray(jax.numpy.asarray(x).astype(case.dtype), np.float32) for x in (q, k, v, g)]


def reference(inputs: Sequence[np.ndarray], roundoff: float) -> tuple[list, list]:
    """Output and gradients of causal attention in float64, and their units over `u`.

    **Arguments:**

    - `inputs`: query, key, value and cotangent, `[1, t, h, d]`.
    - `roundoff`: the unit roundoff `u`.

    **Returns:** two lists, each of out, dq, dk and dv: the values, and their units.
    """
    q, k, v, g = (x[0].swapaxes(0, 1).astype(np.float64) for x in inputs)
    values, units = zip(*(_head(*head, _TINY / roundoff) for head in zip(q, k, v, g)))
    return _stacked(values), _stacked(units)


def _stacked(heads) -> list[np.ndarray]:
    return [np.stack(x, 1)[None] for x in zip(*heads)]


def _head(q, k, v, g, floor):
    scale = DIM**-0.5
    s = np.where(np.tri(len(q), dtype=bool), scale * (q @ k.T), -np.inf)
    p = np.exp(s - s.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    out = p @ v
    ds = p * (g @ v.T - (g * out).sum(1, keepdims=True))
    values = out, scale * (ds @ k), scale * (ds.T @ q), p.T @ g
    p = p + np.tri(len(q)) * floor
    size = abs(g) @ abs(v).T
    size = p * (size + (p * size).sum(1, keepdims=True))
    units = p @ abs(v), scale * (size @ abs(k)), scale * (size.T @ abs(q)), p.T @ abs(g)
    return values, units


def rows(case: Case, names: Sequence[str]) -> Iterator[Row]:
    """The root mean square and the largest error of each library, for out, dq, dk and dv."""
    inputs = draw(case)
    roundoff = float(jax.numpy.finfo(case.dtype).eps) / 2
    exact, units = reference(inputs, roundoff)
    backward = Case(case.name, tokens=case.tokens, dtype=case.dtype, backward=True)
    errors = {}
    for name in ("eqattn", *names):
        if name in ("eqattn", "jax.nn", "torch"):
            program = peers.program(name, backward, inputs)
            arrays = program.arrays(program.call())
            errors[name] = [abs(a - x) / (roundoff * unit)
                            for a, x, unit in zip(arrays, exact, units)]  # fmt: skip
    for i, array in enumerate(_NAMES):
        rms = {n: float(np.sqrt((e[i] ** 2).mean())) for n, e in errors.items()}
        target = Target(_LIMIT * rms["torch"]) if "torch" in rms else None
        yield Row(case.name, f"{array} rms", rms, target=target)
        yield Row(case.name, f"{array} max", {n: float(e[i].max()) for n, e in errors.items()})
