"""Statistics of attention, in every strategy."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_stats as unit
from jax.sharding import AxisType
from test_stats import ARRAYS, by_hand, close, H, statistics

from eqattn import Dense, Ragged, Ring, Zigzag


@pytest.mark.parametrize("cls, n, own", unit.STRATEGIES)
def test_all_probabilities_give_the_same(cls, n, own, x64):
    unit.test_all_probabilities_give_the_same(cls, n, own, x64)


@pytest.mark.parametrize("cls, n, own", [(Dense, 1, {}), *unit.STRATEGIES])
def test_a_call_hands_over_its_logsumexp(cls, n, own, x64):
    unit.test_a_call_hands_over_its_logsumexp(cls, n, own, x64)


@pytest.mark.parametrize("cls", [Dense, Ragged])
def test_other_strategies_give_the_same(cls, x64):
    found = jax.jit(ft.partial(statistics, cls=cls))(jax.tree.map(jnp.asarray, ARRAYS))
    want = by_hand(ARRAYS)
    close(found, {name: np.asarray(want[name]) for name in found})


def test_tokens_of_a_layout_keep_their_statistics(x64):
    """Positions, not places: in the order of a zigzag ring, all but the bias, which has places."""
    layout, n = Zigzag(), 2
    mesh = jax.make_mesh((n,), ("sp",), (AxisType.Auto,), devices=jax.devices()[:n])
    arrays = {name: jnp.asarray(x) for name, x in ARRAYS.items()}
    plain = arrays | {"bias": jnp.zeros((H, 1, 1))}
    order = lambda x: layout.permute(x, n)
    with jax.set_mesh(mesh):
        own = dict(names=("entropy", "mass"), axis_name="sp", layout=layout)
        ring = ft.partial(statistics, cls=Ring, order=order, **own)
        found = jax.tree.map(lambda x: layout.unpermute(x, n), jax.jit(ring)(plain))
    want = by_hand(plain)
    close(found, {name: np.asarray(want[name]) for name in found})


@pytest.mark.parametrize("kind", unit.KNOWN)
def test_parts_that_know_the_logsumexp_add_up(kind):
    unit.test_parts_that_know_the_logsumexp_add_up(kind)


def test_the_largest_logit_of_a_head_on_an_automatic_mesh():
    unit.test_the_largest_logit_of_a_head_takes_one_collective(False)


def test_stored_keys_of_eight_bits():
    unit.test_stored_keys("eight bits")
