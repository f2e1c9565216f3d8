"""The kernel for NVIDIA GPUs under `Ragged`: rows of unequal length, in caches and in pages, few
queries and many. More of its numbers: matrix/ with the target "gpu_ragged".
"""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _gpu_caches import latents
from _gpu_lowered import kernels, text_of
from _tpu_rows import arrays, call, dense, kept_as, LENGTHS, seen

from eqattn import attention, AttentionMetadata, Causal, KeyPadding, Ragged, SlidingWindow
from eqattn._problem.joined import Joined
from eqattn._sweep.block_sizes import BlockRequest, BlockSizes
from eqattn._sweep.grid import GridLayout
from eqattn.kernels.gpu import GPULowering
from eqattn.kernels.gpu._stored import Sizes


newest = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="the kernel is written for jax 0.12 and newer"
)


def stored(t, heads, kv_heads, dim, width, keys, in_pages):
    """Queries, keys and values in bfloat16 as a cache keeps them, and plain ones."""
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in arrays(t, heads, kv_heads, dim, width, keys))
    (k, plain_k), (v, plain_v) = (kept_as(x, None, in_pages) for x in (k, v))
    return (q, k, v), [np.asarray(x).astype(np.float64) for x in (q, plain_k, plain_v)]


def interpreted(*args, **kw):
    """The output and the logsumexp of the kernel."""

    @jax.jit
    def run(*args):
        output = call(*args, backend="cuda", **kw)
        return output.attention_outputs, output.logsumexp

    return [np.asarray(x).astype(np.float64) for x in run(*args)]


def close(got, want):
    """The output within some roundings of bfloat16, the logsumexp within those of float32."""
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=1e-2)
    np.testing.assert_allclose(got[1], want[1], rtol=2e-6, atol=2e-6)


CASES: dict[str, Any] = {
    "pages": (dict(t=1, heads=4, kv_heads=2, dim=16, width=32, in_pages=True), {}),
    "drafts": (dict(t=3, heads=6, kv_heads=2, dim=32, width=16), dict(blocksize_k=16)),
    "prompt": (dict(t=20, heads=8, kv_heads=1, dim=16, width=16, keys=32), {}),
    "one row": (dict(t=1, heads=1, kv_heads=1, dim=16, width=16), dict(blocksize_k=16)),
    "uneven": (dict(t=2, heads=2, kv_heads=1, dim=16, width=16), dict(blocksize_k=20)),
}


@newest
@pytest.mark.parametrize("name", CASES)
def test_rows_of_any_length(name, monkeypatch):
    """By several programs a row, whose Carries are merged; of heads that share keys; of more rows
    than a tile has; and of blocks that are no whole tiles.
    """
    from eqattn.kernels.gpu import _stored_arrays

    monkeypatch.setattr(_stored_arrays, "LEAST_TILES", 1)
    given, sizes = CASES[name]
    given = dict(keys=48, in_pages=False) | given
    args, plain = stored(**given)
    window = SlidingWindow(19, 0) if name == "pages" else None
    shown = seen(given["t"], given["keys"], window=19 if name == "pages" else None)
    close(interpreted(*args, mask=window, **sizes), dense(*plain, shown))


