"""What a lowered program holds as constants. Names: T tokens."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqattn
from eqattn._problem.tiling import as_device_array


TOKENS = 2**17


@pytest.mark.parametrize("tokens", [TOKENS, TOKENS - 100])
def test_a_program_holds_no_position_of_a_long_sequence(tokens):
    mask = eqattn.SlidingWindow(255, 0)
    loss = lambda q: eqattn.attention(q, q, q, mask=mask).attention_outputs.sum()
    q = jax.ShapeDtypeStruct((1, tokens, 1, 8), jnp.float32)
    text = jax.jit(jax.grad(loss)).lower(q).as_text()
    constants = re.findall(r'dense<"0x[0-9A-F]*"> : tensor<([0-9x]+)xi32>', text)
    sizes = [math.prod(map(int, shape.split("x"))) for shape in constants]
    assert max(sizes, default=0) < tokens / 8


@pytest.mark.parametrize("last", [2**15 - 1, 2**15 - 9, 0])
@pytest.mark.parametrize("first", [0, -7, 5])
def test_numbers_that_count_up_are_counted(first, last):
    x = np.minimum(np.arange(2**15, dtype=np.int32), last).reshape(2**7, 1, 2**8) + np.int32(first)
    for changed in (x, x[::-1].copy(), np.where(x == 40, 0, x)):
        made = as_device_array(changed)
        assert made.dtype == np.int32
        assert np.array_equal(made, changed)
