"""`LatentAttention`, the layer of DeepSeek's models, whose cache holds latents."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from .._calls.attention import attention
from .._config.metadata import AttentionMetadata
from .._misc import (
    accumulation_dtype,
    as_array,
    as_constant,
    as_flag,
    as_number,
    as_size,
    with_constants,
    without_defaults,
)
from .._problem.problem import as_scores
from .._problem.storage import AbstractStored, as_stored, LatentKV
from ..cache import LatentKVCache
from ..scores._base import AbstractScore, Bias
from ..strategies import AttentionImpl
from ._cached_call import appended, as_rows
from ._inputs import (
    as_layer_mask,
    check_dtype,
    check_name,
    check_strategy,
    configured,
    input_positions,
    linear,
    normed,
    project,
    split_key,
    weight_and_bias,
)
from ._rotary import check_rotary, Rotary


_Form = Literal["expanded", "absorbed"] | None


@with_constants("softmax_scale")
class LatentAttention(eqx.Module):
    r"""Multi-head latent attention (MLA). Keys and values of all heads are projections of one
    latent vector per token, and a cache holds only that vector.

    With `c` the normalised latent of a token, `[kv_lora_rank]`, and `r` the rotary part of its key,
    which all heads share,

        key of head i = [W_i c, r]        value of head i = V_i c

    and a query is `[q, p]`, of which `p` has rotary positions. There are two forms, which compute
    the same function:

    - `"expanded"` makes keys and values of every head. It takes the fewest operations where there
        are about as many queries as keys, as in training.
    - `"absorbed"` moves the projections to the other side of the products. By
        `q . (W_i c) = (W_i^T q) . c` the query is projected, and by
        `sum_j p_j V_i c_j = V_i (sum_j p_j c_j)` the output. Then it is attention with one key
        head, `[c, r]`, whose values are `c`. It reads the fewest bytes, as a step of decoding
        needs.

    It takes one sequence, `[t, hidden_size]`; use `jax.vmap` for a batch. With `cache=` it returns
    `(cache, out)`, and takes one sequence or all rows of the cache, `[b, t, hidden_size]`.

    Fields have the names of DeepSeek's published code, with two exceptions. `kv_a_proj` is called
    `kv_a_proj_with_mqa` there. Their `kv_b_proj` is two projections here, as the absorbed form
    multiplies with each alone and would otherwise copy both:

        both = kv_b_proj.weight.reshape(num_heads, qk_nope_head_dim + v_head_dim, kv_lora_rank)
        k_b, v_b = jnp.split(both, [qk_nope_head_dim], 1)  # each .reshape(-1, kv_lora_rank)

    A projection may be any module that takes a vector, such as an adapter. The absorbed form needs
    the weight of `k_b_proj` and `v_b_proj`. If one is not an `eqx.nn.Linear` itself, each call
    first multiplies it out, which costs as much as `kv_lora_rank` tokens. So merge an adapter into
    its weight before many steps of decoding. A module that is not affine raises there.
    """

    __pdoc__ = without_defaults

    q_proj: eqx.nn.Linear | None
    q_a_proj: eqx.nn.Linear | None
    q_a_norm: eqx.nn.RMSNorm | None
    q_b_proj: eqx.nn.Linear | None
    kv_a_proj: eqx.nn.Linear
    kv_a_norm: eqx.nn.RMSNorm
    k_b_proj: eqx.nn.Linear
    v_b_proj: eqx.nn.Linear
    o_proj: eqx.nn.Linear
    rotary: Rotary | None
    softmax_scale: float | Float[Array, ""] | None = eqx.field(converter=as_constant)
    strategy: AttentionImpl | None

    num_heads: int = eqx.field(static=True)
    hidden_size: int = eqx.field(static=True)
    q_lora_rank: int | None = eqx.field(static=True)
    kv_lora_rank: int = eqx.field(static=True)
    qk_nope_head_dim: int = eqx.field(static=True)
    qk_rope_head_dim: int = eqx.field(static=True)
    v_head_dim: int = eqx.field(static=True)

    def __init__(  # noqa: PLR0913 (one argument for each option of the layer)
        self,
        num_heads: int,
        hidden_size: int,
        *,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None = None,
        rotary: Rotary | None = None,
        softmax_scale: Any = None,
        norm_eps: float = 1e-6,
        use_bias: bool = False,
        dtype: Any = None,
        strategy: AttentionImpl | None = None,
        key: PRNGKeyArray,
    ):
        r"""**Arguments:** those that DeepSeek's configurations have bear the same names.

        - `num_heads`: how many heads there are.
        - `hidden_size`: the channels of input and output.
        - `kv_lora_rank`: the size of a latent.
        - `qk_nope_head_dim`, `qk_rope_head_dim`: the features of a head's query and key without
            positions, and with.
        - `v_head_dim`: the features of a head's value.
        - `q_lora_rank`: the size of the latent that queries are made of; None makes them of the
            input.
        - `rotary`: a [`Rotary`][eqattn.nn.Rotary] that turns the parts with positions. That of
            DeepSeek's models is `Rotary(theta, interleaved=True)`.
        - `softmax_scale`: the factor of the logits, by default
            `1 / sqrt(qk_nope_head_dim + qk_rope_head_dim)`. A number is a constant, an array is
            learned. Models with YaRN have `(0.1 m log(factor) + 1)^2` times that, where `m` is
            their `mscale_all_dim`.
        - `norm_eps`: what the RMS norms of the latents add to the mean square.
        - `use_bias`: whether the projections of the input and of the output have a bias.
        - `dtype`: the dtype of all parameters, by default float32, or float64 in 64-bit mode.
        - `strategy`: where and in which order pairs are visited, by default `Blockwise()`, and with
            a cache `Ragged()`.
        - `key`: the random key of the initialisation.

        **Raises:** `ValueError` or `TypeError` naming the argument and the remedy.

        ??? cite "Reference"

            DeepSeek-AI, *DeepSeek-V2*, 2024 (arXiv:2405.04434), section 2.1, and *DeepSeek-V3*,
            2024 (arXiv:2412.19437), section 2.1.1.
        """
        self.num_heads = as_size(num_heads, "num_heads", 1)
        self.hidden_size = as_size(hidden_size, "hidden_size", 1)
        self.q_lora_rank = None if q_lora_rank is None else as_size(q_lora_rank, "q_lora_rank", 1)
        self.kv_lora_rank = as_size(kv_lora_rank, "kv_lora_rank", 1)
        self.qk_nope_head_dim = as_size(qk_nope_head_dim, "qk_nope_head_dim", 1)
        self.qk_rope_head_dim = as_size(qk_rope_head_dim, "qk_rope_head_dim", 0)
        self.v_head_dim = as_size(v_head_dim, "v_head_dim", 1)
        use_bias, eps = as_flag(use_bias, "use_bias"), as_number(norm_eps, "norm_eps")
        check_dtype(dtype)
        check_rotary(rotary, qk_rope_head_dim)
        check_strategy(strategy)
        self.rotary, self.strategy = rotary, strategy
        self.softmax_scale = AttentionMetadata(softmax_scale=softmax_scale).softmax_scale

        # In the names of the paper, q_a is W^DQ, k_b is W^UK, v_b is W^UV and o is W^O. Two
        # projections join two of the paper's: `q_b` has W^UQ and W^QR, and `kv_a` has W^DKV and
        # W^KR. In `q_b` the features of a head without positions come first, and in `kv_a` the
        # latent.
        keys = iter(split_key(key, 7))
        make = lambda size, features, bias=False: eqx.nn.Linear(
            size, features, use_bias=bias, dtype=dtype, key=next(keys)
        )
        norm = lambda size: eqx.nn.RMSNorm(size, eps=eps, use_bias=False, dtype=dtype)
        queries = num_heads * (qk_nope_head_dim + qk_rope_head_dim)
        self.q_proj = self.q_a_proj = self.q_a_norm = self.q_b_proj = None
        if q_lora_rank is None:
            self.q_proj = make(hidden_size, queries)
        else:
            self.q_a_proj = make(hidden_size, q_lora_rank, use_bias)
            self.q_a_norm = norm(q_lora_rank)
            self.q_b_proj = make(q_lora_rank, queries)
        self.kv_a_proj = make(hidden_size, kv_lora_rank + qk_rope_head_dim, use_bias)
        self.kv_a_norm = norm(kv_lora_rank)
        self.k_b_proj = make(kv_lora_rank, num_heads * qk_nope_head_dim)
        self.v_b_proj = make(kv_lora_rank, num_heads * v_head_dim)
        self.o_proj = make(num_heads * v_head_dim, hidden_size, use_bias)

    @overload
    def __call__(
        self,
        x: Float[Array, "t hidden_size"],
        mask: Any = None,
        *,
        form: _Form = None,
        bias: Float[Array, "..."] | None = None,
        score: Any = None,
        q_positions: Any = None,
        cache: None = None,
    ) -> Float[Array, "t hidden_size"]: ...

    @overload
    def __call__(
        self,
        x: Float[Array, "*b t hidden_size"],
        mask: Any = None,
        *,
        form: _Form = None,
        bias: Float[Array, "..."] | None = None,
        score: Any = None,
        q_positions: Any = None,
        cache: LatentKVCache,
        counts: int | Sequence[int] | Int[Array, "*b"] | None = None,
    ) -> tuple[LatentKVCache, Float[Array, "*b t hidden_size"]]: ...

    @overload
    def __call__(self, *args: Any, return_max_logits: Literal[True], **kwargs: Any) -> Any: ...

    @jax.named_scope("eqattn.nn.LatentAttention")
    def __call__(  # noqa: PLR0913 (one argument for each option of the layer)
        self,
        x: Float[Array, "*b t hidden_size"],
        mask: Any = None,
        *,
        form: Any = None,
        bias: Float[Array, "..."] | None = None,
        score: AbstractScore | tuple[AbstractScore, ...] | None = None,
        q_positions: Any = None,
        cache: Any = None,
        counts: Any = None,
        return_max_logits: Any = False,
    ) -> Any:
        r"""**Arguments:**

        - `x`: the input, `[t, hidden_size]`.
        - `mask`, `bias`, `score`: as for [`eqattn.nn.MultiheadAttention`][].
        - `form`: `"expanded"` or `"absorbed"`; None is the latter with a cache, else the former.
        - `q_positions`: the positions of the tokens, integers `[t]`, by default as for
            `MultiheadAttention`. Those of new keys in a cache are always `cache.length` and on.
            With a `Rotary` of `sections` they are the coordinates of the tokens, `[t, axes]`, new
            keys included. Masks and scores then have the default.
        - `cache`: an [`eqattn.cache.LatentKVCache`][] of `rank=kv_lora_rank` and
            `rotary_dim=qk_rope_head_dim`, to which the tokens of `x` are appended.
        - `counts`: how many of them, from the first, the cache takes; None for all.
        - `return_max_logits`: as for `MultiheadAttention`.

        **Returns:** `[t, hidden_size]`, with a cache `(cache, [t, hidden_size])`. With
        `return_max_logits`, a pair of output and logits stands in place of the output.

        **Raises:** `ValueError` or `TypeError` at trace time, naming the shapes and the remedy.
        """
        check_name("form", form, ("expanded", "absorbed"))
        x = as_array(x, "x", 2)
        if cache is None and counts is not None:
            raise ValueError("counts says what a cache takes: pass cache= too.")
        if x.ndim > 2 + (cache is not None):
            raise ValueError(
                f"x must be one sequence [tokens, hidden_size], got shape {x.shape}; use "
                "jax.vmap(layer) for a batch."
            )
        cache, (x,), (q_positions, counts), result = as_rows(cache, (x,), (q_positions, counts))
        if not isinstance(cache, LatentKVCache | None):
            raise TypeError(
                f"cache must be a LatentKVCache, got {type(cache).__name__}: make it by "
                f"LatentKVCache.empty(batch, capacity, {self.kv_lora_rank}, "
                f"{self.qk_rope_head_dim}), or of one with a single head, LatentKVCache(cache)."
            )
        s = x.shape[1] if cache is None else cache.key.shape[1]
        mask = as_layer_mask(mask, None, self.num_heads, x.shape[1], s)
        # A cache counts its new keys, but only the caller knows their coordinates.
        coordinates = self.rotary is not None and self.rotary.sections is not None
        given = q_positions, q_positions if cache is None or coordinates else None
        at, (q_positions, kv_positions) = input_positions(
            self.rotary, self.strategy, cache, mask, (x.shape[1], x.shape[1]), given, False
        )
        query, rest, latent = self._projected(x, at)
        # Keys `[c, r]`, whose first features `c` are the values of the absorbed form.
        keys, q_offset = LatentKV(latent, rest), None
        if cache is not None:
            # The queries follow what is stored, so the length is read before it grows.
            q_offset = cache.length if q_positions is None else None
            cache, mask = appended(cache, rest, latent, (q_positions, counts), mask, self.num_heads)
            keys, kv_positions = cache.key, cache.positions
        strategy = configured(self.strategy, cache is not None, softmax_scale=self._scale())
        absorbed = form == "absorbed" or (form is None and cache is not None)
        value_weight, value_bias, scores = None, None, as_scores(score)
        if absorbed:
            stored = getattr(strategy, "reads_stored", False)
            heads, offset = self._absorbed(query, keys, stored)
            value_weight, value_bias = self._absorbable("v_b_proj", query.dtype)
            # A softmax does not see what is added to all logits of a query.
            if offset is not None and (scores or return_max_logits):
                scores = (Bias(offset), *scores)
        else:
            heads = self._expanded(query, keys)
        found = attention(
            *heads,
            strategy,
            mask=mask,
            bias=bias,
            score=scores,
            q_offset=q_offset,
            q_positions=q_positions,
            kv_positions=kv_positions,
            return_logsumexp=value_bias is not None,
            return_max_logits=return_max_logits,
        )
        out = found.attention_outputs.astype(query.dtype)
        if value_weight is not None:
            # Attention gave `sum_j p_j c_j` for each head i, where V_i is `weight[i]`, [v, r].
            out = jnp.einsum("...hr,hvr->...hv", out, value_weight)
        if value_bias is not None:
            # The p_j add up to 1, or to 0 for a query that sees no key.
            seen = found.logsumexp[..., None] != -jnp.inf
            out = out + jnp.where(seen, value_bias.astype(out.dtype), 0)
        out = out.reshape(*out.shape[:-2], self.num_heads * self.v_head_dim)
        out = linear(self.o_proj, out)
        return result(cache, (out, found.max_logits) if return_max_logits else out)

    def _scale(self) -> Any:
        """The scale of the logits. Both forms have the same logits. So it is by default that of the
        expanded keys, although absorbed ones have `kv_lora_rank + qk_rope_head_dim` features.
        """
        if self.softmax_scale is not None:
            return self.softmax_scale
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5

    def _absorbable(self, name: str, dtype: Any) -> tuple[Array, Array | None]:
        """The weights `[h, features, r]` and biases `[h, features]` of a projection of latents."""
        weight, bias = weight_and_bias(getattr(self, name), self.kv_lora_rank, dtype)
        bias = None if bias is None else bias.reshape(self.num_heads, -1)
        return weight.reshape(self.num_heads, -1, self.kv_lora_rank), bias

    def _absorbed(
        self, query: Array, keys: AbstractStored, stored: bool
    ) -> tuple[tuple[Any, Any, Any], Array | None]:
        """Queries, keys and values of the absorbed form, which has one key head for all queries;
        and what is to be added to all logits of a query `[b, h, t, 1]`, or None.

        **Arguments:**

        - `query`: the queries, `[b, t, h, n + p]`, the part with positions last.
        - `keys`: the latents and the rotary parts, `[b, s, 1, r + p]`.
        - `stored`: whether the strategy reads them where they are stored.
        """
        inner, turning = jnp.split(query, [self.qk_nope_head_dim], -1)
        weight, bias = self._absorbable("k_b_proj", query.dtype)
        # A key of head i is `[W_i c + a_i, r]`, and `q . a_i` is the same for all keys.
        offset = None
        if bias is not None:
            wide = accumulation_dtype(query.dtype)
            offset = jnp.einsum("...thn,hn->...ht", inner.astype(wide), bias.astype(wide))
            offset = offset[..., None] * jnp.asarray(self._scale(), wide)
        # For each head i, `q . (W_i c)` is `(W_i^T q) . c`, where W_i is `weight[i]`, [n, r]. The
        # rotary part stays as it is, so a logit is `[W_i^T q, p] . [c, r] = q . (W_i c) + p . r`.
        inner = jnp.einsum("...hn,hnr->...hr", inner, weight)
        query = jnp.concatenate([inner, turning], -1)
        if stored:
            return (query, keys, keys.c_kv), offset
        heads = query, keys.materialise(), as_stored(keys.c_kv).materialise()
        return heads, offset

    def _expanded(self, query: Array, keys: AbstractStored) -> tuple[Any, Any, Any]:
        """Queries, keys and values of the expanded form, whose heads are made here."""
        latent, rest = jnp.split(keys.materialise()[..., 0, :], [self.kv_lora_rank], -1)
        key = project(self.k_b_proj, latent, self.num_heads, self.qk_nope_head_dim)
        # All heads share the rotary part, which becomes the end of each head's key. Added to zeros,
        # it is sharded over heads as the keys are, also where the mesh axes are explicit.
        rest = rest[..., None, :] + jnp.zeros_like(key[..., :1], rest.dtype)
        value = project(self.v_b_proj, latent, self.num_heads, self.v_head_dim)
        return query, jnp.concatenate([key, rest], -1), value

    def _projected(self, x: Array, positions: tuple[Any, Any]) -> tuple[Array, ...]:
        """Projects the input to queries `[b, t, h, n + p]`, rotary parts of keys `[b, t, 1, p]` and
        latents `[b, t, 1, r]`, at the positions of queries and keys.
        """
        size = self.qk_nope_head_dim + self.qk_rope_head_dim
        if self.q_proj is None:
            latent = normed(self.q_a_norm, linear(self.q_a_proj, x))
            query = project(self.q_b_proj, latent, self.num_heads, size)
        else:
            query = project(self.q_proj, x, self.num_heads, size)
        latent, rest = jnp.split(linear(self.kv_a_proj, x)[..., None, :], [self.kv_lora_rank], -1)
        # Only the latent is normalised, as in DeepSeek's code. A cache holds it normalised.
        latent = normed(self.kv_a_norm, latent)
        if self.rotary is None:
            return query, rest, latent
        # Keys are turned before they are stored, as their positions do not change later. A rotation
        # of W_i c would stand between W_i and the query and differ for each key, so that W_i could
        # not be absorbed. So the rotary features are separate (DeepSeek-V2, section 2.1.3).
        inner, turning = jnp.split(query, [self.qk_nope_head_dim], -1)
        query = jnp.concatenate([inner, self.rotary(turning, positions[0])], -1)
        return query, self.rotary(rest, positions[1]), latent
