"""Real documents on up to 256 devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring.test_balanced as unit
from ring.common import attend, close, expected, gradient, k, mesh_of, q, SEGMENTS, T, v

from eqattn import attention, AttentionMetadata, Balanced, Causal, Ring, Segments, Zigzag


@pytest.mark.parametrize(
    "tokens, n", [(2**16, 16), (2**17, 32), (2**18, 64), (2**19, 128), (2**20, 256)]
)
def test_real_documents(tokens, n):
    unit.test_real_documents(tokens, n)


def test_a_ring_in_a_balanced_layout():
    """All gradients, as the layout of the strategy; and values by positions of two batches, of one
    program.
    """
    n = 2
    mask = Causal() & Segments(np.asarray(SEGMENTS))
    layout = Balanced(mask, T, n, chunk=4, batch=2)
    assert len({*layout.held}) == n and layout.held != ((0, 2), (1, 3))
    loader = Ring(AttentionMetadata(runtime_dtype=jnp.float64, blocksize_q=4, blocksize_k=4))

    def given(q, k, v, ids, positions):
        mask = Causal() & Segments(ids)
        where = dict(q_positions=positions, kv_positions=positions)
        return attention(q, k, v, loader, mask=mask, **where).attention_outputs

    program = jax.jit(given)
    with jax.set_mesh(mesh_of(n)):
        args = [layout.permute(x, n) for x in (q, k, v, SEGMENTS)]
        found = jax.jit(gradient(lambda *xs: attend(*xs, args[3], layout=layout)))(*args[:3])
        want = jax.tree.map(lambda x: layout.permute(x, n) if x.ndim else x, expected())
        close(found, want)
        want = attend(q, k, v)
        for made in (layout, Balanced(None, T, n, chunk=4), Zigzag()):
            moved = [made.permute(x, n) for x in (q, k, v, SEGMENTS)]
            out = program(*moved, made.positions(T, n).reshape(-1))
            close(made.unpermute(out, n), want)
    assert program._cache_size() == 1
