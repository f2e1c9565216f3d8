import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _same import same
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

from eqattn._config.metadata import AttentionMetadata
from eqattn._config.platform import RuntimeMode
from eqattn._output import AttentionOutput
from eqattn._problem.problem import choose_bias, choose_dropout_key
from eqattn.strategies import AttentionImpl, Support
from eqattn.strategies._registry import AttentionRegistry


class Minimal(AttentionImpl):
    """As little as a user has to write."""

    @classmethod
    def get_impl_name(cls):
        return "test-minimal"

    def forward_native(self, q, k, v, mask=None, bias=None, **kwargs):
        logits = self.metadata.softmax_scale * jnp.einsum("...thd,...shd->...hts", q, k)
        if mask is not None:
            logits = jnp.where(mask, logits, -jnp.inf)
        weights = jax.nn.softmax(logits, -1)
        return AttentionOutput(attention_outputs=jnp.einsum("...hts,...shd->...thd", weights, v))


METHODS = ["native", "tpu", "gpu", "cpu", "cuda", "rocm"]


class Everywhere(Minimal):
    """Says which method ran."""

    def _tag(self, name):
        return AttentionOutput(attention_outputs=jnp.full((1, 1, 1), float(METHODS.index(name))))

    def forward_native(self, *args, **kwargs):
        return self._tag("native")

    def forward_tpu(self, *args, **kwargs):
        return self._tag("tpu")

    def forward_gpu(self, *args, **kwargs):
        return self._tag("gpu")


class EveryDevice(Everywhere):
    pallas_lowerings = ("tpu", "cuda")

    def forward_cpu(self, *args, **kwargs):
        return self._tag("cpu")

    def forward_cuda(self, *args, **kwargs):
        return self._tag("cuda")

    def forward_rocm(self, *args, **kwargs):
        return self._tag("rocm")


def qkv(t=3, s=3, h=2, d=4):
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(k, (n, h, d), jnp.float32) for k, n in zip(keys, (t, s, s))]


def ran(cls, platform, backend):
    out = cls(AttentionMetadata(platform=platform, backend=backend)).dispatch()
    return METHODS[int(out.attention_outputs[0, 0, 0])]


# Construction


def test_a_minimal_subclass_is_built_from_metadata_alone():
    m = AttentionMetadata(softmax_scale=0.5)
    for strategy in (Minimal(m), Minimal(metadata=m)):
        assert strategy.metadata is m and strategy.get_impl_metadata() is m
    with pytest.raises(TypeError):
        Minimal()  # pyright: ignore
    with pytest.raises(TypeError, match="Minimal is built from metadata, an AttentionMetadata"):
        Minimal("metadata")  # pyright: ignore


def test_the_base_and_incomplete_subclasses_are_abstract():
    with pytest.raises(TypeError, match="abstract"):
        AttentionImpl(AttentionMetadata())  # pyright: ignore

    class Nameless(AttentionImpl):
        def forward_native(self, *args, **kwargs):
            return AttentionOutput()

    with pytest.raises(TypeError, match="get_impl_name"):
        Nameless(AttentionMetadata())  # pyright: ignore


def test_a_minimal_subclass_runs_through_attention_and_its_call():
    from eqattn._calls.attention import attention

    q, k, v = qkv()
    strategy = Minimal(AttentionMetadata(softmax_scale=0.5))
    expected = strategy.forward_native(q, k, v).attention_outputs
    for out in (attention(q, k, v, strategy), strategy(q, k, v)):
        np.testing.assert_array_equal(out.attention_outputs, expected)
    mask = jnp.tril(jnp.ones((3, 3), bool))[None]
    out = strategy(q, k, v, mask=mask).attention_outputs
    np.testing.assert_array_equal(out, strategy.forward_native(q, k, v, mask).attention_outputs)
    np.testing.assert_allclose(out[0], v[0], rtol=1e-6)
    with pytest.raises(TypeError, match="window"):
        strategy(q, k, v, window=3)
    with pytest.raises(TypeError):
        strategy(q, k, v, mask)  # pyright: ignore


def test_a_registered_minimal_subclass_is_created_by_name():
    try:
        AttentionRegistry.register(Minimal)
        made = AttentionRegistry.create("test-minimal", AttentionMetadata(softmax_scale=0.5))
        q, k, v = qkv()
        assert made(q, k, v).attention_outputs.shape == (3, 2, 4)
    finally:
        AttentionRegistry._registry.pop("test-minimal", None)


