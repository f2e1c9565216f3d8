"""What the lowerings of all devices have in common."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _stored_rows import arrays, call, kept, seen
from matrix import bound, oracle

from eqattn import attention, Blockwise
from eqattn._sweep.grid import BlockRequest
from eqattn._sweep.lowering import Lowering, XLA
from eqattn.kernels import BACKENDS, lowering_for


@pytest.mark.parametrize("backend", ["xla", *BACKENDS])
def test_every_fact_about_a_lowering_is_stated(backend):
    lowering = XLA if backend == "xla" else lowering_for(backend, "pallas")
    facts = [
        name for name, kind in Lowering.__annotations__.items() if "ClassVar[bool]" in str(kind)
    ]
    assert len(facts) >= 4
    assert {type(getattr(lowering, name)) for name in facts} == {bool}


@pytest.mark.parametrize(
    "backend, together, group, wanted",
    [
        ("cpu", 16, 1, (256, 256)),
        ("gpu", 16, 1, (1024, 1024)),
        ("gpu", 17, 1, (512, 512)),
        ("gpu", 64, 4, (128, 512)),
        ("gpu", 65, 1, (256, 256)),
        ("gpu", 4, 300, (8, 1024)),
    ],
)
def test_a_gpu_has_large_blocks_of_loops(backend, together, group, wanted, monkeypatch):
    """As far as the logits of all heads in a block take 64 MiB of float32."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    request = BlockRequest(4096, 4096, group, jnp.bfloat16, 128, in_place=False, together=together)
    assert XLA.choose_blocks(request) == wanted


@pytest.mark.parametrize(
    "keys, page, nbytes, wanted",
    [
        (8192, 0, 4096, 2048),
        (8192, 0, 4097, 1024),
        (8192, 0, 2**20, 128),
        (8192, 16, 4096, 512),
        (8192, 64, 4096, 2048),
        (8192, 96, 4096, 2016),
        (8192, 4096, 4096, 4096),
        (48, 16, 4096, 48),
    ],
)
def test_a_gpu_has_large_blocks_of_caches(keys, page, nbytes, wanted, monkeypatch):
    """They take 8 MiB, or have 32 pages. Where results have fixed bits, they are as on a CPU."""
    more: Any = dict(in_place=True, page_size=page, token_nbytes=nbytes)
    request = BlockRequest(1, keys, 4, jnp.bfloat16, 128, **more)
    small = XLA.choose_blocks(request)
    assert small.keys == (page or 128)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert XLA.choose_blocks(request).keys == wanted
    assert XLA.choose_blocks(request._replace(fixed=True)) == small


@pytest.mark.parametrize("page", [6, 12])
def test_blocks_of_several_pages(page, monkeypatch):
    """Output and gradients of XLA code by the bound of the oracle; the last block has too few."""
    from eqattn._sweep.lowering import XLALowering

    asked = []
    monkeypatch.setattr(
        XLALowering, "_many_in_place", lambda self, request: asked.append(request) or 3 * page
    )
    monkeypatch.setattr("eqattn._sweep.lowering._on_gpu", lambda: True)
    q, k, v = arrays(2, 4, 2, 8, 6)
    g = jax.random.normal(jax.random.key(0), (*q.shape[:-1], v.shape[-1]))

    @jax.jit
    def run(q, k, v, g):
        in_pages = lambda x: kept(x, page=page)
        f = lambda q, k, v: call(q, in_pages(k), in_pages(v), platform="xla").attention_outputs
        out, pull = jax.vjp(f, q, k, v)
        return dict(zip(("out", "q", "k", "v"), (out, *pull(g))))

    exact: Any = oracle.Problem(
        *(np.float64(x) for x in (q, k, v)), scale=8**-0.5, mask=seen(2, 48)[:, None]
    )
    precision = bound.precision_of(jnp.float32)
    want = bound.grads(exact, np.float64(g), np.zeros(q.shape[:-1]), precision)
    want["out"] = bound.values(exact, precision)["out"]
    found = run(q, k, v, g)
    worst = {name: bound.excess(np.asarray(x), want[name]) for name, x in found.items()}
    assert max(worst.values()) <= 1, worst
    assert asked


def test_heads_and_batch_elements_are_counted_together(monkeypatch):
    seen = []
    q, k = (jnp.zeros((2, 3, 600, h, 8)) for h in (8, 4))
    choose = type(XLA).choose_blocks
    monkeypatch.setattr(
        type(XLA), "choose_blocks", lambda self, x: seen.append(x.together) or choose(self, x)
    )
    attention(q, k, k, Blockwise())
    assert set(seen) == {2 * 3 * 4}
