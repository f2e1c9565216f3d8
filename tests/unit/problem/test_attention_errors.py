"""Bad input raises at trace time, with the shapes and the remedy, before anything is computed."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import (
    attention,
    AttentionMetadata as Metadata,
    AttentionRegistry,
    Blockwise,
    blockwise_attn,
    Carry,
    Causal,
    Dense,
    KeyPadding,
    MaskFn,
    Ring,
    ring_attention,
    ring_plan,
    scores,
    Segments,
    SlidingWindow,
    Zigzag,
)
from eqattn._problem.problem import check_shapes
from eqattn.cache import KVCache
from eqattn.masks import AbstractMask


B, T, S, H, K, D, V = 2, 3, 6, 4, 2, 5, 7
Q, KEYS, VALUES = (B, T, H, D), (B, S, K, D), (B, S, K, V)
FULL = (B, H, T, S)
pytestmark = pytest.mark.usefixtures("unchecked")


def call(q=Q, k=KEYS, v=VALUES, strategy=None, *, dtypes="fff", **kwargs):
    """Attention of arrays of ones; kwargs that are (shape, dtype) become arrays."""
    names = {"f": jnp.float32, "h": jnp.bfloat16, "i": jnp.int32, "b": jnp.bool_}
    names["8"] = jnp.float8_e4m3fn
    q, k, v = (jnp.ones(x, names[n]) for x, n in zip((q, k, v), dtypes))
    kwargs = {n: jnp.ones(*x) if isinstance(x, tuple) else x for n, x in kwargs.items()}
    return attention(q, k, v, strategy, **kwargs)


def array(*shape, dtype=jnp.float32):
    return (shape, dtype)


def with_metadata(**kwargs):
    return call(strategy=Blockwise(Metadata(**kwargs)))


class OfArrays(AbstractMask):
    def operands(self):
        return (jnp.ones((B, H)),)

    def visible(self, b, h, q, k, x):
        return x > 0


integers, booleans = jnp.int32, jnp.bool_
DROPOUT = Blockwise(Metadata(dropout_prob=0.5))

# What is wrong: the call, the error, and what its message must contain.
TABLE = {
    # functions of one pair
    "a mask of two arguments": (
        lambda: call(mask=MaskFn(lambda q, k: q >= k)),
        TypeError, ["called as fn(b, h, q, k, *operands), with 4 arguments"],
    ),
    "a score without its logit": (
        lambda: call(score=scores.ScoreFn(lambda b, h, q, k: h)),
        TypeError, ["called as fn(logit, b, h, q, k, *operands), with 5 arguments"],
    ),
    "a mask that reads a NumPy array": (
        lambda: call(mask=MaskFn(lambda b, h, q, k: np.arange(T)[q] >= k)),
        TypeError, ["jnp.asarray(array)[i]"],
    ),
    "a score that reads a list": (
        lambda: call(score=scores.ScoreFn(lambda z, b, h, q, k: z + [1.0, 2.0][h])),
        TypeError, ["jnp.asarray(array)[i]"],
    ),
    "a score that returns nothing": (
        lambda: call(score=scores.ScoreFn(lambda z, b, h, q, k: None)),
        TypeError, ["one float per pair, got NoneType"],
    ),
    "a mask that returns nothing": (
        lambda: call(mask=MaskFn(lambda b, h, q, k: None)), TypeError, ["returns None"],
    ),
    "an array of bools as lengths": (
        lambda: call(mask=KeyPadding(np.ones((B, S), bool))),
        TypeError, [(B, S), "mask.sum(-1)", "DenseMask(mask[..., None, None, :])"],
    ),
    "a mask for each batch element": (
        lambda: call(mask=array(B, T, S, dtype=booleans)), ValueError, [FULL, (B, 1, T, S)],
    ),
    # query, key and value
    "heads": (lambda: call(q=(B, T, 3, D)), ValueError, [(B, T, 3, D), KEYS, VALUES, "multiple"]),
    "no heads": (lambda: call(q=(B, T, 0, D)), ValueError, [(B, T, 0, D), "at least one head"]),
    "no kv heads": (lambda: call(k=(B, S, 0, D), v=(B, S, 0, V)), ValueError, [(B, S, 0, D), Q]),
    "no head dim": (lambda: call(q=(B, T, H, 0), k=(B, S, K, 0)), ValueError, [(B, T, H, 0), "dim"]),
    "head dim": (lambda: call(q=(B, T, H, 6)), ValueError, [(B, T, H, 6), KEYS, "last axis"]),
    "lengths": (lambda: call(v=(B, 5, K, V)), ValueError, [KEYS, (B, 5, K, V), "tokens"]),
    "kv heads": (lambda: call(v=(B, S, 1, V)), ValueError, [KEYS, (B, S, 1, V), "heads"]),
    "batch": (lambda: call(q=(1, T, H, D)), ValueError, [(1, T, H, D), KEYS, "broadcast them"]),
    "batch rank": (lambda: call(q=(T, H, D)), ValueError, [(T, H, D), KEYS, "broadcast them"]),
    "no heads axis": (lambda: call((T, D), (S, D), (S, V)), ValueError, [(T, D), "add a heads axis"]),
    "dtypes": (lambda: call(dtypes="hff"), TypeError, ["bfloat16", "float32", "cast them"]),
    "value dtype": (lambda: call(dtypes="ffh"), TypeError, ["bfloat16", "float32", "cast them"]),
    "integer query": (lambda: call(dtypes="iff"), TypeError, ["query", "int32", "cast"]),
    "integer key": (lambda: call(dtypes="fif"), TypeError, ["key", "int32", "cast"]),
    "integers": (
        lambda: call(dtypes="iii", strategy=Dense(Metadata())), TypeError, ["query", "int32", "cast"]
    ),
    "query of eight bits": (
        lambda: call(dtypes="888"), TypeError, ["query", "float8_e4m3fn", "bfloat16 or wider", "KVCache.empty"]
    ),
    "keys of eight bits": (lambda: call(dtypes="f8f"), TypeError, ["key", "float8_e4m3fn", "KVCache.empty"]),
    "cache of eight bits": (
        lambda: KVCache.empty(B, S, K, D, dtype=jnp.float8_e5m2), TypeError, ["dtype", "float8_e5m2", "stored="]
    ),
    "boolean value": (lambda: call(dtypes="ffb"), TypeError, ["value", "bool", "cast"]),
    # mask
    "mask shape": (lambda: call(mask=array(T, S + 1, dtype=booleans)), ValueError, ["mask", (T, S + 1), FULL]),
    "mask transposed": (lambda: call(mask=array(S, T, dtype=booleans)), ValueError, ["mask", (S, T), FULL]),
    "mask batch": (lambda: call(mask=array(3, 1, T, S, dtype=booleans)), ValueError, [(3, 1, T, S), FULL]),
    "mask heads": (lambda: call(mask=array(K, T, S, dtype=booleans)), ValueError, [(K, T, S), FULL]),
    "mask rank": (lambda: call(mask=array(1, *FULL, dtype=booleans)), ValueError, [(1, *FULL), FULL]),
    "mask of floats": (lambda: call(mask=array(T, S)), TypeError, ["float32", "boolean", "`bias`"]),
    "mask of integers": (lambda: call(mask=array(T, S, dtype=integers)), TypeError, ["int32", "boolean"]),
    "mask by a wrong name": (lambda: call(mask="casual"), ValueError, ["'causal'", "'full'", "'casual'"]),
    "list of masks": (lambda: call(mask=[Causal(), Causal()]), TypeError, ["one mask", "`a & b`"]),
    "mask class": (lambda: call(mask=Causal), TypeError, ["mask module", "Causal(...)"]),
    "mask as a function": (lambda: call(mask=lambda b, h, q, k: k <= q), TypeError, ["MaskFn(fn)"]),
    "masks by and": (lambda: call(mask=Causal() and SlidingWindow(3, 0)), TypeError, ["`&`", "`and`"]),
    "masks by not": (lambda: call(mask=not Causal()), TypeError, ["`~`", "`not`"]),
    "term": (
        lambda: call(mask=Causal() & ~Segments(jnp.zeros((B, 9), integers))), ValueError, ["Segments", (B, 9), FULL]
    ),
    "mask function by and": (
        lambda: call(mask=MaskFn(lambda b, h, q, k: q > k and q - k < 4)), TypeError, ["`&`", "jnp.where"]
    ),
    "score function by if": (
        lambda: call(score=scores.ScoreFn(lambda z, b, h, q, k: z if q > k else 2 * z)), TypeError, ["jnp.where"]
    ),
    "table of other heads": (
        lambda: call(score=scores.T5Bias([[0.0] * 8] * 32)), ValueError, ["T5Bias with a table of shape (32, 8)", FULL]
    ),
    "cache": (lambda: attention(ones()[0], *[KVCache.empty(B, S, K, D, V)] * 2), TypeError, ["key_", "cache.key"]),
    "mask for a strategy": (lambda: call(strategy=Causal()), TypeError, ["mask="]),
    "array for a strategy": (lambda: call(strategy=jnp.ones((T, S), bool)), TypeError, ["mask="]),
    "segments": (
        lambda: call(mask=Segments(jnp.zeros((B, T + 1), integers), jnp.zeros((B, S), integers))),
        ValueError, ["Segments", (B, T + 1), FULL],
    ),
    "segments of the query only": (
        lambda: call(mask=Segments(jnp.zeros((B, T), integers))), ValueError, ["Segments", (B, T), FULL]
    ),
    "padding": (lambda: call(mask=KeyPadding(jnp.zeros(3, integers))), ValueError, ["KeyPadding", (3,), FULL]),
    "mask function": (lambda: call(mask=MaskFn(lambda b, h, q, k: q)), TypeError, ["one bool", "int32"]),
    "mask function of arrays": (
        lambda: call(mask=MaskFn(lambda b, h, q, k: jnp.ones(2, bool))), TypeError, ["one bool", "[2]"]
    ),
    "negative window": (lambda: SlidingWindow(-1, 0), ValueError, ["left", "at least 0", "-1"]),
    "negative right window": (lambda: SlidingWindow(1, -2), ValueError, ["right", "at least 0", "-2"]),
    "negative window sinks": (lambda: SlidingWindow(1, 0, -1), ValueError, ["sinks", "at least 0", "-1"]),
    "fractional window": (lambda: SlidingWindow(1.5, 0), TypeError, ["left", "int", "1.5"]),
    # bias and scores
    "bias shape": (lambda: call(bias=array(T, S + 1)), ValueError, ["bias", (T, S + 1), FULL]),
    "bias rank": (lambda: call(bias=array(1, *FULL)), ValueError, ["bias", (1, *FULL), FULL]),
    "integer bias": (lambda: call(bias=array(T, S, dtype=integers)), TypeError, ["bias", "int32", "cast"]),
    "bias module": (lambda: call(bias=scores.ALiBi.geometric(H)), TypeError, ["bias", "`score`"]),
    "score function": (lambda: call(score=lambda z, *_: z), TypeError, ["function", "ScoreFn"]),
    "score array": (lambda: call(score=jnp.ones((T, S))), TypeError, ["score modules", "ScoreFn"]),
    "arrays as operands of a mask": (
        lambda: call(mask=OfArrays()), TypeError, ["OfArrays.operands() must be Operands", "Operand(array, 'bh')"]
    ),
    "slopes": (lambda: call(score=scores.ALiBi.geometric(3)), ValueError, ["ALiBi", (3,), FULL]),
    "table": (lambda: call(score=scores.T5Bias(jnp.zeros((32, 3)))), ValueError, ["T5Bias", (3,), FULL]),
    # positions
    "offset and positions": (lambda: call(q_offset=1, q_positions=jnp.arange(T)), ValueError, ["not both"]),
    "query positions": (lambda: call(q_positions=jnp.arange(4)), ValueError, ["q_positions", (4,), T]),
    "key positions": (
        lambda: call(kv_positions=jnp.arange(3)), ValueError, ["kv_positions", (3,), "axes 'bs'", (B, 1, S, S)]
    ),
    "key positions of a batch": (
        lambda: call(kv_positions=array(3, S, dtype=integers)), ValueError, ["kv_positions", (3, S), B]
    ),
    "float positions": (lambda: call(q_positions=array(T)), TypeError, ["q_positions", "float32", "integers"]),
    "float offset": (lambda: call(q_offset=1.5), TypeError, ["q_offset", "int", "1.5"]),
    "float offsets": (lambda: call(q_offset=array(B)), TypeError, ["q_offset", "float32", "integers"]),
    "boolean offset": (lambda: call(q_offset=True), TypeError, ["q_offset", "int", "True"]),
    "offsets": (lambda: call(q_offset=jnp.arange(3)), ValueError, ["q_offset", (3,), B]),
    "huge offset": (lambda: call(q_offset=2**33), ValueError, ["q_offset", "2**30", 2**33]),
    # metadata
    "scale": (lambda: Metadata(softmax_scale=math.nan), ValueError, ["softmax_scale", "finite", "nan"]),
    "scale array": (lambda: Metadata(softmax_scale=np.float32(math.inf)), ValueError, ["finite", "inf"]),
    "scale per head": (lambda: with_metadata(softmax_scale=jnp.ones(H)), ValueError, ["softmax_scale", (H,), Q]),
    "negative soft cap": (lambda: Metadata(logits_soft_cap=-1.0), ValueError, ["logits_soft_cap", "positive"]),
    "soft cap per head": (lambda: with_metadata(logits_soft_cap=jnp.ones(H)), ValueError, ["SoftCap", (H,), FULL]),
    "sinks": (lambda: with_metadata(softmax_aux=jnp.ones(3)), ValueError, [(3,), "[num_heads] = [4]", "reshape"]),
    "sinks of some heads": (
        lambda: with_metadata(softmax_aux=jnp.ones((K, 2))), ValueError, [(K, 2), "[num_heads, n]", "reshape"]
    ),
    "sinks rank": (lambda: Metadata(softmax_aux=jnp.ones((1, H, 2))), ValueError, [(1, H, 2), "[num_heads"]),
    "block size": (lambda: Metadata(blocksize_q=0), ValueError, ["blocksize_q", "at least 1", "0"]),
    "dropout rate": (lambda: Metadata(dropout_prob=1.0), ValueError, ["dropout_prob", "[0, 1)", "1.0"]),
    "integer output": (lambda: Metadata(runtime_dtype="int32"), ValueError, ["dtype", "int32"]),
    # strategies
    "name": (lambda: AttentionRegistry.create("nope", Metadata()), ValueError, ["nope", "blockwise", "dense"]),
    "strategy name": (lambda: call(strategy="dense"), TypeError, ["'dense'", "AttentionRegistry.create"]),
    "strategy class": (lambda: call(strategy=Blockwise), TypeError, ["Blockwise", "Blockwise(metadata)"]),
    "metadata": (lambda: call(strategy=Metadata()), TypeError, ["AttentionMetadata(", "Blockwise(metadata)"]),
    "strategy of nothing": (lambda: Blockwise(3), TypeError, ["AttentionMetadata", "3"]),
    "weights": (
        lambda: call(strategy=Blockwise(Metadata()), return_weights=True), ValueError, ["return_weights", "Dense("]
    ),
    "default weights": (lambda: call(return_weights=True), ValueError, ["return_weights", "Dense("]),
    "platform": (lambda: with_metadata(platform="pallas"), ValueError, ["platform", "blockwise", "'xla'"]),
    "keyword": (lambda: call(causal=True), TypeError, ["causal"]),
    "keyword of a strategy": (lambda: Dense(Metadata())(*ones(), window=3), TypeError, ["window"]),
    "keyword of forward_native": (
        lambda: Dense(Metadata()).forward_native(*ones(), window=3), TypeError, ["window"]
    ),
    "flag of a strategy": (lambda: Blockwise(Metadata(), fused_backward="no"), TypeError, ["fused_backward", "'no'"]),
    "layout": (lambda: Ring(Metadata(), layout="zigzag"), TypeError, ["layout", "Zigzag()", "'zigzag'"]),
    "layout class": (lambda: Ring(Metadata(), layout=Zigzag), TypeError, ["layout", "Zigzag()"]),
    "mesh": (lambda: Ring(Metadata(), mesh="x"), TypeError, ["mesh", "'x'"]),
    "dtype name": (lambda: Metadata("floaty"), TypeError, ["runtime dtype", "floaty"]),
    "device for a platform": (lambda: Metadata(platform="cuda"), ValueError, ["backend='cuda'"]),
    "block of floats": (lambda: Metadata(blocksize_q=64.0), TypeError, ["blocksize_q", "64.0"]),
    "half an array": (
        lambda: Metadata.from_dict({"softmax_scale": {"$array": {"dtype": "float32"}}}), ValueError, ["$array", "base64"]
    ),
    "half a mesh": (lambda: Metadata.from_dict({"mesh": {"$mesh": {}}}), ValueError, ["$mesh", "shape"]),
    # rings
    "axis of tokens": (lambda: Zigzag().permute(np.arange(16), 4), ValueError, ["axis=0", (16,)]),
    "plan of heads": (lambda: ring_plan(64, 4, heads=6, kv_heads=4), ValueError, ["heads=6", "kv_heads=4"]),
    "plan of no devices": (lambda: ring_plan(100, 0), ValueError, ["devices must be at least 1", "0"]),
    "window of three": (
        lambda: ring_attention(*ones(), sliding_window=(3, 3, 3)), ValueError, ["sliding_window", (3, 3, 3)]
    ),
    "parameters": (lambda: ring_attention(*ones(), fwd_params={}), TypeError, ["fwd_params", "FwdParams"]),
    "mask builder": (
        lambda: ring_attention(*ones(), mask_builder=lambda *a: None), TypeError, ["mask_builder", "None", "head 0"]
    ),
    # carries
    "carry of an output": (
        lambda: Carry.empty((T, H), V).merge(call()), TypeError, ["AttentionOutput", "return_carry=True"]
    ),
    "sinks of each head or of all": (
        lambda: Carry.empty((T, H), V).with_sinks(jnp.ones(H)), ValueError, [(H,), (H, 1), (1, H)]
    ),
    "carry": (lambda: Carry(jnp.ones((T, H, V)), jnp.ones(H), jnp.ones((T, H))), ValueError, [(T, H, V), (H,)]),
    # dropout
    "key where there is no dropout": (lambda: call(key="junk"), TypeError, ["jax.random.key", "'junk'"]),
    "no key": (lambda: call(strategy=DROPOUT), ValueError, ["dropout_prob=0.5", "key=", "inference=True"]),
    "keys": (
        lambda: call(strategy=DROPOUT, key=jax.random.split(jax.random.key(0), 2)), ValueError, [(2,), "single"]
    ),
    "seed for a key": (lambda: call(strategy=DROPOUT, key=0), TypeError, ["jax.random.key", "0"]),
    "traced inference": (lambda: call(strategy=DROPOUT, inference=jnp.asarray(True)), TypeError, ["inference", "static"]),
    # blockwise_attn
    "policy": (lambda: blockwise_attn(*ones(), policy=True), TypeError, ["policy", "True"]),
    "chunk": (lambda: blockwise_attn(*ones(), key_chunk_size=0), ValueError, ["blocksize_k", "at least 1"]),
    "chunk of floats": (lambda: blockwise_attn(*ones(), query_chunk_size=1.5), TypeError, ["integer"]),
    "no rng": (
        lambda: blockwise_attn(*ones(), deterministic=False, attn_pdrop=0.5), ValueError, ["dropout_rng", "0.5"]
    ),
    "bias of blockwise_attn": (lambda: blockwise_attn(*ones(), bias=jnp.ones((S, T))), ValueError, [(S, T), FULL]),
    "dtype of blockwise_attn": (lambda: blockwise_attn(*ones(), dtype=jnp.int32), ValueError, ["int32"]),
    "precision": (lambda: blockwise_attn(*ones(), precision="nonsense"), ValueError, ["recision", "nonsense"]),
}  # fmt: skip


def ones():
    return jnp.ones(Q), jnp.ones(KEYS), jnp.ones(VALUES)


@pytest.mark.parametrize("how", ["eager", "eval_shape", "grad"])
@pytest.mark.parametrize("name", TABLE)
def test_bad_input(name, how):
    fn, error, contents = TABLE[name]
    run = {
        "eager": fn,
        "eval_shape": lambda: jax.eval_shape(jax.jit(fn)),
        "grad": lambda: jax.grad(lambda x: x + jnp.sum(jax.tree.leaves(fn())[0]))(1.0),
    }[how]
    with pytest.raises(error) as caught:
        run()
    message = str(caught.value)
    for text in contents:
        assert str(text) in message, message
    assert "XlaRuntimeError" not in message and len(message) > 20


@pytest.mark.parametrize("which", ["queries", "keys"])
def test_positions_end_at_two_to_the_thirty(which):
    def arrays(n):
        t, s = (n, 1) if which == "queries" else (1, n)
        shape = lambda *xs: jax.ShapeDtypeStruct(xs, jnp.float32)
        return shape(t, H, D), shape(s, K, D), shape(s, K, V)

    check_shapes(*arrays(2**30))
    with pytest.raises(
        ValueError, match=r"at most 2\*\*30 queries and keys, got 1073741825: query"
    ):
        jax.eval_shape(attention, *arrays(2**30 + 1))


def test_flags_are_static():
    with pytest.raises(TypeError, match="return_logsumexp is True or False.*static"):
        jax.jit(attention)(*ones(), return_logsumexp=True)


def test_a_list_of_booleans_is_a_mask():
    visible = np.tril(np.ones((T, S), bool))
    got, want = (call(mask=m).attention_outputs for m in (visible.tolist(), visible))
    assert (got == want).all()


def test_traced_numbers_are_never_looked_into():
    """What is wrong with a value that is not known yet is no error (nor a wrong trace)."""

    def f(scale, cap, sinks):
        metadata = Metadata(softmax_scale=scale, logits_soft_cap=cap, softmax_aux=sinks)
        return attention(*ones(), Blockwise(metadata)).attention_outputs

    out = jax.eval_shape(f, jnp.float32(math.nan), jnp.float32(-1), jnp.full(H, math.nan))
    assert out.shape == (B, T, H, V)


@pytest.mark.parametrize(
    "shapes",
    [
        ((T, H, D), (S, K, D), (S, K, V)),
        ((0, T, H, D), (0, S, K, D), (0, S, K, V)),
        ((B, 0, H, D), KEYS, VALUES),
        (Q, (B, 0, K, D), (B, 0, K, V)),
        (Q, KEYS, (B, S, K, 0)),
        ((2, 1, T, H, D), (2, 1, S, H, D), (2, 1, S, H, V)),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "strategy", [Blockwise(Metadata()), Dense(Metadata())], ids=["blockwise", "dense"]
)
def test_what_only_looks_bad_is_fine(strategy, shapes):
    out = attention(*(jnp.ones(x) for x in shapes), strategy, mask=Causal(), return_logsumexp=True)
    assert out.attention_outputs.shape == (*shapes[0][:-1], shapes[2][-1])
    assert out.logsumexp.shape == shapes[0][:-1]
    if shapes[1][-3] == 0:
        assert (out.attention_outputs == 0).all() and (out.logsumexp == -jnp.inf).all()
