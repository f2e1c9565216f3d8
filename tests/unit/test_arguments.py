"""Whatever is passed to a public function, it works, or the error is eqattn's own and names the
argument.
"""

import inspect
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqattn
from eqattn import AttentionMetadata, cache, masks, nn, scores


pytestmark = pytest.mark.usefixtures("unchecked")
PACKAGE = str(Path(eqattn.__file__).parent)
B, T, H, D = 2, 4, 2, 4


def ones(*shape):
    return jnp.ones(shape, jnp.float32)


def counts(*values):
    return jnp.array(values, jnp.int32)


KEY = jax.random.key(0)
META = AttentionMetadata()
QKV = dict(query=ones(B, T, H, D), key_=ones(B, T, H, D), value=ones(B, T, H, D))
PLAIN = dict(query=ones(B, T, H, D), key=ones(B, T, H, D), value=ones(B, T, H, D))
ROW = dict(query=ones(B, H, D), key=ones(B, T, H, D), value=ones(B, T, H, D), lengths=counts(3, 4))
CAUSAL = eqattn.Causal()
FLAGS = dict(
    return_weights=False, return_logsumexp=False, return_carry=False, return_max_logits=False
)
ROWS = ones(B, T, H)
CARRY = eqattn.Carry(ones(B, T, H, D), ROWS, ROWS)
NEW = dict(key=ones(B, 2, H, D), value=ones(B, 2, H, D), counts=counts(1, 2))
SIZES = dict(batch=B, capacity=8, kv_heads=H, head_dim=D, value_dim=D, dtype=jnp.float32)
KV = cache.KVCache.empty(**SIZES)
RING = cache.RingBufferCache.empty(**SIZES)
EIGHT = cache.QuantizedKVCache.empty(**SIZES)
PAGED = cache.PagedKVCache.empty(pages=8, page_size=4, **SIZES).reserve(4)
STACK = cache.StackedKVCache.empty(2, B, 64, H, D)
LAYER = nn.MultiheadAttention(H, 8, key=KEY)
OF_LAYER = dict(query=ones(T, 8), key_=ones(T, 8), value=ones(T, 8))
SIZE = dict(t=T, s=T, batch_shape=(), heads=1, q_positions=None, kv_positions=None)


class Entry(NamedTuple):
    """A function, its arguments in a call that works, and other names that errors use for them."""

    fn: Callable
    arguments: dict[str, Any]
    names: dict[str, str] = {}


