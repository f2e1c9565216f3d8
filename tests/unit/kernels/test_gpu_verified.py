"""The gradients' kernels for NVIDIA GPUs, judged where few tests reach: the largest sizes, every hop
of a ring, and races in programs that copy heads apart.
"""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix import bound, oracle, oracle_masks as om
from matrix.cases import covering, invalid
from matrix.test_conformance import check

from eqattn import attention, AttentionMetadata, Blockwise, Causal, Ring, SlidingWindow


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        jax.__version_info__ < (0, 12), reason="the kernel is written for jax 0.12 and newer"
    ),
]

PLAIN = covering(2)[0] | dict.fromkeys(
    ("bias", "score", "sinks", "cap", "scale", "offset", "mask"), "none"
)
PLAIN |= dict(operands="default", lead=(), dtype="bfloat16", target=("gpu", 1), dropout=0.0)


def metadata():
    return AttentionMetadata(platform="interpret", backend="cuda", runtime_dtype=jnp.bfloat16)


def normal(i, *shape):
    return jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)


@pytest.mark.parametrize("mask", ["causal", "none"])
@pytest.mark.parametrize("dims", [(256, 256), (192, 128)], ids=str)
def test_large_sizes(dims, mask):
    """Of which sums take several kernels, and tiles of keys are smaller."""
    case = dict(heads=(2, 1), block=(64, 64), length=(70, 130), dims=dims, mask=mask)
    case = PLAIN | case | dict(transform="grad")
    assert invalid(case) is None
    check(case)


def test_gradients_through_a_ring():
    """Carries of earlier hops go on in the forward pass, and cotangents of keys travel with them."""
    t, h, kv, d = 48, 4, 2, 16
    q, k, v, g = (normal(i, 1, t, n, d) for i, n in enumerate((h, kv, kv, h)))
    mesh = jax.make_mesh((2,), ("sp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    place = jax.sharding.PartitionSpec(None, "sp")

    def both(q, k, v, g):
        ring = Ring(metadata(), axis_name="sp")
        call = lambda *x: attention(*x, ring, mask=Causal()).attention_outputs
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(g)

    own = jax.shard_map(both, mesh=mesh, in_specs=place, out_specs=place, check_vma=False)
    out, *grads = jax.jit(own)(q, k, v, g)
    wide: Any = [np.float64(x) for x in (q, k, v)]
    exact = oracle.Problem(*wide, scale=d**-0.5, mask=om.causal(t, t))
    precision = bound.precision_of(jnp.bfloat16)
    want = bound.grads(exact, np.float64(g), np.zeros((1, t, h)), precision)
    worst = {n: bound.excess(np.asarray(x), want[n]) for n, x in zip("qkv", grads)}
    worst["out"] = bound.excess(np.asarray(out), bound.values(exact, precision)["out"])
    assert max(worst.values()) <= 1, worst


@pytest.mark.parametrize("value", [1.0, np.nan])
def test_nothing_races(value, monkeypatch):
    """Where heads of a group are copied apart, and where tiles of values are replaced."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    from eqattn.kernels.gpu import _mosaic

    mosaic: Any = _mosaic.plgpu
    params = ft.partial(mosaic.InterpretGPUParams, detect_races=True)
    monkeypatch.setattr(mosaic, "InterpretGPUParams", params)
    q, k, v = normal(0, 1, 140, 4, 16), normal(1, 1, 140, 1, 16), normal(2, 1, 140, 1, 16)
    call = lambda *x: attention(*x, Blockwise(metadata()), mask=SlidingWindow(90, 0))
    f = lambda *x: call(*x).attention_outputs.astype(jnp.float32).sum()
    found = jax.jit(jax.grad(f, (0, 1, 2)))(q, k, v.at[0, 10].set(value))
    assert all(jnp.isnan(x).any() == np.isnan(value) for x in found)
    assert not gpu_callbacks.get_races().races_found