# Dispatch


@pytest.mark.parametrize(
    "backend, expected",
    [("any", "native"), ("cpu", "native"), ("tpu", "tpu"), ("gpu", "gpu"), ("cuda", "gpu"),
     ("rocm", "gpu")],
)  # fmt: skip
def test_auto_runs_the_method_of_the_backend(backend, expected):
    assert jax.default_backend() == "cpu"
    assert ran(Everywhere, "auto", backend) == expected
    assert ran(Everywhere, "xla", backend) == "native"
    name = Everywhere(AttentionMetadata(backend=backend)).selected_forward()
    assert name == f"forward_{'cpu' if backend == 'any' else backend}"


@pytest.mark.parametrize("backend", ["cpu", "tpu", "gpu", "cuda", "rocm"])
def test_own_methods_win_over_the_defaults(backend):
    assert ran(EveryDevice, "auto", backend) == backend
    assert ran(EveryDevice, None, backend) == backend
    assert ran(EveryDevice, "jax", backend) == "native"


def test_everything_defaults_to_forward_native():
    q, k, v = qkv()
    strategy = Minimal(AttentionMetadata(softmax_scale=0.5))
    expected = strategy.forward_native(q, k, v).attention_outputs
    for device in ("tpu", "gpu", "cpu", "cuda", "rocm"):
        forward = getattr(strategy, f"forward_{device}")
        np.testing.assert_array_equal(forward(q, k, v).attention_outputs, expected)
        signature = inspect.signature(getattr(AttentionImpl, f"forward_{device}"))
        assert list(signature.parameters) == (
            "self q k v mask bias init_bias deterministic dropout_rng causal kwargs".split()
        )
        assert signature.parameters["causal"].default is True
        assert signature.parameters["deterministic"].default is False


@pytest.mark.parametrize("platform, backend, device", [
    ("pallas", "any", "cpu"), ("tpu", "any", "tpu"), ("gpu", "any", "gpu"), ("gpu", "rocm", "rocm"),
])  # fmt: skip
def test_pallas_without_a_kernel_raises_at_trace_time(platform, backend, device):
    strategy = Minimal(AttentionMetadata(platform=platform, backend=backend, softmax_scale=1.0))
    match = f"platform='pallas': no Pallas kernel for test-minimal on {device} yet.*'xla' or 'auto'"
    with pytest.raises(ValueError, match=match):
        strategy.dispatch(*qkv())
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(lambda s, *a: s.dispatch(*a), strategy, *qkv())
    ok, reason = strategy.supports()
    assert not ok and "no Pallas kernel for test-minimal" in reason


def test_pallas_runs_where_there_is_a_kernel():
    assert ran(EveryDevice, "tpu", "any") == "tpu"
    assert ran(EveryDevice, "gpu", "cuda") == "cuda"
    for backend in ("gpu", "rocm", "cpu"):
        with pytest.raises(ValueError, match=f"on {backend} yet.*for tpu and cuda"):
            ran(EveryDevice, "pallas", backend)

    class Both(EveryDevice):
        pallas_lowerings = ("gpu",)

    assert [ran(Both, "gpu", b) for b in ("gpu", "cuda", "rocm")] == ["gpu", "cuda", "rocm"]


def test_dispatch_and_current_backend_ask_jax(monkeypatch):
    assert AttentionImpl.current_backend() == "cpu"
    for name, expected in [("tpu", "tpu"), ("gpu", "gpu"), ("cuda", "gpu"), ("rocm", "gpu")]:
        monkeypatch.setattr(jax, "default_backend", lambda name=name: name)
        assert AttentionImpl.current_backend() == expected
        assert ran(Everywhere, "auto", "any") == expected
    monkeypatch.setattr(jax, "default_backend", lambda: "metal")
    with pytest.raises(ValueError, match="'metal'.*platform='xla'"):
        ran(Everywhere, "auto", "any")
    assert ran(Everywhere, "xla", "any") == "native"


# supports


