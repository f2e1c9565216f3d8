"""`top_keys` over the axes of the matrix: each list is what sorting the oracle's logits gives, to
within the bound, and so are its gradients and tangents.

The logit of one key is the logsumexp of a row that sees this key alone. So the oracle's derivatives
of that logsumexp are those of a listed value.
"""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqattn

from . import bound, of_keys, oracle
from .build import build, Built
from .cases import name_of, needs_x64
from .library import call_of_keys
from .test_conformance import mesh_of


FORWARD = "jvp", "linearize"


def has_lists(case) -> bool:
    """Lists of keys are not ranked, and a list has at least one key."""
    return bool(case["mask"] != "selected" and case["length"][1])


def count_of(case) -> int:
    """How many keys are listed: all of them, or few."""
    s = case["length"][1]
    return s if s < 16 else 3


def check_lists(values, indices, z: bound.Bounded, visible) -> None:
    """Lists `[B, T, H, n]` are the greatest logits `[B, H, T, S]`, the lower key first where values
    are equal. The i-th greatest moves at most as far as the logit that moves most.
    """
    unit = np.finfo(values.dtype).eps / 2
    values = np.moveaxis(values, 2, 1).astype(z.primal.dtype)
    n, indices = values.shape[-1], np.moveaxis(indices, 2, 1)
    there = indices >= 0
    np.testing.assert_array_equal(there.sum(-1), np.minimum(visible.sum(-1), n))
    np.testing.assert_array_equal(there, values != -np.inf)
    np.testing.assert_array_equal(there, np.sort(there, -1)[..., ::-1])
    at = np.maximum(indices, 0)
    assert np.take_along_axis(visible, at, -1)[there].all()
    first, second = values[..., :-1], values[..., 1:]
    both = there[..., 1:]
    ordered = (first > second) | (first == second) & (indices[..., :-1] < indices[..., 1:])
    assert ordered[both].all(), "a lower key of equal ones comes later, or the order is wrong"
    assert all(len(set(x[x >= 0])) == (x >= 0).sum() for x in indices.reshape(-1, n))

    rounding = unit * abs(np.where(there, values, 0))
    off = lambda x, error: (abs(values - x)[there] <= (error + rounding)[there]).all()
    assert off(np.take_along_axis(z.primal, at, -1), np.take_along_axis(z.error, at, -1))
    seen = np.where(visible, z.primal, -np.inf)
    greatest = np.sort(seen, -1)[..., ::-1][..., :n]
    worst = np.where(visible, z.error, 0).max(-1, keepdims=True)
    assert off(greatest, np.broadcast_to(worst, values.shape))


@dataclasses.dataclass
class Listed:
    """The logits that a list holds, as the oracle's logsumexps of rows that see one key each."""

    built: Built
    indices: np.ndarray  # [B, T, H, n]

    def problems(self):
        of, (_, _, s, _, _) = self.built.problems[0], self.built.problems[0].sizes
        for at in np.moveaxis(self.indices, -1, 0):
            one = (at[..., None] == np.arange(s)).transpose(0, 2, 1, 3)
            yield of.replace(mask=one, sinks=None, keep=None, rate=0.0)

    def gradients(self, ct):
        """Of the sum of `ct` `[B, T, H, n]` times values."""
        total: dict = {}
        no_ct = np.zeros_like(self.built.oracle_cts[0])
        for i, problem in enumerate(self.problems()):
            grads = bound.grads(problem, no_ct, ct[..., i], self.built.precision)
            total = {n: total[n] + x if total else x for n, x in grads.items()}
        return self.built.of_library(total)

    def tangents(self):
        names = {n: x for n, x in self.built.oracle_directions.items() if n != "sinks"}
        found = [bound.tangents(x, names, self.built.precision)["lse"] for x in self.problems()]
        return [np.stack([getattr(x, name) for x in found], -1) for name in ("primal", "error")]


def check(case) -> None:
    with jax.enable_x64(True) if needs_x64(case) else contextlib.nullcontext():
        built, n = build(case), count_of(case)
        list_keys = lambda q, k, strategy, **options: eqattn.top_keys(q, k, n, strategy, **options)
        call, dynamic = call_of_keys(built, list_keys)
        b, t, s, h, _ = built.problems[0].sizes
        ct = np.random.default_rng(0).standard_normal((b, t, h, n))

        def values(arguments, dynamic):
            found = call(arguments, dynamic)
            shown = lambda x: jnp.swapaxes(x.reshape(b, h, t, n), 1, 2)
            judged = jnp.where(found.indices >= 0, found.values, 0)
            return shown(judged), (shown(found.values), shown(found.indices))

        @jax.jit
        def run(arguments, directions, ct, dynamic):
            of = lambda arguments: values(arguments, dynamic)
            if case["transform"] in FORWARD:
                _, tangent, found = jax.jvp(of, (arguments,), (directions,), has_aux=True)
                return found, tangent
            _, pull, found = jax.vjp(of, arguments, has_aux=True)
            return found, pull(ct)[0]

        arguments = built.variants[0]
        dtype = np.float64 if case["dtype"] == "float64" else np.float32
        ct = ct.astype(dtype)
        with mesh_of(case):
            found, derivative = run(arguments, built.directions, ct, dynamic)
        (listed, indices), derivative = jax.tree.map(np.asarray, (found, derivative))
        with np.errstate(all="ignore"):
            judge(built, listed, indices, derivative, ct)


def judge(built: Built, values, indices, derivative, ct) -> None:
    problem = bound.bounded(built.problems[0], built.precision).replace(sinks=None)
    forward = oracle.forward(problem)
    check_lists(values, indices, forward.z, forward.visible)
    listed = Listed(built, indices)
    if not isinstance(derivative, dict):
        want = bound.Bounded(*listed.tangents(), built.precision)
        assert bound.excess(derivative, want) <= 1
        return
    ct = np.where(indices >= 0, ct, 0).astype(built.precision.reference)
    wanted = listed.gradients(ct)
    for name, x in derivative.items():
        # Values and sinks have no say in logits; latents are keys, too.
        if name == "sinks" or name == "v" and not built.kept.latent:
            assert not x.any(), name
            continue
        shape = np.shape(wanted[name].primal)
        assert bound.excess(x.reshape(shape), wanted[name]) <= 1, name


@pytest.mark.parametrize("case", of_keys.one_of_each(of_keys.cases_of(2, has_lists)), ids=name_of)
def test_one_of_each(case):
    check(case)