def entries() -> dict[str, Entry]:
    e = eqattn
    found = {
        "attention": Entry(
            e.attention,
            dict(**QKV, strategy=e.Blockwise(META), mask=CAUSAL, bias=ones(T, T), score=None, key=None,
                 inference=False, q_offset=0, q_positions=None, kv_positions=jnp.arange(T), **FLAGS),
        ),
        "ragged_attention": Entry(
            e.ragged_attention,
            dict(query=ones(3, H, D), key_=ones(B, T, H, D), value=ones(B, T, H, D), cu_q_lens=counts(0, 1, 3),
                 lengths=counts(3, 4), strategy=e.Ragged(META), starts=None, mask=None, causal=True,
                 score=None, block_q=16, return_logsumexp=False, return_carry=False,
                 return_max_logits=False),
        ),
        "dot_product_attention": Entry(
            e.dot_product_attention,
            dict(**PLAIN, bias=ones(T, T), mask=None, scale=1.0, is_causal=True, query_seq_lengths=None,
                 key_value_seq_lengths=counts(1, 4), local_window_size=3, implementation=None,
                 return_residual=False),
            dict(scale="scale"),
        ),
        "blockwise_attn": Entry(
            e.blockwise_attn,
            dict(**PLAIN, bias=ones(T, T), deterministic=True, dropout_rng=None, attn_pdrop=0.0, causal=True,
                 query_chunk_size=2, key_chunk_size=2, dtype=jnp.float32, policy=None, precision=None,
                 float32_logits=True, prevent_cse=True),
            dict(dropout_rng="key", attn_pdrop="dropout_prob", query_chunk_size="blocksize_q",
                 key_chunk_size="blocksize_k"),
        ),
        "ring_attention": Entry(
            e.ring_attention,
            dict(**PLAIN, q_segment_ids=counts(0, 0, 1, 1), kv_segment_ids=None, softmax_aux=None, bias=ones(T, T),
                 mask_builder=None, sliding_window=2, chunk_size=None, causal=True, logits_soft_cap=None,
                 softmax_scale=None, axis_name=None, fwd_params=None, bwd_params=None, fused_backward=False,
                 query_chunk_size=2, key_chunk_size=2, causal_block_size=None, deterministic=True,
                 dropout_rng=None, pdrop=0.0, policy=None, precision=None, prevent_cse=True,
                 float32_logits=True, attention_sink_size=0, dtype=None),
            dict(q_segment_ids="ids", kv_segment_ids="ids", chunk_size="size", causal_block_size="size",
                 query_chunk_size="blocksize_q", key_chunk_size="blocksize_k", dropout_rng="key",
                 pdrop="dropout_prob", attention_sink_size="sink", logits_soft_cap="SoftCap"),
        ),
        "ragged_gqa": Entry(
            e.ragged_gqa, dict(**ROW, starts=None, block_size=2, mask_value=-1e31, cost_estimate=None),
            dict(block_size="block"),
        ),
        "reference_gqa": Entry(
            e.reference_gqa,
            {dict(query="q", key="k", value="v").get(n, n): x for n, x in ROW.items()} | dict(starts=None, mask_value=-1e31),
        ),
        "ragged_mqa": Entry(
            e.ragged_mqa, dict(q=ones(B, D), k=ones(B, T, D), v=ones(B, T, D), lengths=counts(3, 4))
        ),
        "dropout_mask": Entry(e.dropout_mask, dict(key=KEY, batch_shape=(B,), heads=H, t=T, s=T, rate=0.5)),
        "packed_segments": Entry(e.packed_segments, dict(cu_seqlens=counts(0, 2, 4), tokens=4, cu_seqlens_k=counts(0, 3, 4))),
        "ring_plan": Entry(
            e.ring_plan,
            dict(tokens=64, devices=4, layout=e.Contiguous(), mask=CAUSAL, batch=1, heads=4, kv_heads=2,
                 head_dim=8, value_dim=8, dtype=jnp.float32, block=None, group=1),
        ),
        "sharding_plan": Entry(
            e.sharding_plan,
            dict(tokens=64, devices=4, layout=e.Contiguous(), mask=CAUSAL, batch=1, heads=4, kv_heads=2,
                 head_dim=8, value_dim=8, dtype=jnp.float32, block=None, flops=1e12, bandwidth=1e10, links=2,
                 latency=1e-6),
        ),
        "permute": Entry(e.Zigzag().permute, dict(x=ones(B, 8), n=2, axis=1), dict(x="tokens")),
        "positions of a layout": Entry(e.Zigzag().positions, dict(tokens=8, n=2)),
        # Masks
        "Causal": Entry(e.Causal, dict(offset=1)),
        "PrefixLM": Entry(e.PrefixLM, dict(prefix=counts(1, 2))),
        "KeyPadding": Entry(e.KeyPadding, dict(lengths=counts(1, 2), starts=0)),
        "QueryPadding": Entry(e.QueryPadding, dict(lengths=counts(1, 2))),
        "BlockCausal": Entry(e.BlockCausal, dict(size=2)),
        "ChunkedCausal": Entry(e.ChunkedCausal, dict(size=2)),
        "SlidingWindow": Entry(e.SlidingWindow, dict(left=2, right=0, sinks=1)),
        "Segments": Entry(e.Segments, dict(q_ids=counts(0, 1), kv_ids=counts(0, 1, 1))),
        "Selected": Entry(e.Selected, dict(indices=np.array([[[0, 1]]]), block_q=1, block_k=1)),
        "Tree": Entry(e.Tree, dict(parents=counts(-1, 0, 0), start=2)),
        "MaskFn": Entry(
            e.MaskFn, dict(fn=lambda b, h, q, k: k <= q, row_operands=(counts(0, 1),), col_operands=[counts(0, 1)])
        ),
        "DenseMask": Entry(e.DenseMask, dict(array=np.ones((T, T), bool))),
        "as_array": Entry(CAUSAL.as_array, SIZE),
        "sparsity": Entry(CAUSAL.sparsity, dict(**SIZE, block_q=2, block_k=2)),
        # Scores
        "Operand": Entry(masks.Operand, dict(array=ones(T), axes="t")),
        "ALiBi": Entry(e.ALiBi, dict(slopes=ones(H))),
        "geometric": Entry(e.ALiBi.geometric, dict(heads=H)),
        "Bias": Entry(scores.Bias, dict(bias=ones(T, T))),
        "SoftCap": Entry(scores.SoftCap, dict(cap=3.0)),
        "T5Bias": Entry(e.T5Bias, dict(table=ones(8, H), bidirectional=True, max_distance=64)),
        "ScoreFn": Entry(e.ScoreFn, dict(fn=lambda z, *_: z, arrays=[masks.Operand(ones(T), "t")])),
        # Carries
        "Carry": Entry(e.Carry, dict(numerator=CARRY.numerator, denominator=ROWS, max_so_far=ROWS)),
        "Carry.empty": Entry(e.Carry.empty, dict(shape=(B, T, H), value_dim=D, dtype=jnp.float32)),
        "from_logits": Entry(e.Carry.from_logits, dict(logits=ones(B, T, H, 3), values=ones(B, 3, H, D))),
        "from_output": Entry(e.Carry.from_output, dict(output=CARRY.numerator, logsumexp=ROWS)),
        "from_oml": Entry(e.Carry.from_oml, dict(output=CARRY.numerator, maximum=ROWS, denominator=ROWS)),
        "update": Entry(CARRY.update, dict(logits=ones(B, T, H, 3), values=ones(B, 3, H, D))),
        "merge": Entry(CARRY.merge, dict(other=CARRY), dict(other="Carry")),
        "with_sinks": Entry(CARRY.with_sinks, dict(sinks=ones(H, 1))),
        # Caches
        "append": Entry(KV.append, NEW),
        "append to a ring": Entry(RING.append, NEW),
        "append in eight bits": Entry(EIGHT.append, NEW),
        "append to pages": Entry(PAGED.append, NEW),
        "append to a layer": Entry(STACK.layer(0).append, NEW),
        "truncate": Entry(KV.truncate, dict(lengths=counts(0, 0))),
        "reorder": Entry(KV.reorder, dict(rows=counts(1, 0))),
        "reserve": Entry(PAGED.reserve, dict(counts=1)),
        "release": Entry(PAGED.release, dict(rows=counts(1, 0))),
        "layer": Entry(STACK.layer, dict(index=1)),
        "KVCache": Entry(cache.KVCache, dict(key=KV.key, value=KV.value, length=KV.length)),
        "RingBufferCache": Entry(
            cache.RingBufferCache, dict(key=RING.key, value=RING.value, held=RING.held, length=RING.length)
        ),
        "StackedKVCache": Entry(cache.StackedKVCache, dict(key=STACK.key, value=STACK.value, length=STACK.length)),
        "QuantizedKVCache": Entry(cache.QuantizedKVCache, dict(key=EIGHT.key, value=EIGHT.value, length=EIGHT.length)),
        "PagedKVCache": Entry(
            cache.PagedKVCache,
            dict(key_pages=PAGED.key_pages, value_pages=PAGED.value_pages, table=PAGED.table, length=PAGED.length),
        ),
        "quantize": Entry(cache.Quantized.quantize, dict(x=ones(B, T, H, D), dtype=jnp.int8, shares=1)),
        "Quantized.zeros": Entry(
            cache.Quantized.zeros, dict(shape=(B, T, H, D), stored=jnp.int8, dtype=jnp.float32, shares=1)
        ),
        "Pages": Entry(lambda content, table: cache.Pages(content, table), dict(content=ones(3, 2, H, D), table=jnp.zeros((B, 2), jnp.int32))),
        # Layers
        "rotary": Entry(
            nn.rotary,
            dict(x=ones(B, T, H, D), positions=jnp.arange(T), theta=1e4, scaling=None, dim=2, interleaved=False, sections=None, axial=False),
        ),
        "Rotary": Entry(
            nn.Rotary, dict(theta=1e4, scaling=None, dim=2, interleaved=False, sections=[1], axial=True)
        ),
        "MultiheadAttention": Entry(
            nn.MultiheadAttention,
            dict(num_heads=H, query_size=8, key_size=8, value_size=8, output_size=8, qk_size=4, vo_size=4,
                 use_query_bias=True, use_key_bias=False, use_value_bias=False, use_output_bias=False, dropout_p=0.0,
                 inference=False, dtype=jnp.float32, num_kv_heads=1, strategy=None, rotary=None, qk_norm="rms",
                 gating="headwise", window=2, softmax_scale=1.0, logits_soft_cap=2.0, softmax_aux=None, score=None,
                 key=KEY),
        ),
        "layer call": Entry(
            LAYER,
            dict(**OF_LAYER, mask="causal", key=None, inference=True, process_heads=None, bias=ones(T, T), score=None,
                 q_positions=jnp.arange(T), kv_positions=None),
        ),
        "layer call with a cache": Entry(
            nn.MultiheadAttention(H, 2 * D, key=KEY),
            dict(query=ones(B, T, 2 * D), key_=None, value=None, cache=KV, counts=counts(1, 2), append=True),
        ),
        "from_equinox": Entry(nn.from_equinox, dict(model=eqx.nn.MultiheadAttention(H, 8, key=KEY))),
        "with_strategy": Entry(nn.with_strategy, dict(model=LAYER, strategy=e.Dense(META))),
        # Metadata and strategies
        "AttentionMetadata": Entry(
            AttentionMetadata,
            dict(runtime_dtype="float32", runtime_softmax_dtype=None, sequence_axis_name="sp", mesh=None,
                 platform="auto", backend="any", partition_axis=None, partition_manager=None, base_config=None,
                 scan_ring_attention=True, softmax_scale=1.0, dropout_prob=0.0, blocksize_q=2, blocksize_k=2,
                 blocksize_b=1, logits_soft_cap=2.0, softmax_aux=ones(H)),
            dict(runtime_dtype="runtime dtype", runtime_softmax_dtype="runtime dtype", blocksize_k="_k",
                 blocksize_b="_b"),
        ),
        "get_shardings": Entry(META.get_shardings, dict(mode="__train__", BTHD=True, qkv_mni_sharding=False)),
        "forward_native": Entry(
            e.Dense(META).forward_native,
            dict(q=QKV["query"], k=QKV["key_"], v=QKV["value"], mask=CAUSAL, bias=None, init_bias=None,
                 deterministic=False, dropout_rng=None, causal=True, score=None, q_offset=None, **FLAGS),
            dict(q="query", k="key", v="value", dropout_rng="key"),
        ),
        "get_mode": Entry(e.Dense(META).get_mode, dict(q=QKV["query"], BTHD=True, insert=False)),
        "repeat_kv_heads": Entry(
            e.Dense(META).repeat_kv_heads, dict(k=ones(B, T, H, D), v=ones(B, T, H, D), num_reps=2),
            dict(k="k ", v="v "),
        ),
        "create": Entry(lambda name, metadata: e.AttentionRegistry.create(name, metadata), dict(name="dense", metadata=META)),
        "get": Entry(lambda name: e.AttentionRegistry.get(name), dict(name="dense")),
    }  # fmt: skip
    for name in ("AllGather", "Blockwise", "Dense", "Ragged", "Ring", "Ulysses"):
        strategy = getattr(e, name)
        known = dict(metadata=META, precision=None, fused_backward=True, axis_name=None, mesh=None)
        parameters = inspect.signature(strategy).parameters
        found[name] = Entry(strategy, {n: x for n, x in known.items() if n in parameters})
    for kind in ("RingBufferCache", "QuantizedKVCache"):
        found[f"{kind}.empty"] = Entry(getattr(cache, kind).empty, SIZES)
    found["KVCache.empty"] = Entry(cache.KVCache.empty, dict(stored=None, head_shares=1) | SIZES)
    found["PagedKVCache.empty"] = Entry(
        cache.PagedKVCache.empty, dict(pages=4, page_size=4, stored=None, head_shares=1) | SIZES
    )
    found["StackedKVCache.empty"] = Entry(
        cache.StackedKVCache.empty, dict(layers=2) | SIZES | dict(capacity=64)
    )
    for kind, given in dict(
        LinearScaling={}, NTKScaling={}, YaRNScaling=dict(original_length=64, beta_fast=32.0, truncate=True),
        Llama3Scaling=dict(low_freq_factor=1.0, high_freq_factor=4.0, original_length=64),
    ).items():  # fmt: skip
        found[kind] = Entry(getattr(nn, kind), dict(factor=2.0) | given)
    return found