def test_supports():
    class Picky(EveryDevice):
        def unsupported(self, features):
            if "return_weights" in features:
                return "return_weights: picky never forms the weights."
            return None

    strategy = Picky(AttentionMetadata())
    assert strategy.supports() == Support(True, "")
    assert strategy.supports(mask=True, bias=jnp.zeros(3)).ok
    assert strategy.supports() and not Support(False, "no")
    reason = "return_weights: picky never forms the weights."
    assert strategy.supports(return_weights=True) == (False, reason)
    assert strategy.supports(return_weights=False).ok and strategy.supports(return_weights=None).ok
    assert strategy.supports(platform="tpu").ok
    ok, reason = strategy.supports(platform="pallas", backend="cpu")
    assert not ok and "on cpu" in reason
    assert strategy.supports(platform="xla", backend="cpu", mask=True).ok
    with pytest.raises(ValueError, match="return_weight.*return_weights"):
        strategy.supports(return_weight=True)
    assert jax.jit(lambda x: x if strategy.supports(bias=x).ok else 0 * x)(1.0) == 1.0


# Modes


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_get_mode(lead):
    strategy = Minimal(AttentionMetadata())
    one, many = jnp.zeros((*lead, 1, 4, 8)), jnp.zeros((*lead, 5, 4, 8))
    cache = object()
    assert strategy.get_mode(many) is RuntimeMode.TRAIN and strategy.get_mode(many) == "__train__"
    assert strategy.get_mode(many, cache=cache) == "__prefill__"
    assert strategy.get_mode(one) == strategy.get_mode(one, cache=cache) == "__autoregressive__"
    for q in (one, many):
        assert strategy.get_mode(q, insert=True) == "__insert__"
        assert strategy.get_mode(q, cache=cache, insert=True) == "__insert__"
    # One head is not one query, in either layout.
    heads = jnp.zeros((*lead, 5, 1, 8))
    assert strategy.get_mode(heads) == "__train__"
    assert strategy.get_mode(heads, BTHD=False) == "__autoregressive__"
    assert strategy.get_mode(one, False) == "__train__"


def test_get_mode_never_depends_on_values():
    strategy = Minimal(AttentionMetadata())
    shape = jax.ShapeDtypeStruct((2, 1, 4, 8), jnp.float32)
    assert strategy.get_mode(shape) == "__autoregressive__"
    modes = []
    jax.jit(lambda q: modes.append(strategy.get_mode(q, cache=q)))(jnp.zeros((2, 3, 4, 8)))
    assert modes == ["__prefill__"]
    with pytest.raises(TypeError):
        strategy.get_mode(shape, insert=jnp.asarray(True))  # pyright: ignore
    with pytest.raises(ValueError, match=r"\(4, 8\)"):
        strategy.get_mode(jnp.zeros((4, 8)))


# Shardings


@pytest.mark.parametrize(
    "args, expected",
    [
        ((None,), None),
        ((P("a", "b"), [0], None, None), None),
        ((P("a", "b"), [0], None, False), None),
        ((P("a", "b"),), P("a", "b")),
        ((P("a", None),), P("a", None)),
        ((P("a", "b", "c"), [0]), P("a")),
        ((P("a", "b", "c"), [1]), P(None, "b")),
        ((P("a", "b", "c"), []), P()),
        ((P("a", "b", "c"), [0, 2], P("x", "y")), P("x")),
        ((P("a"), [0, 1], P("x", "y")), P("x", "y")),
        ((P("a", "b"), [0, 1], None, P()), P("a", "b")),
        ((P(("a", "c"), "b"), (0,), None, True), P(("a", "c"))),
    ],
)
def test_create_stable_sharding(args, expected):
    out = Minimal(AttentionMetadata()).create_stable_sharding(*args)
    assert out == expected and (out is None) == (expected is None)


def test_create_stable_sharding_fits_a_tensor_to_the_mesh():
    strategy = Minimal(AttentionMetadata(mesh=AbstractMesh((2, 3), ("a", "b"))))
    shape = jax.ShapeDtypeStruct((4, 5, 6), jnp.float32)
    fit = strategy.create_stable_sharding
    assert fit(P("a", "b", "b"), tensor=shape) == P("a", None, "b")
    assert fit(P("a", "b", "b"), [1, 2], tensor=shape) == P(None, None, "b")
    assert fit(P(("a", "b"), None, ("x", "b", "a")), tensor=shape) == P("a", None, ("b", "a"))
    assert fit(P("a"), [2], P(None, None, "a"), tensor=shape) == P(None, None, "a")
    with pytest.raises(ValueError, match="index 3"):
        fit(P("a"), [3], tensor=shape)
    with pytest.raises(ValueError, match="index -1"):
        fit(P("a"), [-1])


