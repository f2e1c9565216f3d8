"""The kernel for NVIDIA GPUs under `Ragged`, over caches of 8 bits and of latents, by the error bound
of the oracle.
"""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _gpu_caches import Doubled, judge, latents, quantised
from _gpu_lowered import first_visits, kernels, text_of
from _tpu_rows import arrays, call

from eqattn import attention, AttentionMetadata, Ragged, Segments
from eqattn.cache import Quantized
from eqattn.kernels.gpu import _mosaic


newest = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="the kernel is written for jax 0.12 and newer"
)


EIGHT: dict[str, Any] = {
    "int8": dict(t=1, heads=4, kv_heads=2, dim=32, width=64, stored=jnp.int8),
    "pages": dict(
        t=1, heads=4, kv_heads=2, dim=64, width=32, keys=64, stored=jnp.int8, in_pages=True
    ),
    "short pages": dict(
        t=1, heads=2, kv_heads=1, dim=32, width=32, stored=jnp.int8, in_pages=True, page=16
    ),
    "float8": dict(t=3, heads=3, kv_heads=1, dim=32, width=32, stored=jnp.float8_e4m3fn),
}
LATENTS: dict[str, Any] = {
    "latents": dict(t=1, heads=4, width=32, rest=16),
    "pages": dict(t=2, heads=2, width=16, rest=32, in_pages=True),
    "latents of 8 bits": dict(t=1, heads=2, width=32, rest=32, stored=jnp.int8),
}


@newest
@pytest.mark.parametrize("name", EIGHT)
def test_eight_bits(name, monkeypatch):
    """In order and in pages; scales meet logits and probabilities, shares of rows are merged."""
    from eqattn.kernels.gpu import _stored_arrays

    monkeypatch.setattr(_stored_arrays, "LEAST_TILES", 1)
    judge(*quantised(**dict(keys=48, in_pages=False) | EIGHT[name]))


@newest
@pytest.mark.parametrize("name", LATENTS)
def test_latents(name):
    """Values are read as the first part of their keys."""
    judge(*latents(**dict(keys=48, in_pages=False) | LATENTS[name]))


@newest
@pytest.mark.slow
def test_long_latents():
    """Of DeepSeek's size, whose values two warpgroups add up."""
    judge(*latents(1, 4, 512, 64, 48, False))


@newest
@pytest.mark.parametrize("stored", [jnp.int8, jnp.float8_e5m2])
def test_many_blocks_of_eight_bits(stored):
    """More tiles than there are stages, and prompts."""
    judge(*quantised(20, 8, 1, 32, 32, 144, stored, False), blocksize_k=16)


def lowered(q, k, v, **kw):
    v = k.first if v is None else v
    return call(q, k, v, platform="gpu", backend="cuda", **kw).attention_outputs


@newest
def test_the_kernel_is_found():
    """And latents are one operand of it."""
    assert kernels(lowered, *quantised(1, 4, 2, 64, 64, 128, jnp.int8, True)[0]) == 1
    args, _ = latents(1, 4, 32, 16, 128, False)
    text = text_of(lowered, *args)
    (line,) = first_visits(text)
    assert line.count("4x128x32xbf16") == 1


@newest
@pytest.mark.parametrize("keys", [16, 48])
@pytest.mark.parametrize("stored", [None, jnp.int8])
def test_copies_begin_at_lines(keys, stored, monkeypatch):
    """An H200 found an address of 64 bytes misaligned, where the second vector of 16 numbers began.
    The interpreter does not know that. So each copy is looked at while it is traced.
    """
    seen = []

    def begins(ref):
        """How many bytes lie before the copy, for each index that may be any number."""
        shape, size = ref.ref.shape, jnp.dtype(ref.ref.dtype).itemsize
        for indexer in (x for x in ref.transforms if hasattr(x, "indices")):
            for axis, i in enumerate(indexer.indices):
                start = getattr(i, "start", i)
                step = int(np.prod(shape[axis + 1 :])) * size
                yield start * step if isinstance(start, int) else step
            shape = indexer.get_indexer_shape()

    def copy_in(from_, into, arrived, copy=_mosaic.copy_in):
        if hasattr(into, "transforms"):
            seen.extend(begins(into))
        return copy(from_, into, arrived)

    monkeypatch.setattr(_mosaic, "copy_in", copy_in)
    if stored is None:
        q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in arrays(1, 4, 2, 64, 64, keys))
    else:
        q, k, v = quantised(1, 4, 2, 64, 64, keys, stored, False)[0]
    ids = (jnp.zeros((len(q), n), jnp.int32) for n in (1, keys))
    assert kernels(ft.partial(lowered, mask=Segments(*ids), blocksize_k=16), q, k, v) == 1
    assert seen and not [n for n in seen if n % 128]


@newest
def test_what_there_is_no_kernel_for():
    (q, k, v), _ = quantised(1, 4, 2, 32, 32, 48, jnp.int8, False)
    plain: Any = jnp.ones((4, 48, 2, 32), jnp.bfloat16)
    half = Quantized.quantize(plain.astype(jnp.float16))
    cases: Any = (
        ("queries are bfloat16 where keys have 8 bits", (q.astype(jnp.float16), half, half)),
        ("multiples of 32 numbers, not 16 and 32", (q[..., :16], Quantized.quantize(plain[..., :16]), v)),
        ("values are bfloat16 and int8", (q, k, plain)),
        ("its values are stored in a way of their own", (q, plain, Doubled(plain))),
        ("its keys are stored in a way of their own", (q, Doubled(plain), plain)),
    )  # fmt: skip
    for said, args in cases:
        with pytest.raises(ValueError, match=f"no kernel for this call .*{said}"):
            text_of(lowered, *args)
    automatic = Ragged(AttentionMetadata(backend="cuda"))
    unasked = lambda q, k, v: attention(q, k, v, automatic).attention_outputs
    assert kernels(unasked, q, k, v) == 0


@newest
@pytest.mark.parametrize("kind", ["int8", "latents"])
def test_warpgroups_do_not_race(kind, monkeypatch):
    """Nor does the one that widens numbers with the one that multiplies."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    from eqattn.kernels.gpu import _mosaic

    mosaic: Any = _mosaic.plgpu
    params = ft.partial(mosaic.InterpretGPUParams, detect_races=True)
    monkeypatch.setattr(mosaic, "InterpretGPUParams", params)
    if kind == "int8":
        args = quantised(3, 4, 2, 32, 32, 144, jnp.int8, False)
    else:
        args = latents(3, 4, 32, 16, 144, False)
    judge(*args, blocksize_k=16)
    assert not gpu_callbacks.get_races().races_found
