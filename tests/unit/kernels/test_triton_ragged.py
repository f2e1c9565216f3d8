"""The kernel in Pallas Triton under `Ragged`: caches of any kind and capacity, by the error bound of
the oracle. More of its numbers: matrix/ with the target "triton_ragged".
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _gpu_caches import Doubled, judge, latents, quantised
from _tpu_rows import arrays, call, kept_as, LENGTHS
from _triton_lowered import kernels

from eqattn import attention, AttentionMetadata, KeyPadding, Ragged
from eqattn._problem.storage import Pages
from eqattn._sweep.block_sizes import BlockRequest, BlockSizes
from eqattn.cache import Bits
from eqattn.kernels.gpu.triton import TritonLowering
from eqattn.kernels.gpu.triton._decode import Sizes


def plain(t, heads, kv_heads, dim, width, keys=48, in_pages=False, dtype=jnp.bfloat16, page=16):
    """Queries, keys and values as a cache keeps them, and their numbers in float64."""
    q, k, v = (jnp.asarray(x, dtype) for x in arrays(t, heads, kv_heads, dim, width, keys))
    (k, all_k), (v, all_v) = (kept_as(x, None, in_pages, page=page) for x in (k, v))
    return (q, k, v), [np.asarray(x).astype(np.float64) for x in (q, all_k, all_v)]


# Names of the calls, the function that makes the arrays, its arguments, and those of the call.
CALLS: dict[str, Any] = {
    "one row": (plain, dict(t=1, heads=1, kv_heads=1, dim=16, width=16), {}),
    "groups": (plain, dict(t=1, heads=4, kv_heads=2, dim=16, width=24), dict(blocksize_k=16)),
    "drafts": (plain, dict(t=3, heads=6, kv_heads=2, dim=32, width=16), dict(blocksize_k=16)),
    "prompt": (plain, dict(t=40, heads=12, kv_heads=2, dim=16, width=16), {}),
    "float32": (plain, dict(t=2, heads=4, kv_heads=2, dim=12, width=5, dtype=jnp.float32), {}),
    "float16": (plain, dict(t=1, heads=4, kv_heads=4, dim=16, width=8, dtype=jnp.float16), {}),
    "uneven": (plain, dict(t=2, heads=2, kv_heads=1, dim=16, width=16), dict(blocksize_k=20)),
    "pages": (plain, dict(t=1, heads=4, kv_heads=2, dim=16, width=32, in_pages=True), {}),
    "odd pages": (
        plain,
        dict(t=1, heads=4, kv_heads=2, dim=16, width=8, in_pages=True, page=6),
        {},
    ),
    "large pages": (
        plain,
        dict(t=1, heads=4, kv_heads=2, dim=16, width=8, keys=400, in_pages=True, page=200),
        {},
    ),
    "int8": (
        quantised,
        dict(t=1, heads=4, kv_heads=2, dim=24, width=10, keys=48, stored=jnp.int8, in_pages=False),
        {},
    ),
    "int8 in pages": (
        quantised,
        dict(t=1, heads=4, kv_heads=2, dim=64, width=32, keys=64, stored=jnp.int8, in_pages=True),
        {},
    ),
    "float8": (
        quantised,
        dict(t=3, heads=3, kv_heads=1, dim=32, width=32, keys=50, in_pages=False)
        | dict(stored=jnp.float8_e4m3fn),
        dict(blocksize_k=16),
    ),
    "latents": (latents, dict(heads=4, t=1, width=32, rest=16, keys=48, in_pages=False), {}),
    "latents in pages": (latents, dict(heads=2, t=2, width=16, rest=8, keys=48, in_pages=True), {}),
    "latents of 8 bits": (
        latents,
        dict(heads=2, t=1, width=40, rest=8, keys=48, in_pages=False, stored=jnp.int8),
        {},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_caches_of_any_kind(name, monkeypatch):
    """Rows of 0 to 48 tokens. Several programs share a row where it has several tiles."""
    from eqattn.kernels.gpu import _stored_arrays

    monkeypatch.setattr(_stored_arrays, "LEAST_TILES", 1)
    make, given, more = CALLS[name]
    judge(*make(**given), backend="triton", **more)


def test_float8_where_a_chip_has_none(monkeypatch):
    """All of its numbers, as an A100 would widen them."""
    from eqattn.kernels import gpu
    from eqattn.kernels.gpu.triton import _triton

    monkeypatch.setattr(gpu, "capability", lambda: "8.0")
    x = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), jnp.float8_e4m3fn)
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        found = _triton.widened(x, dtype)
        np.testing.assert_array_equal(*(np.float64(y) for y in (found, x.astype(dtype))))
        assert found.dtype == dtype and "bitcast" in str(
            jax.make_jaxpr(lambda x: _triton.widened(x, dtype))(x)
        )


class Loose(Pages):
    """Pages whose table is not brought into its range before a kernel reads it, as that of a user's
    own form may be.
    """

    @property
    def table(self):
        return self._table


@pytest.mark.parametrize("name", ["drafts", "uneven", "odd pages", "int8 in pages", "latents"])
def test_memory_is_read_and_written_inside_of_arrays(name, monkeypatch):
    """The interpreter moves indices into their arrays, so each of them is looked at. A table has
    numbers of no page where a row has no tokens.
    """
    from eqattn.kernels.gpu.triton import _triton

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
    v = k.first if v is None else v
    found = call(q, k, v, backend="triton", **more).attention_outputs
    jax.effects_barrier()
    assert np.isfinite(np.float64(found)).all()
    assert len(seen) > 10 and not any(seen)


def lowered(q, k, v, **kw):
    return call(q, k, v, platform="triton", **kw).attention_outputs


@pytest.mark.parametrize("keys", [100, 128])
@pytest.mark.parametrize("in_pages", [False, True])
def test_the_kernel_is_found(in_pages, keys):
    """With any capacity, and with gradients that run as XLA code."""
    args, _ = plain(1, 4, 2, 64, 64, keys, in_pages, page=20 if keys == 100 else 16)
    assert kernels(lowered, *args) == 1
    assert kernels(jax.grad(lambda *xs: lowered(*xs).astype(jnp.float32).sum()), *args) == 1


def test_what_there_is_no_kernel_for():
    (q, k, v), _ = quantised(1, 4, 2, 32, 32, 48, jnp.int8, False)
    whole: Any = jnp.ones((4, 48, 2, 32), jnp.bfloat16)
    wide: Any = jnp.ones((4, 48, 2, 264), jnp.bfloat16)
    cases: Any = (
        ("values are bfloat16 and int8", (q, k, whole)),
        ("up to 256 numbers, not 264 and 264", (wide[:, :1], wide, wide)),
        ("its values are stored in a way of their own", (q, whole, Doubled(whole))),
        ("its keys are stored in a way of their own", (q, Doubled(whole), whole)),
        ("its keys are eqattn.cache.Bits; .* bits=False", (q, Bits.of(whole), Bits.of(whole))),
    )  # fmt: skip
    for said, args in cases:
        with pytest.raises(ValueError, match=f"no kernel for this call .*{said}"):
            kernels(lowered, *args)
    automatic = Ragged(AttentionMetadata(backend="triton"))
    unasked = lambda q, k, v: attention(q, k, v, automatic).attention_outputs
    assert kernels(unasked, q, k, v) == 0
    assert Ragged(AttentionMetadata(platform="triton")).supports(mask=KeyPadding(LENGTHS))


@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.parametrize("mapped", ["numbers", "scales"])
def test_scales_lie_as_their_numbers(in_pages, mapped):
    """They would be read at the places of these, and `vmap` may map either alone."""
    (q, k, v), _ = quantised(1, 4, 2, 32, 32, 64, jnp.int8, in_pages)
    of = (lambda x: x.content) if in_pages else (lambda x: x)
    where = lambda x: getattr(of(x), "values" if mapped == "numbers" else "scales")
    several = jnp.stack([where(k)] * 2)
    run = lambda x: lowered(q, eqx.tree_at(where, k, x), v)
    with pytest.raises(ValueError, match="its numbers and their scales vary with other axes"):
        kernels(jax.vmap(run), several)
    # A cache that is mapped as a whole is right.
    both = jax.tree.map(lambda x: jnp.stack([x, x]), (k, v))
    run = lambda k, v: call(q, k, v, backend="triton").attention_outputs
    found, want = jax.jit(jax.vmap(run))(*both), jax.jit(run)(k, v)
    np.testing.assert_array_equal(found, jnp.stack([want, want]))


@pytest.mark.parametrize("page", [16, 48])
def test_keys_alone_in_pages(page):
    args, _ = plain(1, 4, 2, 64, 64, 96, True, page=page)
    for k, v in ((args[1], args[2].materialise()), (args[1].materialise(), args[2])):
        with pytest.raises(ValueError, match="only its keys or only its values lie in pages"):
            kernels(lowered, args[0], k, v)


def test_sizes():
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
