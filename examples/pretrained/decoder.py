"""One decoder for many published families: what they differ in is a field of `Spec`.

Attention is `eqattn.nn.MultiheadAttention`, and that of DeepSeek `eqattn.nn.LatentAttention`.
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from eqattn import Causal, Segments
from eqattn.cache import KVCache, LatentKVCache, QuantizedKVCache, RingBufferCache
from eqattn.nn import LatentAttention, MultiheadAttention

from .layers import along_rows, Experts, linear, MLP
from .spec import Layer, Spec


def make_attention(spec: Spec, layer: Layer, key: PRNGKeyArray) -> Any:
    """The attention of a layer. Its projections are replaced where a family's are no `Linear`."""
    if spec.latent is not None:
        sizes = spec.latent
        return LatentAttention(
            spec.heads,
            spec.width,
            kv_lora_rank=sizes.rank,
            qk_nope_head_dim=sizes.plain_dim,
            qk_rope_head_dim=sizes.rotary_dim,
            v_head_dim=sizes.value_dim,
            q_lora_rank=sizes.query_rank,
            rotary=layer.rotary,
            softmax_scale=spec.scale,
            norm_eps=1e-6,  # whatever the config says of the other norms
            use_bias=sizes.bias,
            key=key,
        )
    size = spec.head_dim
    out = MultiheadAttention(
        spec.heads,
        spec.width,
        qk_size=size,
        vo_size=size,
        use_query_bias=spec.qkv_bias,
        use_key_bias=spec.qkv_bias,
        use_value_bias=spec.qkv_bias,
        use_output_bias=spec.output_bias,
        num_kv_heads=spec.kv_heads,
        rotary=layer.rotary,
        qk_norm="rms" if spec.qk_norm == "head" else None,
        window=None if layer.window is None else (layer.window, 0),
        softmax_scale=spec.scale,
        logits_soft_cap=spec.soft_cap,
        softmax_aux=jnp.zeros(spec.heads) if spec.sinks else None,
        key=key,
    )
    norm = lambda size: eqx.nn.RMSNorm(size, spec.eps, use_bias=False)
    if spec.qk_norm == "head":
        return eqx.tree_at(lambda m: (m.query_norm, m.key_norm), out, (norm(size), norm(size)))
    if spec.qk_norm == "width":
        made = out.query_proj, out.key_proj
        normed = [eqx.nn.Sequential([x, norm(x.out_features)]) for x in made]
        return eqx.tree_at(lambda m: (m.query_proj, m.key_proj), out, normed)
    return out


class Block(eqx.Module):
    """Attention and an MLP, each added to its input, each normalised before, after or both."""

    attention: MultiheadAttention | LatentAttention
    mlp: MLP | Experts
    before: tuple[Any, Any] | None
    after: tuple[Any, Any] | None

    def __init__(self, spec: Spec, layer: Layer, key: PRNGKeyArray):
        first, second = jax.random.split(key)
        self.attention = make_attention(spec, layer, first)
        self.mlp = Experts(spec, second) if layer.experts else MLP(spec, spec.hidden, second)
        pair = lambda: (make_norm(spec), make_norm(spec))
        self.before = pair() if spec.norms in ("before", "both") else None
        self.after = pair() if spec.norms in ("after", "both") else None

    def __call__(
        self, x: Float[Array, "*b t width"], mask: Any = "causal", **options: Any
    ) -> tuple[Any, Float[Array, "*b t width"]]:
        """The cache among the options, if there is one, and the output."""
        before, after = self.before or (None, None), self.after or (None, None)
        normed = lambda norm, x: x if norm is None else along_rows(norm, x)
        y = self.attention(normed(before[0], x), mask=mask, **options)
        cache, y = y if options.get("cache") is not None else (None, y)
        x = x + normed(after[0], y)
        return cache, x + normed(after[1], self.mlp(normed(before[1], x)))


def make_norm(spec: Spec) -> Any:
    biased = spec.norm is eqx.nn.LayerNorm
    return spec.norm(spec.width, spec.eps, use_bias=biased)


