"""The parts of a layer beside attention: MLPs and mixtures of experts."""

import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from .spec import Mixture, Spec


ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def linear(layer: eqx.nn.Linear, x: Float[Array, "*b inputs"]) -> Float[Array, "*b outputs"]:
    """The layer along the last axis."""
    out = x @ layer.weight.T
    if layer.bias is None:
        return out
    return out + layer.bias.reshape((1,) * (x.ndim - 1) + (-1,))


def along_rows(fn: Any, x: Float[Array, "*b inputs"]) -> Float[Array, "*b outputs"]:
    """A function of one vector, along the last axis."""
    out = jax.vmap(fn)(x.reshape(-1, x.shape[-1]))
    return out.reshape(*x.shape[:-1], out.shape[-1])


def largest(x: Float[Array, "rows n"], k: int) -> Bool[Array, "rows n"]:
    """Which are the `k` largest numbers of each row."""
    return jax.nn.one_hot(jax.lax.top_k(x, k)[1], x.shape[-1], dtype=bool).any(-2)


class MLP(eqx.Module):
    """`down(act(gate(x)) * up(x))`, or `down(act(up(x)))` without a gate."""

    gate: eqx.nn.Linear | None
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    activation: str = eqx.field(static=True)

    def __init__(self, spec: Spec, hidden: int, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        make = functools.partial(eqx.nn.Linear, use_bias=spec.mlp_bias)
        self.gate = make(spec.width, hidden, key=keys[0]) if spec.gated else None
        self.up = make(spec.width, hidden, key=keys[1])
        self.down = make(hidden, spec.width, key=keys[2])
        self.activation = spec.activation

    def __call__(self, x: Float[Array, "*b width"]) -> Float[Array, "*b width"]:
        act, up = ACTIVATIONS[self.activation], linear(self.up, x)
        hidden = act(up) if self.gate is None else act(linear(self.gate, x)) * up
        return linear(self.down, hidden)


class Experts(eqx.Module):
    """A mixture of experts, computed densely: every expert sees every token, and those that are not
    chosen count 0. That is exact and simple. For speed, only those chosen would be computed.
    """

    router: eqx.nn.Linear
    correction: Float[Array, " count"] | None  # moves the choice, not the weights
    gate: Float[Array, "count width hidden"]
    up: Float[Array, "count width hidden"]
    down: Float[Array, "count hidden width"]
    biases: tuple[Float[Array, "count size"], ...] | None  # of gate, up and down
    shared: MLP | None
    mixture: Mixture = eqx.field(static=True)
    activation: str = eqx.field(static=True)

    def __init__(self, spec: Spec, key: PRNGKeyArray):
        mixture = spec.mixture
        assert mixture is not None
        keys, n, hidden = jax.random.split(key, 5), mixture.count, mixture.hidden
        make = lambda key, *sizes: jax.random.normal(key, sizes) / math.sqrt(sizes[1])
        self.router = eqx.nn.Linear(spec.width, n, use_bias=bool(mixture.clamp), key=keys[0])
        self.correction = jnp.zeros(n) if mixture.grouped else None
        self.gate = make(keys[1], n, spec.width, hidden)
        self.up = make(keys[2], n, spec.width, hidden)
        self.down = make(keys[3], n, hidden, spec.width)
        self.biases = None
        if mixture.clamp:
            self.biases = tuple(jnp.zeros((n, size)) for size in (hidden, hidden, spec.width))
        self.shared = MLP(spec, mixture.shared, keys[4]) if mixture.shared else None
        self.mixture, self.activation = mixture, spec.activation

    def weights(self, x: Float[Array, "n width"]) -> Float[Array, "n count"]:
        """How much each expert counts for each token: 0 for those that are not chosen."""
        m, logits = self.mixture, linear(self.router, x).astype(jnp.float32)
        if m.grouped is None:
            return jax.nn.softmax(jnp.where(largest(logits, m.chosen), logits, -jnp.inf))
        scores = jax.nn.sigmoid(logits)
        choice = scores if self.correction is None else scores + self.correction[None]
        groups, best = m.grouped
        by_group = choice.reshape(len(x), groups, -1)
        worth = jax.lax.top_k(by_group, 2)[0].sum(-1)
        choice = jnp.where(largest(worth, best)[..., None], by_group, -jnp.inf)
        scores = jnp.where(largest(choice.reshape(scores.shape), m.chosen), scores, 0.0)
        if m.normalised:
            scores = scores / (scores.sum(-1, keepdims=True) + 1e-20)
        return scores * m.scale

    def __call__(self, x: Float[Array, "*b width"]) -> Float[Array, "*b width"]:
        rows = x.reshape(-1, x.shape[-1])
        each = lambda x, weight: jnp.einsum("...i,eio->...eo" if x.ndim < 3 else "nei,eio->neo",
                                            x, weight)  # fmt: skip
        gate, up = each(rows, self.gate), each(rows, self.up)
        if self.biases is not None:
            gate, up = gate + self.biases[0][None], up + self.biases[1][None]
        if self.mixture.clamp is None:
            hidden = ACTIVATIONS[self.activation](gate) * up
        else:
            alpha, limit = self.mixture.clamp
            gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
            hidden = gate * jax.nn.sigmoid(alpha * gate) * (up + 1)
        out = each(hidden, self.down)
        if self.biases is not None:
            out = out + self.biases[2][None]
        out = jnp.einsum("neo,ne->no", out, self.weights(rows).astype(out.dtype)).reshape(x.shape)
        return out if self.shared is None else out + self.shared(x)
