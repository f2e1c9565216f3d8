"""Numbers of pairs are read and written where they lie as they are in arrays of blocks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _draw import normal
from _programs import DEFAULT_CODE

from eqattn import attention, Causal
from eqattn._sweep.grid import BATCH, BlockGrid, COL, HEAD, pick, put, ROW
from eqattn._sweep.tokens import by_pairs, TokenPairs, Tokens


AT = {BATCH: 1, HEAD: 2, ROW: 3, COL: 4}
TOKENS = Tokens(ROW, 24, 6, group=2), Tokens(COL, 40, 8)
LAYOUT = BlockGrid((2, 3, 4, 5), (8, 12), (), tokens=TOKENS, transposed=True, stage="fold")
AXES = [
    (BATCH, HEAD, ROW, COL),
    (HEAD, ROW, COL),
    (BATCH, ROW, COL),
    (ROW, COL),
    (ROW, BATCH, COL),
]


def blocks(axes: tuple, *block: int) -> jax.Array:
    return normal(0, *LAYOUT.shape(axes), *block)


@pytest.mark.parametrize("block", [(8, 12), (8, 1, 6)])
@pytest.mark.parametrize("axes", AXES)
def test_a_block_is_read_and_written_in_place(axes, block):
    x = blocks(axes, *block)
    found = by_pairs(x, axes, LAYOUT)
    assert isinstance(found, TokenPairs)
    at = {a: AT[a] for a in axes}
    assert np.array_equal(found.blocks(LAYOUT), x)
    assert np.array_equal(found.pick(at), pick(x, axes, at))
    new = normal(1, *block)
    assert np.array_equal(found.put(at, new).blocks(LAYOUT), put(x, axes, at, new))


def test_pairs_are_those_of_the_whole_array():
    """Of a batch element and a key head: those of two query heads, of all queries and keys."""
    x = blocks(AXES[0], 8, 12)
    found = by_pairs(x, AXES[0], LAYOUT)
    assert isinstance(found, TokenPairs) and found.pairs.shape == (2, 6, 24, 40)
    # Key head 2, the second query head of its group, query 3 * 6 + 4 and key 1 * 8 + 5.
    assert found.pairs[1, 2 * 2 + 1, 22, 13] == x[1, 2, 3, 1, 5, 1 * 6 + 4]


def test_other_arrays_stay_blocks():
    """Such are those of rows or of keys, with features, with padded blocks or a single one, and
    flags that gradients read.
    """
    axes, x = AXES[0], blocks(AXES[0], 8, 12)
    stays = lambda x, axes, **new: by_pairs(x, axes, dataclasses.replace(LAYOUT, **new)) is x
    assert not stays(x, axes)
    assert stays(x[..., :1, :], axes) and stays(x[..., :1], axes) and stays(x[..., None], axes)
    assert stays(x, axes, tokens=(Tokens(ROW, 23, 6, group=2), TOKENS[1]))
    assert stays(x, axes, tokens=(TOKENS[0], Tokens(COL, 39, 8)))
    assert stays(x, axes, tokens=TOKENS[:1]) and stays(x, axes, tokens=())
    one = tuple(dataclasses.replace(t, count=t.block) for t in TOKENS)
    assert stays(x[:, :, :1, :1], axes, tokens=one, grid=(2, 3, 1, 1))
    assert not stays(x, axes, stage="backward")
    assert stays(x > 0, axes, stage="backward") and not stays(x > 0, axes)


T, H, D = 1024, 4, 64
KINDS = {
    "of each head": ((2, H, T, T), jnp.float32),
    "of all heads": ((2, 1, T, T), jnp.float32),
    "of each head, narrow": ((2, H, T, T), jnp.bfloat16),
    "of a dense mask": ((2, 1, T, T), bool),
}


@pytest.mark.parametrize("kind, group", [("of each head, narrow", 1)])
def test_they_are_not_copied(kind, group):
    """Nor is the gradient of a bias. That of a narrow one is summed in float32. A dense mask is
    copied once for a gradient. A bias of each head was copied whole, as 32 MiB of float32.
    """
    shape, dtype = KINDS[kind]
    q, k = (jax.ShapeDtypeStruct((2, T, h, D), jnp.float32) for h in (H, H // group))
    pairs = jax.ShapeDtypeStruct(shape, dtype)

    def forward(q, k, x=None):
        how: dict = dict(mask=Causal())
        if x is not None:
            how = dict(mask=x) if x.dtype == bool else dict(mask=Causal(), bias=x)
        return attention(q, k, k, **how).attention_outputs

    loss = lambda *xs: jnp.sin(forward(*xs)).sum()

    def temporary(run, *args):
        found = jax.jit(run).lower(*args).compile(DEFAULT_CODE).memory_analysis()
        return found.temp_size_in_bytes

    wrt = (0, 1) if kind == "of a dense mask" else (0, 1, 2)
    more = {"of a dense mask": 1, "of each head, narrow": 4}.get(kind, 0) * pairs.size
    assert temporary(forward, q, k, pairs) <= temporary(forward, q, k) + 2**20
    plain = temporary(jax.grad(loss, (0, 1)), q, k)
    assert temporary(jax.grad(loss, wrt), q, k, pairs) <= plain + more + 2**21
