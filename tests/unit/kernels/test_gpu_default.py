"""The kernels for NVIDIA GPUs where `platform="auto"` chooses them: all that ran as XLA code runs."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest
from _gpu_caches import Doubled
from _gpu_lowered import kernels

from eqattn import (
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    KeyPadding,
    MaskFn,
    Ragged,
    ScoreFn,
    Segments,
)
from eqattn._sweep.block_sizes import BlockRequest
from eqattn._sweep.lowering import XLA
from eqattn.cache import Pages
from eqattn.kernels import gpu, lowering_for
from eqattn.kernels.gpu import GPULowering
from eqattn.scores import AbstractScore


newest = jax.__version_info__ >= (0, 12)


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(gpu, "capability", lambda: "9.0")
    return AttentionMetadata(backend="cuda")


def inputs(tokens=64, keys=64, dim=64):
    shapes = [(2, tokens, 2, dim), (2, keys, 2, dim), (2, keys, 2, dim)]
    return [jnp.zeros(shape, jnp.bfloat16) for shape in shapes]


def found(strategy, args, gradients=True, **kw):
    """How many kernels a call has, and how many of its gradient. Both are lowered."""
    call = lambda *x: attention(*x, strategy, **kw).attention_outputs.astype(jnp.float32).sum()
    return kernels(call, *args), kernels(jax.grad(call), *args) if gradients else 0


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16, jnp.uint16, jnp.int32])
def test_ids_of_any_integers(dtype, on_hopper):
    """Ids of documents are widened. A function has the numbers of the caller, and of 8 bits there
    is no kernel.
    """
    ids = jnp.zeros((2, 64), dtype)
    forward, gradient = found(Blockwise(on_hopper), inputs(), mask=Segments(ids))
    assert (forward, gradient) == ((1, 2) if newest else (0, 0))
    assert found(Ragged(on_hopper), inputs(1), False, mask=Segments(ids[:, :1], ids))[0] == newest
    row = ids[0]
    same = MaskFn(lambda b, h, q, k: row[q] <= row[k] + row[k])
    forward, gradient = found(Blockwise(on_hopper), inputs(), mask=same)
    eight = jnp.dtype(dtype).itemsize == 1
    assert (forward, gradient) == ((0, 0) if eight or not newest else (1, 2))


def test_values_without_numbers(on_hopper):
    q, k, v = inputs()
    assert found(Blockwise(on_hopper), (q, k, v[..., :0]), False)[0] == 0
    run = lambda q, k, v: (
        attention(q, k, v, Ragged(on_hopper), mask=KeyPadding(jnp.array([3, 5]))).logsumexp
    )
    assert kernels(run, q[:, :1], k, v[..., :0]) == 0


@pytest.mark.skipif(not newest, reason="older jax has no such kernels")
def test_sizes_that_an_export_leaves_open(on_hopper):
    """They run in loops, and who asks for kernels is told."""
    (n,) = jax.export.symbolic_shape("n")
    args = [jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype) for x in inputs()]
    sizes = on_hopper.replace(blocksize_q=64, blocksize_k=64)

    def exported(metadata):
        call = jax.jit(lambda *x: attention(*x, Blockwise(metadata)).attention_outputs)
        return jax.export.export(call, platforms=["cuda"])(*args).mlir_module()

    assert "mosaic_gpu" not in exported(sizes)
    with pytest.raises(ValueError, match="sizes that jax.export leaves open"):
        exported(sizes.replace(platform="pallas"))


def test_only_versions_of_jax_that_were_tried(on_hopper, monkeypatch):
    """A kernel that does not run leaves its blocks to no loop, either."""
    assert (lowering_for("cuda", "auto") is not None) == newest
    for version in ((0, 11, 2), (0, 13, 0)):
        monkeypatch.setattr(jax, "__version_info__", version)
        assert lowering_for("cuda", "auto") is None
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    assert lowering_for("cuda", "auto") == GPULowering("auto")
    with jax.enable_x64(True):
        assert lowering_for("cuda", "auto") is None


def test_loops_have_their_own_blocks_where_vectors_are_long(on_hopper, monkeypatch):
    sizes = []
    choose = type(XLA).choose_blocks
    note = lambda self, request: sizes.append(request.head_dim) or choose(self, request)
    monkeypatch.setattr(type(XLA), "choose_blocks", note)
    call = ft.partial(attention, strategy=Blockwise(on_hopper))
    kernels(lambda *x: call(*x).attention_outputs, *inputs(dim=272))
    assert 272 in sizes


@pytest.mark.parametrize("page", [0, 64])
def test_caches_that_kernels_cannot_read(page, on_hopper):
    """Values of a user's own run in loops, and so do pages of keys beside values in order."""
    q, k, v = inputs(1)
    kept = Pages(k.reshape(-1, 64, *k.shape[2:]), jnp.arange(2)[:, None]) if page else k
    value = v if page else Doubled(v)
    run = lambda q, k, v, how: attention(q, k, v, Ragged(how)).attention_outputs
    assert kernels(ft.partial(run, how=on_hopper), q, kept, value) == 0
    if newest:
        asked = on_hopper.replace(platform="pallas")
        with pytest.raises(ValueError, match="only its keys or only|in a way of their own"):
            kernels(ft.partial(run, how=asked), q, kept, value)


class Rounded(AbstractScore):
    """A score of a user's own with an operation that no kernel has."""

    def transform(self, logit, b, h, q, k, *operands):
        return logit + jax.lax.erf(logit)


@pytest.mark.parametrize(
    "given",
    [
        dict(score=ScoreFn(lambda s, b, h, q, k: s + jnp.ones(64)[q * k % 64])),
        dict(score=Rounded()),
        dict(mask=Causal() & MaskFn(lambda b, h, q, k: jax.lax.population_count(q * k) < 9)),
    ],
    ids=["table", "own", "function"],
)
def test_loops_have_their_own_blocks_where_kernels_lack_an_operation(given, on_hopper, monkeypatch):
    sizes = []
    choose = type(XLA).choose_blocks
    note = lambda self, request: sizes.append(request.keys) or choose(self, request)
    monkeypatch.setattr(type(XLA), "choose_blocks", note)
    call = ft.partial(attention, strategy=Blockwise(on_hopper), **given)
    assert kernels(lambda *x: call(*x).attention_outputs, *inputs()) == 0
    assert 64 in sizes
    if newest:
        asked = ft.partial(attention, strategy=Blockwise(on_hopper.replace(platform="pallas")))
        with pytest.raises(ValueError, match="which the compiler of kernels does not know"):
            kernels(lambda *x: asked(*x, **given).attention_outputs, *inputs())


@pytest.mark.parametrize("page, pages", [(16, 1), (32, 2), (48, 1), (64, 1)])
def test_pages_of_eight_bits_are_joined_where_scales_allow_it(page, pages):
    """Their scales are copied to multiples of 128 bytes."""
    request = BlockRequest(1, 4096, 4, jnp.bfloat16, 128, in_place=True, page_size=page, itemsize=1)
    assert GPULowering("auto").choose_blocks(request).keys == page * pages