ENTRIES = entries()
STRANGE: dict[str, Any] = {
    "an int": 3,
    "a negative int": -3,
    "a large int": 2**40,
    "True": True,
    "a float": 1.5,
    "nan": float("nan"),
    "complex": 1j,
    "text": "no",
    "None": None,
    "0-d": np.array(1.5, np.float32),
    "NumPy float": np.float32(2),
    "NumPy int": np.int64(3),
    "NumPy bool": np.bool_(True),
    "empty": np.zeros((0,), np.float32),
    "list": [1, 2],
    "ragged list": [[1], [2, 3]],
    "list of texts": ["a"],
    "dict": {"a": 1},
    "object": object(),
    "objects": np.array([None, 3], object),
    "times": np.array(["2020-01-01"], "datetime64[D]"),
    "class": dict,
}
SAME_SHAPE = "int32 int64 uint32 bool complex64 float64 float16 float8_e4m3fn str".split()


def strange_values(now: Any) -> dict[str, Any]:
    values = dict(STRANGE)
    if isinstance(now, jax.Array | np.ndarray) and not jnp.issubdtype(
        now.dtype, jax.dtypes.extended
    ):
        values |= {f"as {d}": np.ones(now.shape).astype(d) for d in SAME_SHAPE}
        values |= {"with an axis more": np.ones((1, *now.shape), now.dtype)}
    return values


