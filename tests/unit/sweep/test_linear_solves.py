"""Gradients through solves with the Jacobian of a linear map, as `jax.lax.custom_root` takes them.

The Jacobian of a linear map does not depend on where it is taken. JAX transposes a solve only if it
sees this, so nothing of a sweep may be an operand that nothing reads. Judged by the same program of
plain `jax.numpy`, and by solves in NumPy where the answer has a formula.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import attention, AttentionMetadata, Blockwise, Causal, Ragged


SHAPE, SIZE = (1, 5, 2, 4), 40
STRATEGIES = {"blockwise": Blockwise, "ragged": Ragged}


def plain(z, v):
    logits = jnp.einsum("bthd,bshd->bhts", z, z) / 2
    logits = jnp.where(np.tri(SHAPE[1], dtype=bool), logits, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits, -1), v)


def of(strategy):
    metadata = AttentionMetadata(blocksize_q=2, blocksize_k=2)
    return lambda z, v: attention(z, z, v, strategy(metadata), mask=Causal()).attention_outputs


def arrays():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=SHAPE) * 0.3) for _ in range(3)]


def residual(attend, inject, a):
    """Its root is a fixed point: `z = attend(z, a z) / 2 + inject`, of flat vectors."""

    def f(z):
        z = z.reshape(SHAPE)
        return (attend(z, z * a) / 2 + inject - z).ravel()

    return f


def solve_tangent(g, y):
    return jnp.linalg.solve(jax.jacobian(g)(y), y)


def solve(f, z):
    return jax.lax.fori_loop(0, 60, lambda _, z: z + f(z), z)


@pytest.fixture(autouse=True)
def _as_users_run_it(x64):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("name", ["blockwise"])
def test_the_gradient_of_a_root(name):
    """By the implicit function theorem, `dz/da = -(df/dz)^-1 df/da`."""
    start, inject, _ = arrays()
    a = jnp.asarray(0.7)

    def root(a):
        f = residual(of(STRATEGIES[name]), inject, a)
        return jax.lax.custom_root(f, start.ravel(), solve, solve_tangent).sum()

    z = jax.jit(lambda: solve(residual(plain, inject, a), start.ravel()))()
    of_z, of_a = jax.jit(jax.jacfwd(lambda z, a: residual(plain, inject, a)(z), (0, 1)))(z, a)
    want = -np.linalg.solve(of_z, of_a).sum()
    for gradient in (jax.grad, jax.jacfwd):
        np.testing.assert_allclose(jax.jit(gradient(root))(a), want, rtol=1e-11)


@pytest.mark.parametrize("name, jacobian", [("ragged", jax.jacrev)])
def test_a_solve_with_the_jacobian_of_a_linear_map(name, jacobian):
    """`b -> A^-1 b` is linear in `b`, although `A` is the Jacobian of the map at `b`. The gradient
    of `w . A^-1 b` is `A^-T w`.
    """
    at, inject, b = arrays()
    w = np.random.default_rng(1).normal(size=SIZE)

    def linear(attend):
        return jax.linearize(residual(attend, inject, 0.7), at.ravel())[1]

    def loss(b):
        g = linear(of(STRATEGIES[name]))
        return w @ jnp.linalg.solve(jacobian(g)(b), b)

    matrix = jax.jit(jax.jacfwd(residual(plain, inject, 0.7)))(at.ravel())
    want = np.linalg.solve(np.asarray(matrix).T, w)
    got = jax.jit(jax.grad(loss))(b.ravel())
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


def test_the_jacobian_of_a_transposed_map():
    """The transpose of a linear map is a linear map, whose Jacobian is the transposed matrix."""
    at, inject, b = arrays()
    w = np.random.default_rng(1).normal(size=SIZE)

    def loss(b):
        g = jax.linearize(residual(of(Blockwise), inject, 0.7), at.ravel())[1]
        transposed = jax.linear_transpose(g, b)
        return w @ jnp.linalg.solve(jax.jacobian(lambda u: transposed(u)[0])(b), b)

    matrix = jax.jit(jax.jacfwd(residual(plain, inject, 0.7)))(at.ravel())
    got = jax.jit(jax.grad(loss))(b.ravel())
    np.testing.assert_allclose(got, np.linalg.solve(np.asarray(matrix), w), rtol=0, atol=1e-12)