def test_create_stable_sharding_uses_the_context_or_asks_for_a_mesh():
    strategy, x = Minimal(AttentionMetadata()), jnp.zeros((4, 5))
    with pytest.raises(ValueError, match="metadata.mesh.*jax.set_mesh"):
        strategy.create_stable_sharding(P("a"), tensor=x)
    with jax.set_mesh(Mesh(np.array(jax.devices()[:1]), ("a",))):
        assert strategy.create_stable_sharding(P("a", "b"), tensor=x) == P("a")


# The rest


def test_repeat_kv_heads():
    k, v = jnp.arange(12.0).reshape(2, 3, 2), jnp.arange(6.0).reshape(2, 3, 1)
    k2, v2 = AttentionImpl.repeat_kv_heads(k, v, 2)
    assert k2.shape == (2, 6, 2) and v2.shape == (2, 6, 1)
    for head in range(6):  # each head consecutively
        np.testing.assert_array_equal(k2[:, head], k[:, head // 2])
        np.testing.assert_array_equal(v2[:, head], v[:, head // 2])
    assert same(AttentionImpl.repeat_kv_heads(k, v, 1), (k, v))
    with pytest.raises(ValueError, match="num_reps >= 1"):
        AttentionImpl.repeat_kv_heads(k, v, 0)
    with pytest.raises((ValueError, TypeError)):
        AttentionImpl.repeat_kv_heads(k, v[:, :2], 2)


def test_choose_bias():
    calls = []

    def init():
        calls.append(1)
        return "init"

    assert choose_bias(None, None, init) == "init" and calls == [1]
    assert choose_bias("m", None, init) is None and choose_bias(None, "b", init) == "b"
    assert choose_bias("m", "b", init) == "b" and choose_bias(None, None, None) is None
    assert calls == [1]


def test_choose_dropout_key():
    key, off, on = jax.random.key(0), AttentionMetadata(), AttentionMetadata(dropout_prob=0.5)
    assert choose_dropout_key(off, False, None) is choose_dropout_key(off, False, key) is None
    assert choose_dropout_key(on, True, None) is choose_dropout_key(on, True, key) is None
    assert choose_dropout_key(on, False, key) is key
    with pytest.raises(ValueError, match="dropout_prob=0.5.*dropout_rng"):
        choose_dropout_key(on, False, None)
    with pytest.raises(TypeError):
        choose_dropout_key(on, jnp.asarray(True), key)  # pyright: ignore


def test_plain_transformations_over_a_strategy():
    q, k, v = qkv()
    m = AttentionMetadata(softmax_scale=jnp.float32(0.5), blocksize_q=8)

    def loss(strategy, q):
        return jnp.sum(strategy.dispatch(q, k, v).attention_outputs ** 2)

    strategy = Minimal(m)
    grads = jax.grad(loss)(strategy, q)
    assert isinstance(grads, Minimal) and grads.metadata.blocksize_q == 8
    eps = 1e-2
    near = [m.replace(softmax_scale=jnp.float32(0.5 + e)) for e in (eps, -eps)]
    up, down = (loss(Minimal(n), q) for n in near)
    np.testing.assert_allclose(grads.metadata.softmax_scale, (up - down) / (2 * eps), rtol=1e-2)
    jitted = jax.jit(jax.grad(loss))(strategy, q)
    np.testing.assert_allclose(
        jitted.metadata.softmax_scale, grads.metadata.softmax_scale, rtol=1e-5
    )
    filtered = eqx.filter_grad(loss)(strategy, q)
    assert same(filtered, grads)
    assert jax.tree.leaves(jax.grad(loss)(Minimal(m.replace(softmax_scale=0.5)), q)) == []
    scales = jnp.asarray([0.1, 0.5], jnp.float32)
    many = jax.vmap(lambda s: Minimal(m.replace(softmax_scale=s)))(scales)
    losses = jax.vmap(loss, (0, None))(many, q)
    np.testing.assert_allclose(losses[1], loss(strategy, q), rtol=1e-6)
    hessian = jax.hessian(loss)(strategy, q)
    assert hessian.metadata.softmax_scale.metadata.softmax_scale.shape == ()


def test_equal_strategies_do_not_retrace():
    traces = 0

    @jax.jit
    def f(strategy, *args):
        nonlocal traces
        traces += 1
        return strategy.dispatch(*args).attention_outputs

    args = qkv()
    for dtype in ("float32", jnp.float32, np.dtype("float32")):
        for scale in (0.1, 0.2):
            f(Minimal(AttentionMetadata(dtype, softmax_scale=jnp.float32(scale))), *args)
    assert traces == 1
