"""All calls of the functions that look like other libraries'."""

import jax.numpy as jnp
import pytest
import test_dot_product as dot_product
import test_ragged as ragged
import test_ring as ring


@pytest.mark.parametrize(
    "call, dtype",
    [(call, jnp.float32) for call in dot_product.CALLS]
    + [(call, jnp.bfloat16) for call in dot_product.NARROW],
)
def test_like_jax_nn(call, dtype):
    dot_product.test_like_jax_nn(call, dtype)


@pytest.mark.parametrize("call", ["plain", "causal", "xla"])
def test_without_batch(call):
    dot_product.test_without_batch(call)


def test_rows_that_see_nothing():
    dot_product.test_rows_that_see_nothing("mask", jnp.float32)


@pytest.mark.parametrize("block", [1, 7, 16, 64, 256])
@pytest.mark.parametrize("h, k", [(4, 4), (4, 2), (4, 1)])
def test_ragged_against_the_oracle(h, k, block, x64):
    ragged.test_against_the_oracle(h, k, block, x64)


@pytest.mark.parametrize("name", ring.CASES)
def test_meaning_of_ring(name):
    ring.test_meaning(name)