class Decoder(eqx.Module):
    """Tokens in, logits of the next token out."""

    embedding: Float[Array, "vocabulary width"]
    positions: Float[Array, "length width"] | None
    blocks: tuple[Block, ...]
    norm: Any
    head: eqx.nn.Linear | None  # None: the embedding
    embedding_scale: float = eqx.field(static=True)
    final_cap: float | None = eqx.field(static=True)

    def __init__(self, spec: Spec, key: PRNGKeyArray):
        first, second, third, *keys = jax.random.split(key, 3 + len(spec.layers))
        self.embedding = jax.random.normal(first, (spec.vocabulary, spec.width))
        self.positions = None
        if spec.learned_positions:
            self.positions = jax.random.normal(second, (spec.learned_positions, spec.width))
        self.blocks = tuple(Block(spec, *x) for x in zip(spec.layers, keys, strict=True))
        self.norm = make_norm(spec)
        self.head = None
        if not spec.tied:
            self.head = eqx.nn.Linear(spec.width, spec.vocabulary, use_bias=False, key=third)
        self.embedding_scale, self.final_cap = spec.embedding_scale, spec.final_cap

    def embed(self, tokens: Int[Array, "*b t"], at: Int[Array, "*b t"]) -> Float[Array, "*b t w"]:
        x = self.embedding[tokens]
        # Gemma rounds the factor to the dtype of the embeddings.
        x = x * jnp.asarray(self.embedding_scale, x.dtype)
        return x if self.positions is None else x + self.positions[at]

    def check_length(self, tokens: int) -> None:
        """**Raises:** `ValueError` if there are no positions for so many tokens."""
        if self.positions is not None and tokens > len(self.positions):
            raise ValueError(
                f"The model has learned {len(self.positions)} positions, and cannot take a text "
                f"of {tokens} tokens."
            )

    def logits(self, x: Float[Array, "*b width"]) -> Float[Array, "*b vocabulary"]:
        x = along_rows(self.norm, x)
        x = x @ self.embedding.T if self.head is None else linear(self.head, x)
        x = x.astype(jnp.float32)
        return x if self.final_cap is None else self.final_cap * jnp.tanh(x / self.final_cap)

    def __call__(
        self,
        tokens: Int[Array, " t"],
        positions: Int[Array, " t"] | None = None,
        segments: Int[Array, " t"] | None = None,
    ) -> Float[Array, "t vocabulary"]:
        """The logits of one sequence, or of several that are packed into one: then `segments` says
        which, and `positions` where in it each token is.
        """
        return self.logits(self.hidden(tokens, positions, segments))

    def hidden(
        self,
        tokens: Int[Array, " t"],
        positions: Int[Array, " t"] | None = None,
        segments: Int[Array, " t"] | None = None,
    ) -> Float[Array, "t width"]:
        """What the last layer makes of each token."""
        self.check_length(len(tokens))
        x = self.embed(tokens, jnp.arange(len(tokens)) if positions is None else positions)
        mask = Causal() if segments is None else Causal() & Segments(segments)
        for block in self.blocks:
            options = dict(q_positions=positions, kv_positions=positions)
            if isinstance(block.attention, LatentAttention):
                del options["kv_positions"]  # its keys are those of its queries
            _, x = block(x, mask, **options)
        return x

    def step(
        self,
        caches: Sequence[Any],
        tokens: Int[Array, "rows t"],
        counts: Int[Array, " rows"] | None = None,
    ) -> tuple[tuple[Any, ...], Float[Array, "rows vocabulary"]]:
        """Takes the first `counts` of the new tokens of each row into the caches.

        **Returns:** the caches, and the logits after the last of these tokens.
        """
        rows, t = tokens.shape
        x = self.embed(tokens, caches[0].length[:, None] + jnp.arange(t)[None])
        new = []
        for block, cache in zip(self.blocks, caches, strict=True):
            cache, x = block(x, cache=cache, counts=counts)
            new.append(cache)
        last = jnp.full(rows, t - 1) if counts is None else jnp.maximum(counts - 1, 0)
        return tuple(new), self.logits(x[jnp.arange(rows), last])


def empty_caches(
    model: Decoder, rows: int, capacity: int, piece: int, kind: str = "ring"
) -> tuple[Any, ...]:
    """A cache for each layer.

    **Arguments:**

    - `capacity`: the tokens of the longest row. `piece`: how many enter at most in one step.
    - `kind`: `"contiguous"`; `"ring"`, where layers with a window keep only what it shows; or
        `"int8"`, which is that with eight bits in the layers without a window.
    """
    dtype = model.embedding.dtype

    def empty(layer: MultiheadAttention | LatentAttention) -> Any:
        if isinstance(layer, LatentAttention):
            sizes = 1, layer.qk_rope_head_dim, layer.kv_lora_rank, dtype
            return LatentKVCache(every_token(sizes))
        sizes = layer.num_kv_heads, layer.qk_size, layer.vo_size, dtype
        if layer.window is not None and kind != "contiguous":
            held = min(layer.window[0] + piece, capacity + piece)
            return RingBufferCache.empty(rows, held, *sizes)
        return every_token(sizes)

    def every_token(sizes: tuple[Any, ...]) -> Any:
        if kind == "int8":
            return QuantizedKVCache.empty(rows, capacity, *sizes)
        return KVCache.empty(rows, capacity, *sizes)

    return tuple(empty(block.attention) for block in model.blocks)
