"""What the kernels in Pallas Triton make of a call: where they read and write, and their sizes."""

import pathlib
import re
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from _kernels import how, of
from _stored_rows import cache, call, latents, LENGTHS

from eqattn import attention, Causal
from eqattn._sweep.grid import BlockRequest, BlockSizes
from eqattn.cache import Pages
from eqattn.kernels.nvidia import hopper as gpu, triton
from eqattn.kernels.nvidia.triton import _pallas as _triton, TritonLowering
from eqattn.kernels.nvidia.triton._decode import Sizes


kernels, text_of, first_visits = of("triton")


@pytest.mark.parametrize("tokens, dim", [(264, 64), (261, 72)])
def test_tokens_are_read_and_written_where_they_lie(tokens, dim):
    """Whatever their number and size: nothing is padded or copied."""
    q, k, v = (jax.ShapeDtypeStruct((2, tokens, h, dim), jnp.bfloat16) for h in (4, 2, 2))
    run = lambda *x: attention(*x, how("triton", "pallas"), mask=Causal()).attention_outputs
    (line,) = first_visits(text_of(run, q, k, v))
    given, _, out = line.rpartition(" : ")[2].partition("->")
    of_rows, of_keys = (f"2x{tokens}x{h}x{dim}xbf16" for h in (4, 2))
    types = [re.findall(r"tensor<([^>]*)>", x) for x in (given, out)]
    assert types[0][:3] == [of_rows, of_keys, of_keys] and types[1][0] == of_rows


def test_only_one_module_knows_pallas_triton():
    assert triton.available()
    files = pathlib.Path(gpu.__file__).parents[2].rglob("*.py")
    found = [x.name for x in files if "from jax.experimental.pallas import triton" in x.read_text()]
    assert found == ["_pallas.py"]


def test_float8_where_a_chip_has_none(monkeypatch):
    """All of its numbers, as an A100 would widen them."""
    monkeypatch.setattr(_triton, "capability", lambda: "8.0")
    x = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), jnp.float8_e4m3fn)
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        found = _triton.widened(x, dtype)
        np.testing.assert_array_equal(*(np.float64(y) for y in (found, x.astype(dtype))))
        assert found.dtype == dtype and "bitcast" in str(
            jax.make_jaxpr(lambda x: _triton.widened(x, dtype))(x)
        )


CALLS: dict[str, Any] = {
    "drafts": (cache, dict(t=3, heads=6, kv_heads=2, dim=32, width=16), dict(blocksize_k=16)),
    "uneven": (cache, dict(t=2, heads=2, kv_heads=1, dim=16, width=16), dict(blocksize_k=20)),
    "odd pages": (cache, dict(t=1, heads=4, kv_heads=2, dim=16, width=8, page=6), {}),
    "int8 in pages": (
        cache,
        dict(t=1, heads=4, kv_heads=2, dim=64, width=32, keys=64, stored=jnp.int8, page=32),
        {},
    ),
    "latents": (latents, dict(heads=4, t=1, width=32, rest=16), {}),
}


class Loose(Pages):
    """Pages whose table is not brought into its range before a kernel reads it, as that of a user's
    own form may be.
    """

    @property
    def table(self):
        return self._table


@pytest.mark.parametrize("name", CALLS)
def test_memory_is_read_and_written_inside_of_arrays(name, monkeypatch):
    """The interpreter moves indices into their arrays, so each of them is looked at. A table has
    numbers of no page where a row has no tokens.
    """
    seen = []

    def watched(access):
        def f(ref, *args, mask=None, **kw):
            (indexer,) = ref.transforms
            outside = False
            for i, n in zip(indexer.indices, ref.ref.shape, strict=True):
                outside |= (i < 0) | (i >= n)
            outside = outside if mask is None else outside & mask
            jax.debug.callback(lambda x: seen.append(bool(x)), jnp.any(outside))
            return access(ref, *args, mask=mask, **kw)

        return f

    for access in ("load", "store"):
        monkeypatch.setattr(_triton.triton, access, watched(getattr(_triton.triton, access)))
    make, given, more = CALLS[name]
    (q, k, v), _ = make(**given)
    if isinstance(k, Pages):
        size = k.shape[1] // k.table.shape[1]
        none = np.arange(k.table.shape[1]) >= -(-LENGTHS[:, None] // size)
        k, v = (Loose(x.content, jnp.where(none, 2**30, x.table)) for x in (k, v))
    found = call(q, k, v, backend="triton", **more).attention_outputs
    jax.effects_barrier()
    assert np.isfinite(np.float64(found)).all()
    assert len(seen) > 10 and not any(seen)


def test_sizes_of_caches():
    """Tiles are powers of two that shared memory holds twice; blocks are whole pages."""

    def chosen(keys, page=0, dim=128):
        request = BlockRequest(1, keys, 32, jnp.bfloat16, dim, in_place=True, page_size=page)
        return TritonLowering("pallas").choose_blocks(request)

    assert chosen(8192) == BlockSizes(16, 128) and chosen(8192, dim=576).keys == 64
    assert chosen(8192, 16).keys == 128 and chosen(32, 16).keys == 32
    assert chosen(8192, 48).keys == 96 and chosen(8192, 200).keys == 200

    def sizes(dims, width, rows=32, heads=8, keys=128, itemsize=2, **kw):
        return Sizes(rows, keys, heads, dims, width, 0, itemsize=itemsize, **kw)

    few = sizes((128,), 128)
    assert (few.tile_r, few.tile_k, few.tiles, few.written, few.padded_rows) == (16, 64, 8, 4, 128)
    many = sizes((64,), 64, rows=8 * 80)
    assert (many.tile_r, many.tile_k, many.written, many.tiles) == (64, 128, 64, 16)
    assert sizes((256,), 256, rows=8 * 80).tile_r == 32 and sizes((256,), 256).tile_k == 32
    latents = sizes((512, 64), 512, rows=128, heads=1, shared=True)
    assert (latents.tile_r, latents.tile_k, latents.tiles) == (32, 32, 4)
    exact = sizes((128,), 128, rows=8 * 80, itemsize=4)
    assert (exact.tile_r, exact.tile_k) == (32, 32)
    assert sizes((16,), 16, keys=20).padded_keys == 32
