"""Dropout in further strategies and of several batch axes."""

import jax
import numpy as np
import pytest
import test_dropout as unit
from test_dropout import D, KEY, normal, RATE, S, STRATEGIES, T

from eqattn import attention, dropout_mask


def test_flattening_the_batch_changes_nothing():
    q, k, v = (normal(i, 2, 3, n, 2, D, dtype=np.float32) for i, n in enumerate((T, S, S)))
    f = jax.jit(lambda *x: attention(*x, STRATEGIES["dense"], key=KEY).attention_outputs)
    flat = f(*(x.reshape(6, *x.shape[2:]) for x in (q, k, v)))
    np.testing.assert_array_equal(f(q, k, v).reshape(flat.shape), flat)
    np.testing.assert_array_equal(
        dropout_mask(KEY, (2, 3), 2, T, S, RATE).reshape(6, 2, T, S),
        dropout_mask(KEY, (6,), 2, T, S, RATE),
    )


def test_bits_follow_positions_in_dense():
    unit.test_bits_follow_positions("dense")


def test_gradients_of_dense_are_the_differences(x64):
    unit.test_gradients_under_dropout_are_the_differences("dense", x64)


@pytest.mark.parametrize("name", unit.STRATEGIES)
def test_every_strategy_drops_the_pairs_of_the_mask(name):
    unit.test_every_strategy_and_block_size_drops_the_pairs_of_the_mask(name)
