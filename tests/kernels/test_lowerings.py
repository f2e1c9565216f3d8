"""What the lowerings of all devices have in common."""

import jax
import jax.numpy as jnp
import pytest

from eqattn import attention, Blockwise
from eqattn._sweep.lowering import BlockRequest, Lowering, XLA
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
    stored = request._replace(in_place=True)
    assert XLA.choose_blocks(stored).keys == 128


def test_heads_and_batch_elements_are_counted_together(monkeypatch):
    seen = []
    q, k = (jnp.zeros((2, 3, 600, h, 8)) for h in (8, 4))
    choose = type(XLA).choose_blocks
    monkeypatch.setattr(
        type(XLA), "choose_blocks", lambda self, x: seen.append(x.together) or choose(self, x)
    )
    attention(q, k, k, Blockwise())
    assert set(seen) == {2 * 3 * 4}