@newest
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["in order", "pages", "not finite", "latents"])
def test_warpgroups_do_not_race(kind, monkeypatch):
    """With more tiles than there are stages. What is not finite where no query sees it is cleaned;
    two warpgroups multiply with the values of latents.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    from eqattn.kernels.gpu import _mosaic, _stored_arrays

    mosaic: Any = _mosaic.plgpu
    params = ft.partial(mosaic.InterpretGPUParams, detect_races=True)
    monkeypatch.setattr(mosaic, "InterpretGPUParams", params)
    monkeypatch.setattr(_stored_arrays, "LEAST_TILES", 4)
    hidden = (np.arange(144) >= LENGTHS[:, None])[..., None, None]
    if kind == "latents":
        (q, k, _), _ = latents(1, 4, 512, 64, 144, False)
        first = jnp.where(hidden, jnp.nan, k.first.array).astype(q.dtype)
        k = Joined(first, k.rest)
        run = lambda q, k: call(q, k, k.first, backend="cuda", blocksize_k=16).attention_outputs
        assert np.isfinite(jax.jit(run)(q, k)).all()
        # The second warpgroup alone adds up the last column, which the last key of a row spoils.
        k = Joined(first.at[0, LENGTHS[0] - 1, 0, -1].set(jnp.nan), k.rest)
        assert np.isnan(np.float32(jax.jit(run)(q, k))).all((1, 2, 3)).tolist() == [
            True,
            *[False] * 3,
        ]
    else:
        (q, k, v), plain = stored(3, 4, 2, 16, 16, 144, kind == "pages")
        if kind == "not finite":
            v = jnp.where(hidden, jnp.nan, v).astype(v.dtype)
        sizes = {} if kind == "pages" else dict(blocksize_k=16)
        close(interpreted(q, k, v, **sizes), dense(*plain, seen(3, 144)))
    assert not gpu_callbacks.get_races().races_found


def lowered(q, k, v, **kw):
    return call(q, k, v, platform="gpu", backend="cuda", **kw).attention_outputs


@newest
@pytest.mark.parametrize("in_pages", [False, True])
def test_the_kernel_is_found(in_pages):
    """With no copy of keys or values, and gradients that run as XLA code."""
    args, _ = stored(1, 4, 2, 64, 64, 128, in_pages)
    assert kernels(lowered, *args) == 1
    assert kernels(jax.grad(lambda *xs: lowered(*xs).astype(jnp.float32).sum()), *args) == 1


@newest
def test_training_has_kernels_for_gradients():
    """Of rows of unequal length, whose keys are arrays."""
    (q, k, v), _ = stored(64, 4, 2, 64, 64, 128, False)
    strategy = Ragged(AttentionMetadata(platform="gpu", backend="cuda", runtime_dtype=q.dtype))

    def loss(*xs):
        output = attention(*xs, strategy, mask=Causal() & KeyPadding(jnp.asarray(LENGTHS)))
        return output.attention_outputs.astype(jnp.float32).sum()

    assert kernels(jax.grad(loss, (0, 1, 2)), q, k, v) == 3


@newest
@pytest.mark.parametrize("keys", [48, 80])
def test_capacities_that_64_does_not_divide(keys):
    """The compiler takes their tiles, of 48 keys and of 16."""
    assert kernels(lowered, *stored(1, 4, 2, 64, 64, keys, False)[0]) == 1


@newest
def test_what_there_is_no_kernel_for():
    (q, k, v), _ = stored(1, 4, 2, 16, 16, 48, False)
    with pytest.raises(ValueError, match="multiples of 16 numbers, not 12 and 16"):
        text_of(lowered, q[..., :12], k[..., :12], v)
    with pytest.raises(ValueError, match="bfloat16 and float16, not float32"):
        call(*arrays(), platform="gpu")
    automatic = Ragged(AttentionMetadata(backend="cuda"))
    assert kernels(lambda *xs: attention(*xs, automatic).attention_outputs, q, k, v) == 0
    assert Ragged(AttentionMetadata(platform="gpu")).supports(mask=KeyPadding(LENGTHS))


def test_sizes():
    """Blocks divide a cache, or are whole tiles of pages; tiles and heads are whole."""

    def chosen(keys, page=0, queries=1):
        request = BlockRequest(queries, keys, 32, jnp.bfloat16, 128, in_place=True, page_size=page)
        return GPULowering("pallas").choose_blocks(request)

    assert chosen(8192) == BlockSizes(16, 128)
    assert chosen(80).keys == 80 and chosen(112).keys == 112 and chosen(100).keys == 128
    assert chosen(8192, 16).keys == 64 and chosen(32, 16).keys == 32
    assert chosen(8192, 128).keys == 128 and chosen(8192, 48).keys == 48
    whole = Sizes(rows=32, keys=128, heads=8, dims=(128,), width=128, pages=0)
    assert (whole.tile_k, whole.tiles, whole.written, whole.stages) == (64, 8, 8, 2)
    paged = Sizes(rows=4 * 70, keys=64, heads=4, dims=(64,), width=64, pages=4)
    assert (paged.piece, paged.tile_k, paged.tiles, paged.written) == (16, 64, 8, 64)
    uneven = Sizes(rows=8, keys=20, heads=1, dims=(16,), width=16, pages=0)
    assert (uneven.tile_k, uneven.padded_keys) == (32, 32)
    eight = Sizes(rows=32, keys=128, heads=8, dims=(128,), width=128, pages=0, eight=True)
    assert (eight.widened, eight.stages) == ([(128, 0), (128, 64)], 4)
    assert (eight.wide, eight.widening) == (2, 2)  # one of each is multiplied meanwhile
    large = Sizes(rows=32, keys=128, heads=8, dims=(256,), width=256, pages=0, eight=True)
    assert (large.stages, large.wide) == (3, 1)  # shared memory has room for one
    few = Sizes(rows=8, keys=48, heads=1, dims=(32,), width=32, pages=0, eight=True)
    assert (few.tile_k, few.tile_rows) == (48, 64)
    latents = Sizes(
        rows=128, keys=128, heads=1, dims=(512, 64), width=512, pages=0, shared=True
    )  # fmt: skip
    assert (latents.widths, latents.tile_k, latents.staged) == ([256, 256], 32, 32)
    assert (latents.stages, latents.tiles, latents.widened) == (3, 2, [])


@newest
def test_shares_of_the_chip():
    """A long row alone is shared out; many rows are not, nor is a short one."""
    from eqattn.kernels.gpu._stored_arrays import PROGRAMS, shares_of

    sizes = Sizes(rows=32, keys=128, heads=8, dims=(128,), width=128, pages=0)

    def shares(batch, keys):
        layout = GridLayout((batch, 1, 1, keys // 128), (128, 32), ())
        return shares_of(layout, sizes, PROGRAMS)

    assert shares(1, 131072) == 132 and shares(64, 8192) == 3
    assert shares(256, 8192) == 1 and shares(1, 512) == 1
