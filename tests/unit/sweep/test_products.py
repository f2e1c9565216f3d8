"""Products of blocks, in every orientation and for the lengths that a CPU does in another way."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn._sweep.products import dot


CONTRACT = [(0, 0), (0, 1), (1, 0), (1, 1)]


def drawn(contract, n, few, lead):
    rng = np.random.default_rng(n)
    sides = [(n, free) if c == 0 else (free, n) for c, free in zip(contract, (few, 48))]
    return [jnp.asarray(rng.standard_normal((*lead, *s)), jnp.float32) for s in sides]


def exact(a, b, contract):
    a, b = (np.float64(x) for x in (a, b))
    a = a if contract[0] == 1 else np.swapaxes(a, -1, -2)
    b = b if contract[1] == 0 else np.swapaxes(b, -1, -2)
    return a @ b, abs(a) @ abs(b)


LENGTHS, FEW, LEADS = [64, 256, 384, 512], [1, 4, 40], [(), (3,)]


@pytest.mark.parametrize("n, few, lead", [(64, 4, (3,)), (384, 40, ()), (512, 1, ())])
@pytest.mark.parametrize("contract", CONTRACT)
def test_products_and_their_gradients(contract, n, few, lead):
    a, b = drawn(contract, n, few, lead)
    one = lambda a, b: dot(a, b, contract, precision="highest")
    y, pull = jax.vjp(jax.vmap(one) if lead else one, a, b)
    want, size = exact(a, b, contract)
    u = 2.0**-24
    assert (abs(y - want) <= (n + 1) * u * size).all()
    da, db = pull(y)
    # a' = y b^T in the orientation of a, and b' likewise
    turn = lambda x, yes: np.swapaxes(x, -1, -2) if yes else x
    wide = [turn(np.float64(x), t) for x, t in ((a, contract[0] == 0), (b, contract[1] == 1))]
    z = np.float64(y)
    for got, left, right, transposed in (
        (da, z, np.swapaxes(wide[1], -1, -2), contract[0] == 0),
        (db, np.swapaxes(wide[0], -1, -2), z, contract[1] == 1),
    ):
        depth = left.shape[-1]
        bound = (depth + 1) * u * (abs(left) @ abs(right))
        assert (abs(turn(got, transposed) - left @ right) <= bound).all()


@pytest.mark.parametrize("n, few", [(64, 40), (256, 4)])
@pytest.mark.parametrize("contract", CONTRACT)
def test_what_the_multiplier_reads(contract, n, few):
    a, b = drawn(contract, n, few, ())
    y = dot(a, b, contract, precision="highest", operand_dtype=jnp.bfloat16)
    want, size = exact(*(x.astype(jnp.bfloat16).astype(jnp.float32) for x in (a, b)), contract)
    assert y.dtype == jnp.float32
    assert (abs(y - want) <= (n + 1) * 2.0**-24 * size).all()


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("contract", CONTRACT)
def test_narrow_products_are_summed_in_float32(contract, platform):
    """Where the multiplier reads bfloat16 itself, each product of the program gives float32: of
    `dot`, of its transposes, and of those for groups.
    """
    a, b = drawn(contract, 64, 40, ())

    def values(a, b):
        f = lambda a, b: dot(a, b, contract, operand_dtype=jnp.bfloat16)
        y, pull = jax.vjp(f, a, b)
        return y, pull(y)

    text = jax.jit(values).trace(a, b).lower(lowering_platforms=(platform,)).as_text()
    types = re.findall(r"dot_general.*: \((.*)\) -> (.*)", text)
    assert len(types) == 3
    for operands, result in types:
        assert operands.count("bf16>") == 2 and "f32>" in result, (operands, result)


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("contract", CONTRACT)
def test_few_numbers_are_multiplied_in_float32_on_a_gpu(contract, platform):
    """XLA:GPU multiplies very small matrices by a loop, in the dtype of their numbers. So they are
    float32 in the program, also those of a vmap and of gradients. Tensor cores would round float32
    to 11 bits, if the highest precision were not asked for.
    """
    a, b = drawn(contract, 8, 4, ())

    def values(a, b):
        f = lambda a, b: dot(a, b, contract, operand_dtype=jnp.bfloat16)
        y, pull = jax.vjp(f, a, b)
        return y, pull(y)

    for f, args in ((values, (a, b)), (jax.vmap(values), (a[None], b[None]))):
        text = jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()
        lines = [x for x in text.splitlines() if "dot_general" in x]
        assert len(lines) == 3
        assert all("bf16" not in x and "HIGHEST, HIGHEST" in x for x in lines), lines
        assert text.count("reduce_precision") == 6  # the operands are still rounded


def test_what_is_subnormal_in_float16_is_multiplied():
    """A probability of 1e-6 beside one of 1 counts, as it does where units multiply float16."""
    p = jnp.asarray([[1e-6, 1.0]], jnp.float32)
    values = jnp.asarray([[1000.0], [0.0]], jnp.float32)
    (y,) = jax.jit(lambda *xs: dot(*xs, (1, 0), operand_dtype=jnp.float16))(p, values)
    assert abs(y[0] / 1e-3 - 1) < 0.1
