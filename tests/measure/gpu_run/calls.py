"""Calls of each library. Those of others are imported only when they are asked for.

Nothing is tuned here. Each library chooses its own blocks. Only the kernels of jax have no choice
for this chip, and get the blocks that `_MOSAIC` and `_TRITON` say.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eqattn import (
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    KeyPadding,
    Ragged,
    Segments,
    SlidingWindow,
)
from eqattn.cache import Pages, Quantized

from .cases import Case


_TRITON: dict[str, Any] = dict(
    block_q=128, block_k=64, block_q_dkv=64, block_kv_dkv=64, block_q_dq=64
)
_TRITON |= dict(block_kv_dq=64)
_MOSAIC: dict[str, Any] = dict(
    block_q=64, block_kv=128, max_concurrent_steps=2, block_q_dkv=64, block_kv_dkv=64
)
_MOSAIC |= dict(block_q_dq=64, block_kv_dq=64)
_PAGE = 128
_CHUNK = 256  # The queries whose logits the reference holds at once.

Call = Callable[..., Any]


def draw(case: Case) -> tuple[Any, ...]:
    """Query, key, value, the cotangent of the output, and what masks look up: the documents of
    tokens, or the lengths of rows.
    """
    keys = case.keys or case.tokens
    shapes = [(case.batch, case.tokens, case.heads, case.dim)] * 2
    shapes[1:1] = [(case.batch, keys, case.kv_heads, case.dim)] * 2
    arrays = [
        jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes)
    ]
    if case.keys:
        return *arrays, jnp.full(case.batch, keys, jnp.int32)
    if not case.segments:
        return tuple(arrays)
    ids = np.arange(case.tokens, dtype=np.int32) // (case.tokens // case.segments)
    return *arrays, jnp.asarray(np.broadcast_to(ids, (case.batch, case.tokens)))


def cached(case: Case, x: Any) -> Any:
    """Keys or values as the cache of a case holds them."""
    if case.cache == "pages":
        size = min(_PAGE, case.keys)
        pages = x.reshape(-1, size, *x.shape[2:])
        order = np.random.default_rng(0).permutation(len(pages)).astype(np.int32)
        return Pages(pages[np.argsort(order)], jnp.asarray(order.reshape(len(x), -1)))
    return Quantized.quantize(x, jnp.dtype(case.cache)) if case.cache else x


def plain(x: Any) -> jax.Array:
    """What a cache holds, in tokens in order. Numbers of 8 bits times their scales are float32, as
    kernels do not round them either.
    """
    if isinstance(x, Quantized):
        x = Quantized(x.values, x.scales, jnp.float32)
    return x if isinstance(x, jax.Array) else x.materialise()


def _eqattn(case: Case, platform: str) -> Call:
    metadata = AttentionMetadata(
        platform=platform,
        backend="cuda" if platform == "pallas" else "any",
        runtime_dtype=jnp.bfloat16,
        logits_soft_cap=case.cap,
        dropout_prob=case.dropout,
    )
    strategy = Ragged(metadata) if case.keys else Blockwise(metadata)
    fixed = Causal() if case.causal else None
    if case.window:
        fixed = SlidingWindow(case.window - 1, 0)
    key = jax.random.key(0) if case.dropout else None

    def call(q, k, v, *more):
        mask = KeyPadding(*more) if case.keys else fixed
        if case.segments:
            mask = Causal() & Segments(*more)
        return attention(q, k, v, strategy, mask=mask, key=key).attention_outputs

    return call


def _jax_nn(case: Case, implementation: str) -> Call | None:
    if case.cap or case.dropout or case.segments or case.cache:
        return None
    window = None if case.window is None else (case.window - 1, 0)

    def call(q, k, v, *lengths):
        more: dict[str, Any] = dict(key_value_seq_lengths=lengths[0]) if lengths else {}
        more |= dict(local_window_size=window, implementation=implementation)
        return jax.nn.dot_product_attention(q, k, v, is_causal=case.causal, **more)

    return call


def _plain(case: Case) -> bool:
    """Whether a case is a causal or a full call, of keys that lie in order."""
    return not (case.featured or case.cache)


def _mosaic(case: Case, interpret: bool) -> Call | None:
    """jax's kernel for Hopper, which has float16 only."""
    del interpret  # it has no such mode
    if not _plain(case) or case.keys or case.dim > 128:
        return None
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    blocks = attention_mgpu.TuningConfig(causal=case.causal, **_MOSAIC)

    def call(q, k, v):
        q, k, v = (x.astype(jnp.float16) for x in (q, k, v))
        q = q * jnp.float16(case.dim**-0.5)
        out: Any = attention_mgpu.attention(q, k, v, blocks)
        return out.astype(jnp.bfloat16)

    return call


