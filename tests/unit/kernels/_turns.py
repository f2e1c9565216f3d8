"""Visits in turns, and the error of what they return."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matrix import bound, oracle

from eqattn.kernels.tpu import _lists, _traverse


def recorded(monkeypatch: Any, most: int | None = None) -> list[int]:
    """The axes whose elements are visited in turns from now on. If `most` is given, scalar memory
    holds so many pairs.
    """
    found: list[int] = []
    of = _traverse.in_turns

    def in_turns(visit, layout, args, axes, axis, default_class):
        found.append(axis)
        return of(visit, layout, args, axes, axis, default_class)

    monkeypatch.setattr(_traverse, "in_turns", in_turns)
    if most is not None:
        monkeypatch.setattr(_lists, "MOST_PAIRS", most)
    return found


def excesses(got: Sequence[Any], inputs: Sequence[Any], ct: Any, seen: Any) -> dict[str, float]:
    """The errors of an output and of the gradients of query, key, value and bias over their bounds.

    **Arguments:**

    - `got`: the output and the gradients.
    - `inputs`: the query, key, value and bias, float32.
    - `ct`: the cotangent of the output.
    - `seen`: which pairs are visible, `[B|1, H|1, T, S]`.
    """
    wide: Any = [np.float64(x) for x in inputs]
    *given, bias = wide
    scale = inputs[0].shape[-1] ** -0.5
    problem = oracle.Problem(*given, scale=scale, bias=bias, mask=seen)
    precision = bound.precision_of(np.float32)
    want = bound.grads(problem, np.float64(ct), np.zeros(ct.shape[:3]), precision)
    want |= bound.values(problem, precision)
    names = "out", "q", "k", "v", "bias"
    return {n: bound.excess(np.asarray(x), want[n]) for n, x in zip(names, got, strict=True)}
