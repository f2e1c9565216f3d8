"""cuDNN, for those who ask for it: what it is told, what is refused, and what it never gets.

Where there is no GPU, programs are lowered for one, and the arguments are given to JAX's own code
for any device, which takes the same ones.
"""

import functools as ft
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from _kernels import of
from jax._src.cudnn import fused_attention_stablehlo as of_jax
from matrix import bound, oracle, oracle_masks as om

from eqattn import (
    ALiBi,
    AllGather,
    attention,
    AttentionMetadata,
    Blockwise,
    Causal,
    Dense,
    DenseMask,
    KeyPadding,
    QueryPadding,
    Ragged,
    Ring,
    Segments,
    SlidingWindow,
    top_keys,
    Ulysses,
)
from eqattn.scores import Bias


_, text_of, _ = of("cuda")
B, T, S, H, K, D = 2, 48, 80, 4, 2, 16
here = jax.default_backend() == "gpu"
library: Any = of_jax


@pytest.fixture(autouse=True)
def found(monkeypatch):
    """JAX looks for the library while it traces."""
    if library.cuda_versions is None:
        stub = types.SimpleNamespace(cudnn_get_version=lambda: 92300)
        monkeypatch.setattr(library, "cuda_versions", stub)


def metadata(**kw):
    given: Any = dict(platform="cudnn") | kw
    return AttentionMetadata(**given)


def arrays(dtype: Any = jnp.bfloat16, t=T, s=S, h=H, k=K, d=D, v=None) -> Any:
    shapes = (B, t, h, d), (B, s, k, d), (B, s, k, v or d)
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes)]


def call(q, k, v, mask: Any = None, md: Any = None, **kw):
    return attention(q, k, v, Blockwise(md or metadata()), mask=mask, **kw).attention_outputs


def told(text):
    """The calls of cuDNN in a program: their name, mask, window and scale."""
    found = []
    for name, config in re.findall(r'custom_call @"?(__cudnn[\w$]+)"?\(.*?backend_config = "(.*?)"[,}]', text):  # fmt: skip
        values = re.findall(r'(mask_type|sliding_window_length|fmha_scale)\\22: (?:\\22)?([\w.]+)', config)  # fmt: skip
        found.append((name.removeprefix("__cudnn$fmha"), *dict(sorted(values)).values()))
    return found


LENGTHS = jnp.array([5, 70], jnp.int32)
MASKS: dict[str, Any] = {
    "full": (None, np.ones((1, 1, T, S), bool), ("NO_MASK", "0")),
    "causal": (Causal(), om.causal(T, S, 0, 0), ("CAUSAL", "0")),
    "window": (
        Causal() & SlidingWindow(7, 3),
        om.window(T, S, 7, 3, 0, 0) & om.causal(T, S, 0, 0),
        ("CAUSAL", "8"),
    ),
    "left": (
        SlidingWindow(9, 0) & SlidingWindow(7, 0),
        om.window(T, S, 7, 0, 0, 0),
        ("CAUSAL", "8"),
    ),
    "keys": (KeyPadding(LENGTHS), om.lengths(T, S, np.array([5, 70])), ("PADDING", "0")),
    "both": (
        Causal() & KeyPadding(LENGTHS) & QueryPadding(jnp.full(2, T)),
        om.causal(T, S, 0, 0) & om.lengths(T, S, np.array([5, 70])),
        ("PADDING_CAUSAL", "0"),
    ),
}


def problem(visible, q, k, v, **kw):
    wide = [np.asarray(x).astype(np.float64) for x in (q, k, v)]
    return oracle.Problem(*wide, scale=0.3, mask=visible, **kw)


