"""Other libraries' kernels for the same attention, to be measured in the same way."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .specification import Kernel, KV_HEADS, LENGTH, QUERY_HEADS, ROWS


HEADS, TOKENS, DIM, PAGE = 8, 4096, 128, 16
NOT_MEASURED = ("tokamax", "ejkernel")  # their kernels are not called here


def _array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _flash(blocks: tuple[int, int] | None) -> tuple[Callable[..., Any], Sequence[Any]]:
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

    sizes = None
    if blocks is not None:
        queries, keys = blocks
        sizes = BlockSizes(block_q=queries, block_k_major=keys, block_k=keys // 2, block_b=1)
    call = ft.partial(flash_attention, causal=True, block_sizes=sizes)
    return call, [_array(1, HEADS, TOKENS, DIM)] * 3


def splash_sizes(queries: int, keys: int, compute: int, fused: bool = False) -> Any:
    """The block sizes of splash attention. If `fused`, one kernel computes all gradients."""
    from jax.experimental.pallas.ops.tpu.splash_attention import BlockSizes

    return BlockSizes(
        block_q=queries,
        block_kv=keys,
        block_kv_compute=compute,
        block_q_dkv=queries,
        block_kv_dkv=keys,
        block_kv_dkv_compute=compute,
        block_q_dq=None if fused else queries,
        block_kv_dq=None if fused else compute,
        use_fused_bwd_kernel=fused,
    )


def _splash(
    queries: int, keys: int, compute: int, dim: int = DIM, gradient: bool = False
) -> tuple[Callable[..., Any], Sequence[Any]]:
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
        splash_attention_mask as masks,
    )

    sizes = splash_sizes(queries, keys, compute)
    mask = masks.MultiHeadMask([masks.CausalMask((TOKENS, TOKENS))] * HEADS)
    kernel = splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)

    def call(query: Any, key_: Any, value: Any) -> Any:
        return kernel(query, key_, value)

    def loss(*arrays: Any) -> Any:
        return call(*arrays).astype(jnp.float32).sum()

    arrays = [_array(HEADS, TOKENS, dim)] * 3
    return (jax.grad(loss, (0, 1, 2)) if gradient else call), arrays


def _paged(pages: int) -> tuple[Callable[..., Any], Sequence[Any]]:
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    store = _array(KV_HEADS, ROWS * LENGTH // PAGE, PAGE, DIM)
    lengths, table = (_array(*s, dtype=jnp.int32) for s in ((ROWS,), (ROWS, LENGTH // PAGE)))
    call = ft.partial(paged_attention, pages_per_compute_block=pages)
    return call, (_array(ROWS, QUERY_HEADS, DIM), store, store, lengths, table)


def _ragged_paged(pages: int, queries: int) -> tuple[Callable[..., Any], Sequence[Any]]:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    store = _array(ROWS * LENGTH // PAGE, PAGE, 2 * KV_HEADS, DIM)
    shapes = ((ROWS,), (ROWS, LENGTH // PAGE), (ROWS + 1,), (1,))
    call = ft.partial(
        ragged_paged_attention,
        num_kv_pages_per_block=pages,
        num_queries_per_block=queries,
        vmem_limit_bytes=64 * 2**20,
    )
    query = _array(ROWS, QUERY_HEADS, DIM)
    return call, (query, store, *(_array(*shape, dtype=jnp.int32) for shape in shapes))


def _of(
    name: str, call: str, tile: tuple[int, int], build: Callable[..., Any], **kw: Any
) -> Kernel:
    return Kernel(name=name, call=call, build=build, tile=lambda: tile, **kw)


_FORWARD = "splash_mha_fwd_no_residuals"
_BACKWARD = ft.partial(_splash, 1024, 1024, 512, gradient=True)
_TOKEN = 2 * DIM * 2  # bytes of a key and a value

PEERS = (
    _of(
        "jax flash, default", "flash_attention", (128, 128), ft.partial(_flash, None),
        products=2 * DIM,
    ),
    _of(
        "jax flash", "flash_attention", (512, 1024), ft.partial(_flash, (512, 1024)),
        products=2 * DIM,
    ),
    _of(
        "jax splash, default", _FORWARD, (128, 128), ft.partial(_splash, 128, 128, 128),
        products=2 * DIM,
    ),
    _of(
        "jax splash", _FORWARD, (1024, 1024), ft.partial(_splash, 1024, 1024, 512),
        products=2 * DIM,
    ),
    _of(
        "jax splash, D=64", _FORWARD, (1024, 1024), ft.partial(_splash, 1024, 1024, 512, 64),
        products=2 * 64,
    ),
    _of(
        "jax splash, D=256", _FORWARD, (512, 1024), ft.partial(_splash, 512, 1024, 512, 256),
        products=2 * 256,
    ),
    _of(
        "jax splash, queries", "splash_mha_dq_no_residuals", (1024, 512), _BACKWARD,
        products=3 * DIM,
    ),
    _of(
        "jax splash, keys and values", "splash_mha_dkv_no_residuals", (1024, 1024), _BACKWARD,
        products=4 * DIM,
    ),
    _of(
        "jax paged", "paged_attention", (1, 32 * PAGE), ft.partial(_paged, 32),
        nbytes=_TOKEN,
    ),
    _of(
        "jax ragged paged", "ragged_paged_attention_kernel", (32, 32 * PAGE),
        ft.partial(_ragged_paged, 32, 32), nbytes=_TOKEN * KV_HEADS, innermost=True,
    ),
)  # fmt: skip
