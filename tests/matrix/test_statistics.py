"""Statistics of probabilities over the axes of the matrix, within the bound of the oracle."""

import contextlib

import jax
import numpy as np
import pytest

from eqattn import stats

from . import bound, of_keys, oracle
from .build import build
from .cases import name_of, needs_x64
from .library import call_of_keys
from .test_conformance import mesh_of


def statistics(q, k, strategy, **options):
    found = {"entropy": stats.entropy(q, k, strategy, **options)}
    if options["kv_positions"] is None:  # The mass of a key is where that key lies.
        found["mass"] = stats.mass(q, k, strategy, **options)
    return found


def expected(problem: oracle.Problem, precision: bound.Precision) -> dict[str, bound.Bounded]:
    """`-sum_j p_ij log p_ij` of each query and `sum_i p_ij` of each key, sinks not counted."""
    f = oracle.forward(bound.bounded(problem, precision))
    b, t, h = np.shape(f.lse)
    lse = np.reshape(np.einsum("bth->bht", f.lse), (b, h, t, 1))
    surprise = np.where(
        f.visible, np.where(f.visible, lse, 0.0) - np.where(f.visible, f.z, 0.0), 0.0
    )
    return {
        "entropy": np.einsum("bht->bth", np.sum(f.p * surprise, axis=3)),
        "mass": np.einsum("bhs->bsh", np.sum(f.p, axis=2)),
    }


def check(case) -> None:
    with jax.enable_x64(True) if needs_x64(case) else contextlib.nullcontext():
        built = build(case)
        call, dynamic = call_of_keys(built, statistics)
        with mesh_of(case):
            found = jax.tree.map(np.asarray, jax.jit(call)(built.variants[0], dynamic))
        problem = built.problems[0].replace(keep=None, rate=0.0)
        with np.errstate(all="ignore"):
            wanted = expected(problem, built.precision)
        for name, x in found.items():
            shape = np.shape(wanted[name].primal)
            assert bound.excess(x.reshape(shape), wanted[name]) <= 1, name


CASES = of_keys.one_of_each(of_keys.cases_of(2), (("blockwise", 1), ("ring", 2)))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_one_of_each(case):
    check(case)
