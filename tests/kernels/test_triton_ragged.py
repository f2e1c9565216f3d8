"""The kernel in Pallas Triton under `Ragged`: caches of any kind and capacity, by the error bound of
the oracle. More of its numbers: conformance/ with the target "triton_ragged".
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _gpu_caches import judge, latents, quantised
from _tpu_rows import arrays, kept_as


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
    "prompt": (plain, dict(t=40, heads=8, kv_heads=1, dim=16, width=16), {}),
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
        np.testing.assert_array_equal(found, x.astype(dtype))
        assert found.dtype == dtype and "bitcast" in str(
            jax.make_jaxpr(lambda x: _triton.widened(x, dtype))(x)
        )
