"""No warpgroup of the kernels for Hopper reads a tile that another one replaces, as Mosaic's interpreter
finds it.
"""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _kernels import drawn, how, newest
from _stored_rows import cache, call, check, judge, latents, LENGTHS

from eqattn import attention, Causal, Segments, SlidingWindow
from eqattn.cache import LatentKV
from eqattn.kernels.nvidia.hopper import _mosaic


pytestmark = newest


@pytest.fixture(autouse=True)
def races(monkeypatch):
    """Races are looked for, and there is none."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    mosaic: Any = _mosaic.plgpu
    params = ft.partial(mosaic.InterpretGPUParams, detect_races=True)
    monkeypatch.setattr(mosaic, "InterpretGPUParams", params)
    yield
    assert not gpu_callbacks.get_races().races_found


def run_of(mask):
    return lambda *x: attention(*x, how("cuda"), mask=mask).attention_outputs.astype(jnp.float32)


@pytest.mark.parametrize("dim", [16, 144])
@pytest.mark.parametrize("value", [1.0, np.nan])
def test_outputs(value, dim):
    """For tiles in shared memory, also where keys come a second time. With vectors of 16 numbers a
    warpgroup copies, and with those of 144 who computes.
    """
    given, _ = drawn("cuda", 500, 500, 1, 1, dim, dim)
    q, k, v = given.values()
    mask = Causal() & Segments(jnp.arange(500, dtype=jnp.int32) // 200)
    got = jax.jit(run_of(mask))(q, k, v.at[0, 300].set(value))
    assert jnp.isnan(got).any() == np.isnan(value)


@pytest.mark.parametrize("heads, mask", [((1, 1), Causal()), ((4, 1), SlidingWindow(90, 0))])
@pytest.mark.parametrize("value", [1.0, np.nan])
def test_gradients(value, heads, mask):
    """Also where heads of a group are copied apart, and where tiles of values are replaced."""
    given, _ = drawn("cuda", 300 // heads[0] + 65, 300 // heads[0] + 65, *heads, 16, 16)
    q, k, v = given.values()
    loss = lambda *x: run_of(mask)(*x).sum()
    found = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v.at[0, 10].set(value))
    assert all(jnp.isnan(x).any() == np.isnan(value) for x in found)


CACHES: dict[str, Any] = {
    "in order": (cache, dict(t=3, heads=4, kv_heads=2, dim=16, width=16, keys=144)),
    "pages": (cache, dict(t=3, heads=4, kv_heads=2, dim=16, width=16, keys=144, page=16)),
    "int8": (cache, dict(t=3, heads=4, kv_heads=2, dim=32, width=32, keys=144, stored=jnp.int8)),
    "latents": (latents, dict(t=3, heads=4, width=32, rest=16, keys=144)),
}


@pytest.mark.parametrize("name", CACHES)
def test_caches(name):
    """With more tiles than there are stages. One warpgroup widens numbers that another multiplies."""
    make, given = CACHES[name]
    args, plain = make(**given)
    judge(args, plain, backend="cuda", **({} if "page" in given else dict(blocksize_k=16)))


HIDDEN = (np.arange(144) >= LENGTHS[:, None])[..., None, None]


def test_caches_with_what_is_not_finite():
    """It is cleaned where no query sees it."""
    (q, k, v), plain = cache(3, 4, 2, 16, 16, 144)
    run = lambda v: call(q, k, v, backend="cuda", blocksize_k=16)
    output = jax.jit(run)(jnp.where(HIDDEN, jnp.nan, v).astype(v.dtype))
    found = dict(out=output.attention_outputs, lse=output.logsumexp)
    check(found, q.dtype, plain)


def test_latents_with_what_is_not_finite():
    """Two warpgroups multiply with the values of latents. The second alone adds up the last column,
    which the last key of a row spoils.
    """
    (q, k, _), _ = latents(1, 4, 512, 64, 144)
    first = jnp.where(HIDDEN, jnp.nan, k.c_kv.array).astype(q.dtype)
    run = jax.jit(lambda x: call(q, LatentKV(x, k.k_rope), None, backend="cuda", blocksize_k=16))
    assert np.isfinite(np.float32(run(first).attention_outputs)).all()
    first = first.at[0, LENGTHS[0] - 1, 0, -1].set(jnp.nan)
    nan = np.isnan(np.float32(run(first).attention_outputs)).all((1, 2, 3))
    assert nan.tolist() == [True, False, False, False]
