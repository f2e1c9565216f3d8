"""Projections of latents that are not a plain `Linear`: adapters, subclasses and biases. What both
forms of `LatentAttention` compute is judged by a plain formula of the keys and values of all heads.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqattn import DenseMask
from eqattn.cache import LatentKVCache
from eqattn.nn import LatentAttention
from eqattn.scores import SoftCap


T, HEADS, HIDDEN, RANK, NOPE, ROPE, VALUE = 7, 3, 10, 8, 6, 4, 5
SIZES = dict(kv_lora_rank=RANK, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=VALUE)
CAP = 2.0


class Wrapped(eqx.Module):
    base: eqx.nn.Linear
    down: jax.Array
    up: jax.Array

    def __call__(self, x):
        return self.base(x) + self.up @ (self.down @ x)


class Derived(eqx.nn.Linear):
    """It keeps the attributes of the `Linear` whose outputs it changes."""

    down: jax.Array
    up: jax.Array

    def __init__(self, base, down, up):
        for name in base.__dataclass_fields__:
            object.__setattr__(self, name, getattr(base, name))
        self.down, self.up = down, up

    def __call__(self, x, *, key=None):
        return super().__call__(x) + self.up @ (self.down @ x)


def plain(base, down, up):
    return base


KINDS = {"linear": plain, "wrapper": Wrapped, "subclass": Derived}


def made(kind, bias):
    """A layer whose projections of latents are of this kind, and their weights and biases."""
    rng = np.random.default_rng(0)
    layer = LatentAttention(HEADS, HIDDEN, **SIZES, dtype=jnp.float64, key=jax.random.key(0))
    affine = {}
    for name in ("k_b_proj", "v_b_proj"):
        size = getattr(layer, name).out_features
        weight, down, up = (rng.normal(size=s) for s in ((size, RANK), (2, RANK), (size, 2)))
        offset = rng.normal(size=size) if bias else None
        base = eqx.nn.Linear(RANK, size, use_bias=bias, dtype=jnp.float64, key=jax.random.key(1))
        base = eqx.tree_at(lambda m: m.weight, base, jnp.asarray(weight))
        if bias:
            base = eqx.tree_at(lambda m: m.bias, base, jnp.asarray(offset))
        layer = eqx.tree_at(
            lambda m: getattr(m, name), layer, kind(base, jnp.asarray(down), jnp.asarray(up))
        )
        whole = weight if kind is plain else weight + up @ down
        affine[name] = whole, offset if bias else np.zeros(size)
    return layer, affine


def formula(xp, layer, affine, x, visible, cap=None):
    """Output and largest logits of the equations of DeepSeek-V3's report, without rotation."""
    latent, rest = xp.split(x @ layer.kv_a_proj.weight.T, [RANK], -1)
    latent = latent / xp.sqrt((latent * latent).mean(-1, keepdims=True) + 1e-6)
    latent = latent * layer.kv_a_norm.weight
    q = (x @ layer.q_proj.weight.T).reshape(T, HEADS, -1)
    k, v = (
        (latent @ affine[name][0].T + affine[name][1]).reshape(T, HEADS, -1)
        for name in ("k_b_proj", "v_b_proj")
    )
    k = xp.concatenate([k, xp.repeat(rest[:, None], HEADS, 1)], -1)
    logits = xp.einsum("thd,shd->hts", q, k) / np.sqrt(NOPE + ROPE)
    logits = logits if cap is None else cap * xp.tanh(logits / cap)
    top = xp.where(visible, logits, -np.inf).max(-1)
    p = xp.where(visible, xp.exp(logits - xp.where(top == -np.inf, 0, top)[..., None]), 0)
    total = p.sum(-1, keepdims=True)
    p = p / xp.where(total == 0, 1, total)
    out = xp.einsum("hts,shv->thv", p, v).reshape(T, -1) @ layer.o_proj.weight.T
    return out, top.T