def _triton(case: Case, interpret: bool) -> Call | None:
    """jax's kernels for older chips: of training without grouped queries, and of decoding."""
    if case.keys:
        if case.cache:
            return None
        from jax.experimental.pallas.ops.gpu import decode_attention

        splits = max(min(case.keys // 1024, 128), 1)

        def decode(q, k, v, lengths):
            more = dict(kv_seq_len=lengths, k_splits=splits, interpret=interpret)
            return decode_attention.gqa(q[:, 0], k, v, **more)[:, None]

        return decode
    if case.window or case.cap or case.dropout or case.heads != case.kv_heads:
        return None
    from jax.experimental.pallas.ops.gpu import attention as pallas_attention

    sizes = {name: min(n, case.tokens) for name, n in _TRITON.items()}
    more: dict[str, Any] = dict(block_sizes=pallas_attention.BlockSizes(**sizes), num_warps=8)

    def call(q, k, v, *ids):
        scale = case.dim**-0.5
        ids = ids[0] if ids else None
        return pallas_attention.mha(
            q, k, v, ids, scale, case.causal, interpret=interpret, **more
        )  # fmt: skip

    return call


def _tokamax(case: Case, implementation: str) -> Call | None:
    if case.dropout or case.segments or case.cache:
        return None
    import tokamax  # pyright: ignore[reportMissingImports]

    window = None if case.window is None else (case.window - 1, 0)

    def call(q, k, v, *lengths):
        del lengths  # rows are full
        return tokamax.dot_product_attention(
            q,
            k,
            v,
            is_causal=case.causal,
            logits_soft_cap=case.cap,
            local_window_size=window,
            implementation=implementation,
        )

    return call


def call_of(name: str, case: Case, rehearsed: bool) -> Call | None:
    """A library's function of query, key, value and what masks look up; None where it has none.
    When it is `rehearsed`, it runs on a CPU.
    """
    if name == "eqattn":
        return _eqattn(case, "xla" if rehearsed else "pallas")
    if name == "XLA":
        return _eqattn(case, "xla")
    if name == "eqattn Triton":
        return _eqattn(case, "xla" if rehearsed else "triton") if case.keys else None
    if name == "cuDNN":
        return _jax_nn(case, "xla" if rehearsed else "cudnn")
    if name == "jax Mosaic":
        return _mosaic(case, rehearsed)
    if name == "jax Triton":
        return _triton(case, rehearsed)
    return _tokamax(case, {"Mosaic": "mosaic_gpu", "Triton": "triton"}[name.split()[1]])


def torch_calls(name: str, case: Case, args: tuple, rehearsed: bool) -> list[Call] | None:
    """PyTorch's forward pass and, for training, its gradients, on the same numbers; None where it
    has none.
    """
    if not _plain(case):
        return None
    import torch  # pyright: ignore[reportMissingImports]
    from torch.nn.attention import (  # pyright: ignore[reportMissingImports]
        sdpa_kernel,
        SDPBackend,
    )

    backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    backend, device = backends[name.split()[1]], "cpu" if rehearsed else "cuda"

    def moved(x):  # by way of the host: [b, t, h, d] to [b, h, t, d]
        x = np.asarray(x.astype(jnp.float32))
        return torch.from_numpy(x).to(device, torch.bfloat16).transpose(1, 2).contiguous()

    q, k, v, g = map(moved, args[:4])
    more: dict[str, Any] = dict(is_causal=case.causal, enable_gqa=case.heads != case.kv_heads)

    def attend():
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **more)

    def forward():
        with torch.no_grad():
            return (attend(),)

    def both():
        out = attend()
        return (out, *torch.autograd.grad(out, (q, k, v), g))

    if case.keys:
        return [forward]
    for x in (q, k, v):
        x.requires_grad_()
    return [forward, both]


def wait(outputs: Any) -> None:
    """Waits for what a call has begun."""
    if outputs is None or isinstance(outputs[0], jax.Array):
        jax.block_until_ready(outputs)
    elif outputs[0].is_cuda:
        import torch  # pyright: ignore[reportMissingImports]

        torch.cuda.synchronize()


def head_of(case: Case, outputs: Any) -> list[np.ndarray]:
    """Takes the first batch element and key head of outputs and gradients, in float32. All heads
    that share the key head are included, `[tokens, heads, dim]`.
    """
    found = []
    for x in outputs:
        if isinstance(x, jax.Array):
            x = np.asarray(x[0].astype(jnp.float32))
        else:
            x = x[0].detach().float().transpose(0, 1).cpu().numpy()
        found.append(x[:, : x.shape[1] // case.kv_heads])
    return found


def exact(case: Case, args: tuple) -> list[np.ndarray]:
    """What `head_of` should find, by plain formulas in float32 and products of full precision."""
    group = case.heads // case.kv_heads
    q, k, v, g = (x[0].astype(jnp.float32) for x in args[:4])
    q, g, k, v = q[:, :group], g[:, :group], k[:, 0], v[:, 0]
    ids = args[4][0] if case.segments else None
    chunk = math.gcd(len(q), _CHUNK)

    def rows(q, k, v, at):
        s = jnp.einsum("thd,sd->hts", q, k, precision="highest") * case.dim**-0.5
        s = s if case.cap is None else case.cap * jnp.tanh(s / case.cap)
        i, j = at[:, None], jnp.arange(len(k))[None]
        seen = (j <= i) | (not case.causal)
        seen &= i - j < (case.window or len(k) + len(args[0][0]))
        if ids is not None:
            seen &= ids[at][:, None] == ids[None]
        p = jax.nn.softmax(jnp.where(seen[None], s, -jnp.inf), -1)
        return jnp.einsum("hts,sd->thd", p, v, precision="highest")

    def call(q, k, v):
        chunks = q.reshape(-1, chunk, *q.shape[1:]), jnp.arange(len(q)).reshape(-1, chunk)
        each = jax.checkpoint(lambda x: rows(x[0], k, v, x[1]))
        return lax.map(each, chunks).reshape(q.shape)

    def both(q, k, v, g):
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(g)

    out, dq, dk, dv = jax.jit(both)(q, k, v, g)
    return [np.asarray(x) for x in (out, dq, dk[:, None], dv[:, None])]