@ft.cache
def under_xla():
    """The outputs of all masks, by JAX's code for any device with cuDNN's arguments."""
    for_any = jax.nn.dot_product_attention

    def instead(*args, implementation, **kw):
        assert implementation == "cudnn"
        with jax.numpy_dtype_promotion("standard"):  # as it needs
            return for_any(*args, implementation="xla", **kw)

    @jax.jit
    def run(q, k, v, bias):
        md = metadata(softmax_scale=0.3)
        found = {name: call(q, k, v, mask, md) for name, (mask, *_) in MASKS.items()}
        return found | {"bias": call(q, k, v, Causal(), md, bias=bias)}

    bias = jax.random.normal(jax.random.key(9), (H, T, S), jnp.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.nn, "dot_product_attention", instead)
        return run(*arrays(), bias), bias


@pytest.mark.parametrize("name", [*MASKS, "bias"])
def test_arguments_mean_the_mask(name):
    """To JAX's own code, which cuDNN's is told the same."""
    found, bias = under_xla()
    visible = MASKS["causal" if name == "bias" else name][1]
    more = dict(bias=np.asarray(bias).astype(np.float64)[None]) if name == "bias" else {}
    precision = bound.precision_of(ml_dtypes.bfloat16)
    want = bound.values(problem(visible, *arrays(), **more), precision)["out"]
    assert bound.excess(np.asarray(found[name]), want) <= 1


def test_what_cudnn_is_told():
    """Its calls, in the order of the program, with no array of all pairs beside them."""
    md = metadata(softmax_scale=0.25)
    q, k, v = arrays()

    def run(q, k, v):
        return [call(q, k, v, mask, md) for mask, *_ in MASKS.values()]

    text = text_of(run, q, k, v)
    want = [("Softmax", "0.25", *flags) for *_, flags in MASKS.values()]
    assert told(text) == want
    assert f"{T}x{S}" not in text and f"{S}x{T}" not in text


def test_gradients_are_cudnn_s():
    """That of a bias, too; under jit, vmap and checkpoint."""
    bias = jnp.ones((H, T, S), jnp.bfloat16)

    def loss(q, k, v, bias):
        f = jax.checkpoint(lambda *xs: call(*xs, Causal(), bias=bias))
        return f(q, k, v).astype(jnp.float32).sum()

    text = text_of(jax.grad(loss, (0, 1, 2, 3)), *arrays(), bias)
    names = [name for name, *_ in told(text)]
    assert names.count("ScaleBiasSoftmaxBackward") == 1
    assert set(names) == {"ScaleBiasSoftmax", "ScaleBiasSoftmaxBackward"}
    plain = jax.vmap(jax.grad(lambda *xs: call(*xs, Causal()).astype(jnp.float32).sum(), (0, 1, 2)))
    text = text_of(plain, *[x[None] for x in arrays()])
    assert [name for name, *_ in told(text)] == ["Softmax", "SoftmaxBackward"]
    assert f"{T}x{S}" not in text


@pytest.mark.parametrize("platform", ["auto", "xla"])
def test_only_who_asks_gets_it(platform):
    md = AttentionMetadata(platform=platform, backend="cuda")
    assert told(text_of(lambda *xs: call(*xs, Causal(), md), *arrays(t=8, s=8))) == []


