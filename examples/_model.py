"""The model of the examples: a byte-level GPT-style transformer, and how well it predicts."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from _run import Config
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt8

from eqattn import attention, Causal
from eqattn.nn import rotary


def linear(inputs: int, outputs: int, key: PRNGKeyArray, scale: float = 1.0) -> eqx.nn.Linear:
    """A linear layer without bias. Its weights have deviation `scale / sqrt(inputs)`."""
    layer = eqx.nn.Linear(inputs, outputs, use_bias=False, key=key)
    return eqx.tree_at(lambda layer: layer.weight, layer, layer.weight * (scale * math.sqrt(3)))


class Block(eqx.Module):
    """A pre-norm layer: grouped-query attention with rotary positions, then a gated MLP."""

    attention_norm: eqx.nn.RMSNorm
    to_query: eqx.nn.Linear
    to_key: eqx.nn.Linear
    to_value: eqx.nn.Linear
    from_heads: eqx.nn.Linear
    mlp_norm: eqx.nn.RMSNorm
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    head_dim: int = eqx.field(static=True)

    def __init__(self, config: Config, key: PRNGKeyArray):
        width, hidden = config.width, 32 * math.ceil(config.width / 12)
        self.head_dim = width // config.heads
        kv_width = config.kv_heads * self.head_dim
        keys = jax.random.split(key, 7)
        residual = 1 / math.sqrt(2 * config.layers)
        self.attention_norm = eqx.nn.RMSNorm(width, use_bias=False)
        self.to_query = linear(width, width, keys[0])
        self.to_key = linear(width, kv_width, keys[1])
        self.to_value = linear(width, kv_width, keys[2])
        self.from_heads = linear(width, width, keys[3], residual)
        self.mlp_norm = eqx.nn.RMSNorm(width, use_bias=False)
        self.gate = linear(width, hidden, keys[4])
        self.up = linear(width, hidden, keys[5])
        self.down = linear(hidden, width, keys[6], residual)

    def project(
        self, x: Float[Array, "t width"], positions: Int[Array, "t"]
    ) -> tuple[Float[Array, "t h d"], Float[Array, "t k d"], Float[Array, "t k d"]]:
        """Query, key and value of each byte."""
        normed = jax.vmap(self.attention_norm)(x)
        query, key_, value = (
            jax.vmap(layer)(normed).reshape(x.shape[0], -1, self.head_dim)
            for layer in (self.to_query, self.to_key, self.to_value)
        )
        return rotary(query, positions), rotary(key_, positions), value

    def finish(
        self, x: Float[Array, "t width"], out: Float[Array, "t h d"]
    ) -> Float[Array, "t width"]:
        """What the layer makes of its input and of the output of attention."""
        x = x + jax.vmap(self.from_heads)(out.reshape(x.shape))
        normed = jax.vmap(self.mlp_norm)(x)
        hidden = jax.nn.silu(jax.vmap(self.gate)(normed)) * jax.vmap(self.up)(normed)
        return x + jax.vmap(self.down)(hidden)

    def __call__(
        self, x: Float[Array, "t width"], positions: Int[Array, "t"], strategy: Any
    ) -> Float[Array, "t width"]:
        query, key_, value = self.project(x, positions)
        out = attention(query, key_, value, strategy, mask=Causal()).attention_outputs
        return self.finish(x, out)


class LanguageModel(eqx.Module):
    """Bytes in, logits of the next byte out."""

    embedding: Float[Array, "256 width"]
    blocks: tuple[Block, ...]
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, config: Config, key: PRNGKeyArray):
        first, last, *keys = jax.random.split(key, config.layers + 2)
        self.embedding = jax.random.normal(first, (256, config.width))
        self.blocks = tuple(Block(config, key) for key in keys)
        self.norm = eqx.nn.RMSNorm(config.width, use_bias=False)
        self.head = linear(config.width, 256, last, scale=0.1)

    def __call__(
        self, tokens: UInt8[Array, "t"], strategy: Any, positions: Int[Array, "t"] | None = None
    ) -> Float[Array, "t 256"]:
        x = self.embedding[tokens]
        if positions is None:
            positions = jnp.arange(tokens.shape[0])
        for block in self.blocks:
            x = block(x, positions, strategy)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def cast(model: LanguageModel, dtype: str) -> LanguageModel:
    """The model with its parameters rounded to the dtype to compute in."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), model)


def bits_per_byte(
    model: LanguageModel, windows: UInt8[Array, "n context+1"], strategy: Any, dtype: str
) -> Float[Array, ""]:
    """The mean loss of predicting each byte of the windows, but their first, from those before."""
    model = cast(model, dtype)
    logits = jax.vmap(lambda tokens: model(tokens, strategy))(windows[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), windows[:, 1:].astype(jnp.int32)
    )
    return losses.mean() / math.log(2)
