"""Memory by `memory_analysis`: linear in the sequence at every order of differentiation."""

import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from _programs import DEFAULT_CODE

from eqattn import attention, AttentionMetadata, Blockwise, Causal, Selected


def forward(q, k, v):
    strategy = Blockwise(AttentionMetadata(blocksize_q=256, blocksize_k=256))
    return attention(q, k, v, strategy, mask=Causal()).attention_outputs


def loss(*args):
    return jnp.sum(jnp.sin(forward(*args)))


def grad(*args):
    return jax.grad(loss, (0, 1, 2))(*args)


def grad_of_grad(*args):
    return jax.grad(lambda *a: sum(jnp.sum(jnp.cos(g)) for g in grad(*a)), (0, 1, 2))(*args)


ORDERS = {
    "forward": forward,
    "grad": grad,
    "jvp": lambda *a: jax.jvp(loss, a, a)[1],
    "hvp": lambda *a: jax.jvp(grad, a, a)[1],
    "grad of grad": grad_of_grad,
}


def temporary(name: str, t: int) -> float:
    q = jax.ShapeDtypeStruct((1, t, 2, 64), jnp.float32)
    k = jax.ShapeDtypeStruct((1, t, 1, 64), jnp.float32)
    compiled = jax.jit(ORDERS[name]).lower(q, k, k).compile(DEFAULT_CODE)
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("name", ["hvp"])
def test_linear_in_the_sequence(name):
    assert temporary(name, 4096) <= 4 * temporary(name, 1024)


ARRAYS = {"forward": 2, "grad": 3.5, "hvp": 7.5, "grad of grad": 10}


@pytest.mark.parametrize("name", ["grad"])
def test_in_arrays_of_the_size_of_the_query(name):
    """The numerator of the forward lies where the gradient is later, and queries are not copied."""
    assert temporary(name, 4096) <= ARRAYS[name] * 4 * 4096 * 2 * 64


def test_a_gradient_of_few_queries():
    """Its gradients of keys and values are larger than any numerator, and lie in the results."""
    q, k = (jax.ShapeDtypeStruct((1, *x, 64), jnp.float32) for x in ((32, 128), (32768, 1)))
    summed = lambda *xs: attention(*xs, Blockwise()).attention_outputs.sum()
    compiled = jax.jit(jax.grad(summed, (0, 1, 2))).lower(q, k, k).compile(DEFAULT_CODE)
    assert compiled.memory_analysis().temp_size_in_bytes <= 19 * 2**20


def test_a_gradient_of_listed_blocks():
    """The C library gives buffers of 32 MiB and more back to the system after each call."""
    x = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.float32)
    indices = jax.ShapeDtypeStruct((1, 8, 64, 6), jnp.int32)

    def of_listed(indices, *args):
        f = lambda *xs: attention(*xs, mask=Selected(indices, 64, 64)).attention_outputs.sum()
        return jax.grad(f, (0, 1, 2))(*args)

    compiled = jax.jit(of_listed).lower(indices, x, x, x).compile(DEFAULT_CODE)
    assert compiled.memory_analysis().temp_size_in_bytes <= 26 * 2**20


COPIED_ONCE = """
import jax, jax.numpy as jnp
from eqattn import attention

x = jax.ShapeDtypeStruct((128, 100, 2, 64), jnp.float32)
compiled = jax.jit(lambda *xs: attention(*xs).attention_outputs).lower(x, x, x).compile()
print(compiled.memory_analysis().temp_size_in_bytes / (4 * x.size))
"""


def test_single_blocks_are_copied_once():
    """Many batch elements whose queries and keys are one block, with XLA's own flags. With grid
    axes of size 1 the fusions of jaxlib 0.10 made two copies of each array, which was 4.05 arrays.
    """
    env = {n: x for n, x in os.environ.items() if n != "XLA_FLAGS"}
    arrays = subprocess.run([sys.executable, "-c", COPIED_ONCE], env=env, capture_output=True)
    assert float(arrays.stdout) < 3.5, arrays.stderr


def copied_in_loops(text: str, least: int) -> list[str]:
    """The copies of arrays with `least` numbers or more that a compiled program makes in a loop."""
    computations = dict(re.findall(r"^%?([\w.-]+) \([^\n]*{\n(.*?)^}", text, re.M | re.S))
    left, inside = re.findall(r"body=%?([\w.-]+)", text), set()
    while left:
        name = left.pop()
        if name not in inside:
            inside.add(name)
            left += re.findall(r"to_apply=%?([\w.-]+)", computations[name])
    found = re.findall(
        r"= \w+\[([\d,]+)\]\S* copy\(", "\n".join(computations[name] for name in inside)
    )
    return [shape for shape in found if math.prod(map(int, shape.split(","))) >= least]


@pytest.mark.parametrize("keys", [197])
def test_no_turn_of_a_gradient_copies_what_it_adds_to(keys):
    """Of 197 keys there are two blocks, the second of which is padded. One loop visits the first,
    and another the second.
    """
    q = jax.ShapeDtypeStruct((2, keys, 4, 64), jnp.float32)
    loss = lambda *args: jnp.sum(jnp.sin(attention(*args).attention_outputs))
    program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, q, q).compile().as_text()
    assert "while(" in program
    assert copied_in_loops(program, 2 * keys * 4 * 64) == []