QUERY = arrays()[0]
IDS = jnp.zeros(T, jnp.int32), jnp.zeros(S, jnp.int32)
REFUSED = {
    "logsumexp": (dict(return_logsumexp=True), "rounded.*drops its gradient"),
    "carry": (dict(return_carry=True), "no Carry"),
    "largest": (dict(return_max_logits=True), "no largest logits"),
    "offset": (dict(mask=Causal(3)), "no offset"),
    "traced": (dict(mask=Causal(jnp.int32(0))), "no offset"),
    "positions": (dict(mask=Causal(), q_offset=4), "positions 0, 1"),
    "segments": (dict(mask=Causal() & Segments(*IDS)), "no Segments"),
    "dense": (dict(mask=DenseMask(jnp.ones((T, S), bool))), "no Dense"),
    "or": (dict(mask=Causal() | SlidingWindow(3, 3)), "no Or"),
    "right": (dict(mask=SlidingWindow(3, 3)), "windows are causal; add Causal"),
    "no left": (dict(mask=SlidingWindow(None, 3)), "windows are causal; add Causal"),
    "sinks of a window": (dict(mask=SlidingWindow(3, 0, sinks=1)), "no SlidingWindow"),
    "window and lengths": (dict(mask=SlidingWindow(3, 0) & KeyPadding(9)), "leave one of them out"),
    "starts": (dict(mask=KeyPadding(9, LENGTHS)), "begin at their first key"),
    "two lengths": (dict(mask=KeyPadding(9) & KeyPadding(LENGTHS)), "one KeyPadding"),
    "a sequence without keys": (dict(mask=KeyPadding(jnp.array([4, 0]))), "has no keys"),
    "empty row": (dict(mask=QueryPadding(40)), "queries from 40 on see nothing"),
    "score": (dict(score=ALiBi(jnp.ones(H))), "no ALiBi"),
    "two biases": (dict(bias=QUERY[0, 0], score=Bias(QUERY[0, 0])), "one bias"),
    "bias of keys": (dict(bias=jnp.ones((H, 1, S), jnp.bfloat16)), r"broadcast it"),
    "bias of pairs": (dict(bias=jnp.ones((T, S), jnp.bfloat16)), r"broadcast it"),
    "wide bias": (dict(bias=jnp.ones((H, T, S))), "not float32"),
    "cap": (dict(md=metadata(logits_soft_cap=30.0)), "no soft cap"),
    "sinks": (dict(md=metadata(softmax_aux=jnp.ones(H))), "no sinks"),
    "dropout": (dict(md=metadata(dropout_prob=0.1), key=jax.random.key(0)), "bits are others"),
    "logits": (dict(md=metadata(runtime_softmax_dtype="bfloat16")), "logits are float32"),
    "scale": (dict(md=metadata(softmax_scale=jnp.array(0.3))), "give a Python number"),
    "blocks": (dict(md=metadata(blocksize_k=64)), "leave them None"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    given, reason = REFUSED[name]
    with pytest.raises(ValueError, match=f"platform='cudnn'.*{reason}"):
        call(*arrays(), **given)
    # `supports` says the same of all that is no matter of shapes.
    of_shapes = ("empty", "bias of", "wide")
    features = {n: x for n, x in given.items() if n != "md"}
    able = Blockwise(given.get("md") or metadata()).supports(**features)
    assert able.ok == name.startswith(of_shapes) and (able or re.search(reason, able.reason))


SHAPES = {
    "float32": (dict(dtype=jnp.float32), "bfloat16 and float16, not float32"),
    "odd head dim": (dict(d=12), "multiples of 8 up to 256, got 12"),
    "large head dim": (dict(d=264), "multiples of 8 up to 256, got 264"),
    "narrow values": (dict(v=8), "as wide as keys, got 16 and 8; pad"),
    "no keys": (dict(s=0), "a query and a key, got 48 queries and 0 keys"),
    "more queries": (dict(s=40), "got 48 queries and 40 keys; pad the keys"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_are_refused(name):
    given, reason = SHAPES[name]
    with pytest.raises(ValueError, match=f"platform='cudnn'.*{reason}"):
        call(*arrays(**given), Causal())


def test_starts_that_are_traced_are_refused():
    with pytest.raises(ValueError, match="begin at their first key"):
        jax.eval_shape(lambda starts: call(*arrays(), KeyPadding(9, starts)), LENGTHS)


def test_precision_is_refused():
    strategy = Blockwise(metadata(), precision="highest")
    assert "one precision, not highest" in strategy.supports(mask=Causal()).reason
    with pytest.raises(ValueError, match="one precision, not"):
        attention(*arrays(), strategy)
    for name in ("default", "fastest", "bfloat16", jax.lax.Precision.DEFAULT):
        assert Blockwise(metadata(), precision=name).supports()


def test_a_gradient_through_the_logsumexp_is_no_silent_zero():
    """As it is in `jax.nn`."""

    def lse(q, k, v):
        return attention(q, k, v, Blockwise(metadata()), return_logsumexp=True).logsumexp

    with pytest.raises(ValueError, match="drops its gradient"):
        jax.grad(lambda *xs: lse(*xs).sum())(*arrays())


def test_gradients_of_odd_numbers_of_tokens_are_refused():
    """By JAX, with a message that names no remedy."""
    f = lambda *xs: call(*xs).astype(jnp.float32).sum()
    assert told(text_of(f, *arrays(t=47))) != []
    with pytest.raises(ValueError, match="even numbers of queries and keys, got 47 and 80; pad"):
        jax.grad(f)(*arrays(t=47))


def test_forward_mode_raises():
    q, k, v = arrays()
    with pytest.raises(TypeError, match="forward-mode"):
        text_of(lambda q: jax.jvp(lambda q: call(q, k, v), (q,), (q,)), q)


@pytest.mark.parametrize("strategy", [Ragged, Ring, Ulysses, AllGather, Dense])
def test_other_strategies_refuse(strategy):
    with pytest.raises(ValueError, match=f"platform='cudnn': {strategy.__name__} .*Blockwise"):
        attention(*arrays(), strategy(metadata()))
    assert "Blockwise" in strategy(metadata()).supports().reason


def test_what_is_no_call_refuses():
    with pytest.raises(ValueError, match="platform='cudnn'.*top_keys"):
        top_keys(*arrays()[:2], 4, Blockwise(metadata()))
    with pytest.raises(ValueError, match="bitwise=True with platform='cudnn'"):
        attention(*arrays(), Blockwise(metadata(), bitwise=True))


def test_the_platform_names_its_device():
    assert metadata().backend == "cuda" and metadata(backend="gpu").platform == "cudnn"
    for backend in ("rocm", "tpu", "cpu"):
        with pytest.raises(ValueError, match=f"platform='cudnn'.*backend='{backend}' was given"):
            metadata(backend=backend)
    assert metadata(backend="gpu").replace(platform="xla").platform == "xla"
    assert AttentionMetadata.from_json(metadata().to_json()) == metadata()
    assert Blockwise(metadata()).selected_forward() == "forward_cuda"
    assert Blockwise(AttentionMetadata()).supports(platform="cudnn", mask=Causal())


def test_without_the_library(monkeypatch):
    monkeypatch.setattr(library, "cuda_versions", None)
    with pytest.raises(ValueError, match=r"no cuDNN here; install 'jax\[cuda13\]'") as caught:
        call(*arrays())
    assert Blockwise(metadata()).supports(dtype="bfloat16").reason == str(caught.value)
    # What no cuDNN has is named first.
    assert "no Segments" in Blockwise(metadata()).supports(mask=Segments(jnp.zeros(4, int))).reason


def test_supports_says_what_no_shape_changes():
    """A sequence that is known to have no keys has none in any call."""
    with pytest.raises(ValueError, match="a sequence has no keys") as caught:
        call(*arrays(), KeyPadding(0))
    assert Blockwise(metadata()).supports(mask=KeyPadding(0)).reason == str(caught.value)
    assert Blockwise(metadata()).supports(mask=KeyPadding(3))


@pytest.mark.skipif(not here, reason="runs cuDNN itself, which needs an NVIDIA GPU")
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_numbers(name, dtype):
    """The output and the gradients of cuDNN, within the bound."""
    mask, visible, _ = MASKS[name]
    q, k, v = arrays(dtype)
    g = jax.random.normal(jax.random.key(3), q.shape, dtype)
    md = metadata(softmax_scale=0.3)
    out, pull = jax.vjp(lambda *xs: call(*xs, mask, md), q, k, v)
    precision = bound.precision_of(np.asarray(q).dtype)
    given = problem(visible, q, k, v)
    want = bound.grads(given, np.asarray(g).astype(np.float64), np.zeros(q.shape[:3]), precision)
    assert bound.excess(np.asarray(out), bound.values(given, precision)["out"]) <= 1
    for name, x in zip("qkv", pull(g)):
        assert bound.excess(np.asarray(x), want[name]) <= 1