def blame(error: BaseException, names: tuple[str, ...]) -> str:
    """What is wrong with an error, or nothing."""
    if not isinstance(error, ValueError | TypeError | RuntimeError):
        return f"is a {type(error).__name__}"
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    file = "" if tb is None else tb.tb_frame.f_code.co_filename
    if not file.startswith(PACKAGE):
        return f"is raised in {file.split('site-packages/')[-1]}"
    text = str(error)
    return "" if any(name in text for name in names) else "does not name the argument"


def outcome(entry: Entry, argument: str, value: Any) -> str:
    """What is wrong with a call in which an argument has a strange value, or nothing."""
    arguments = entry.arguments | {argument: value}
    names = tuple({argument, argument.rstrip("_"), entry.names.get(argument, argument)})
    filtering = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"):
            warnings.simplefilter("ignore")
            jax.eval_shape(lambda: (entry.fn(**arguments), None)[1])
    except Exception as error:
        wrong = blame(error, names)
        return wrong and f"{type(error).__name__} {wrong}: {str(error).splitlines()[:1]}"
    finally:
        jax.config.update("jax_traceback_filtering", filtering)
    return ""


def check(name: str, share: int) -> None:
    """With one in `share` of the strange values."""
    entry, wrong = ENTRIES[name], []
    for argument, now in entry.arguments.items():
        assert not outcome(entry, argument, now), outcome(entry, argument, now)
        for kind, value in strange_values(now).items():
            if zlib.crc32(f"{name}{argument}{kind}".encode()) % share:
                continue
            if kind == "class" and argument in ("mask_builder", "process_heads"):
                continue  # It is a function, and what it raises is the caller's.
            if found := outcome(entry, argument, value):
                wrong.append(f"{argument} = {kind}: {found}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ENTRIES)
def test_strange_arguments(name):
    check(name, 12)
