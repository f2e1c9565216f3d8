"""What is not finite in a cache, by kernels for NVIDIA GPUs: it reaches the rows that see it, and no
other row changes by a bit.
"""

from typing import Any

import _gpu_lowered
import _triton_lowered
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _gpu_caches import latents, quantised
from _tpu_rows import arrays, call, kept_as, LENGTHS, seen

from eqattn import attention, AttentionMetadata, Ragged
from eqattn._problem.joined import Joined
from eqattn._problem.storage import Quantized, Stored


def plain(t, heads, kv_heads, dim, width, keys, dtype=jnp.bfloat16):
    return [jnp.asarray(x, dtype) for x in arrays(t, heads, kv_heads, dim, width, keys)], None


# The function that makes a cache, its arguments, and those of the call.
GROUPS: dict[str, Any] = dict(t=2, heads=4, kv_heads=2, dim=32, width=32)
CACHES: dict[str, Any] = {
    "in order": (plain, GROUPS | dict(keys=48), dict(blocksize_k=16)),
    "tiles of 64": (plain, GROUPS | dict(keys=64, width=64), {}),
    "uneven blocks": (plain, GROUPS | dict(keys=50), dict(blocksize_k=20)),
    "pages": (plain, GROUPS | dict(keys=48), dict(page=16)),
    "int8": (quantised, GROUPS | dict(keys=48, stored=jnp.int8, in_pages=False), {}),
    "float8": (quantised, GROUPS | dict(keys=48, stored=jnp.float8_e4m3fn, in_pages=False), {}),
    "latents": (latents, dict(t=1, heads=4, width=32, rest=16, keys=48, in_pages=False), {}),
}
OF_TRITON = ("in order", "uneven blocks", "pages", "int8", "float8", "latents")

newest = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="the kernel is written for jax 0.12 and newer"
)
KERNELS = [
    *(pytest.param("cuda", name, marks=newest) for name in CACHES),
    *(("triton", name) for name in OF_TRITON),
]


def spoiled(x, number, where):
    """A cache with a number that is not finite at some tokens and heads, `[rows, tokens, heads]`, as
    the last feature; where numbers have 8 bits, in their scales, and in them if they can hold it.
    """
    where = jnp.asarray(where)
    if isinstance(x, Joined):
        return Joined(*(spoiled(part, number, where) for part in (x.first, x.rest)))
    if isinstance(x, Stored):
        return spoiled(x.array, number, where)
    if isinstance(x, Quantized):
        values = x.values
        if jnp.issubdtype(values.dtype, jnp.floating):
            values = spoiled(values, jnp.nan, where)
        scales = jnp.where(where.reshape(x.scales.shape), number, x.scales)
        x = eqx.tree_at(lambda x: x.scales, x, scales)
        return eqx.tree_at(lambda x: x.values, x, values)
    spoilt = jnp.where(where, jnp.asarray(number).astype(x.dtype), x[..., -1])
    return x.at[..., -1].set(spoilt)


@pytest.mark.parametrize("backend, name", KERNELS)
def test_what_is_not_finite_reaches_its_rows(backend, name, monkeypatch):
    """By several programs a row. Tokens behind the last one are seen by no query, and the last one
    by the last query only.
    """
    from eqattn.kernels.gpu import _stored_arrays

    monkeypatch.setattr(_stored_arrays, "LEAST_TILES", 1)
    make, given, more = CACHES[name]
    (q, k, v), _ = make(**given)
    keys, page = given["keys"], more.get("page")
    more = {n: x for n, x in more.items() if n != "page"}

    @jax.jit
    def run(q, k, v):
        if page:
            k, v = (kept_as(x, None, True, page=page)[0] for x in (k, v))
        output = call(q, k, k.first if v is None else v, backend=backend, **more)
        return output.attention_outputs, output.logsumexp

    shown, fine = seen(given["t"], keys), run(q, k, v)
    hidden = np.repeat(~shown.any(1)[..., None], given.get("kv_heads", 1), axis=2)
    spoil = lambda x, *how: x if x is None else spoiled(x, *how)
    for number in (jnp.nan, jnp.inf):
        found = run(q, *(spoil(x, number, hidden) for x in (k, v)))
        for x, y in zip(found, fine):
            np.testing.assert_array_equal(x, y)
    heads = np.arange(q.shape[2]) >= q.shape[2] // hidden.shape[2] * (hidden.shape[2] - 1)
    for token in (LENGTHS[0] - 1, 0):  # of the first row, in a block with and without a mask
        one = np.zeros_like(hidden)
        one[0, token, -1] = True
        of_keys, of_values = (
            (spoil(k, jnp.nan, one), v) if v is None else (k, spoil(v, jnp.inf, one))
        )
        out, _ = run(q, of_keys, of_values)
        sees = np.zeros(out.shape[:3], bool)
        sees[0] = shown[0, :, token, None] & heads
        assert sees.any() and np.isnan(np.float32(out)[sees]).all()
        np.testing.assert_array_equal(np.float32(out)[~sees], np.float32(fine[0])[~sees])


@pytest.mark.parametrize("backend", [pytest.param("cuda", marks=newest), "triton"])
@pytest.mark.parametrize("least", [1, 8])
def test_a_row_is_not_a_number_as_a_whole(backend, least, monkeypatch):
    """Where every query sees every key there is nothing to clean, in one program or in several."""
    from eqattn.kernels.gpu import _stored_arrays

    monkeypatch.setattr(_stored_arrays, "LEAST_TILES", least)
    (q, k, v), _ = plain(**GROUPS | dict(keys=48))
    metadata = AttentionMetadata(
        platform="interpret", backend=backend, runtime_dtype=q.dtype, blocksize_k=16
    )
    run = jax.jit(lambda *xs: attention(*xs, Ragged(metadata)).attention_outputs)
    out = np.float32(run(q, k, v.at[0, 5, 1, 3].set(jnp.inf)))
    nan = np.isnan(out)
    assert nan[0, :, 2:].all() and nan.sum() == nan[0, :, 2:].size


@pytest.mark.parametrize(
    "platform, lowered",
    [pytest.param("gpu", _gpu_lowered, marks=newest), ("triton", _triton_lowered)],
)
def test_the_host_decides_nothing(platform, lowered):
    """No step of decoding waits until the host has read what the device found."""
    args, _ = plain(**GROUPS | dict(keys=64))
    more = dict(backend="cuda") if platform == "gpu" else {}
    run = lambda *xs: call(*xs, platform=platform, **more).attention_outputs
    text = lowered.text_of(run, *args)
    assert "custom_call" in text
    assert not [x for x in ("stablehlo.case", "stablehlo.if", "stablehlo.while") if x in text]