def with_arrays_of_numpy(layer):
    return jax.tree.map(lambda x: np.asarray(x) if eqx.is_array(x) else x, layer)


def steps(layer, x, **kw):
    cache, parts = LatentKVCache.empty(1, 16, RANK, ROPE, jnp.float64), []
    for part in (x[:3], x[3:]):
        cache, out = layer(part, "causal", cache=cache, **kw)
        parts.append(out)
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)


def inputs():
    return jnp.asarray(np.random.default_rng(3).normal(size=(T, HIDDEN)))


CASES = [(k, b) for k in KINDS for b in (False, True)]


@pytest.mark.parametrize("kind, bias", [("linear", True), ("wrapper", False), ("subclass", True)])
def test_values_and_largest_logits(kind, bias, x64):
    """A soft cap sees what the bias of a key adds to all logits of a query."""
    layer, affine = made(KINDS[kind], bias)
    x = inputs()
    own = with_arrays_of_numpy(layer)
    want = formula(np, own, affine, np.asarray(x), np.tri(T, dtype=bool), CAP)
    call = dict(score=SoftCap(CAP), return_max_logits=True)
    found = [eqx.filter_jit(steps)(layer, x, **call)]
    for form in ("absorbed", "expanded"):
        found.append(eqx.filter_jit(layer)(x, "causal", form=form, **call))
    for got in found:
        np.testing.assert_allclose(got[0], want[0], rtol=0, atol=1e-12)
        np.testing.assert_allclose(got[1], want[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind, bias", [("subclass", True)])
def test_a_query_that_sees_no_key_has_no_bias_of_the_values(kind, bias, x64):
    layer, affine = made(KINDS[kind], bias)
    visible = np.tri(T, dtype=bool)
    visible[2] = False
    x = inputs()
    want, _ = formula(np, with_arrays_of_numpy(layer), affine, np.asarray(x), visible)
    got = layer(x, DenseMask(jnp.asarray(visible)), form="absorbed")
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["wrapper"])
def test_gradients_of_an_adapter(kind, x64):
    layer, _ = made(KINDS[kind], True)
    x, ct = inputs(), jnp.asarray(np.random.default_rng(4).normal(size=(T, HIDDEN)))

    def of_formula(layer, x):
        affine = {}
        for name in ("k_b_proj", "v_b_proj"):
            proj = getattr(layer, name)
            base = proj.base if kind == "wrapper" else proj
            affine[name] = base.weight + proj.up @ proj.down, base.bias[None]
        return (formula(jnp, layer, affine, x, np.tri(T, dtype=bool))[0] * ct).sum()

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        want = jax.jit(jax.grad(of_formula, (0, 1)))(layer, x)
    got = jax.jit(
        jax.grad(lambda layer, x: (layer(x, "causal", form="absorbed") * ct).sum(), (0, 1))
    )(layer, x)
    wanted, found = jax.tree.leaves(want), jax.tree.leaves(got)
    assert max(abs(g).max() for g in jax.tree.leaves(want[0].v_b_proj)) > 0.1
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-11)


class Curved(eqx.Module):
    base: eqx.nn.Linear

    def __call__(self, x):
        return jax.nn.silu(self.base(x))


@pytest.mark.parametrize("name", ["k_b_proj", "v_b_proj"])
def test_a_projection_that_is_not_affine_raises(name, x64):
    layer, _ = made(plain, False)
    layer = eqx.tree_at(lambda m: getattr(m, name), layer, Curved(getattr(layer, name)))
    layer(inputs(), "causal")
    for run in (lambda: layer(inputs(), form="absorbed"), lambda: steps(layer, inputs())):
        with pytest.raises(ValueError, match='Curved .* not affine .*form="expanded"'):
            run()
    whole = steps(layer, inputs(), form="expanded")
    np.testing.assert_allclose(whole, layer(inputs(), "causal"), rtol=0, atol=1e-12)
