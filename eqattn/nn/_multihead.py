"""`MultiheadAttention`, a layer: projections, attention, and a projection of the output."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from .._calls.attention import attention
from .._config.metadata import AttentionMetadata
from .._misc import as_array, as_constant, with_constants, without_defaults
from .._problem.problem import as_scores, as_sinks
from ..scores._base import AbstractScore
from ..strategies import AttentionImpl
from ._cached_call import appended, as_rows, Cache, new_keys
from ._dropout import Dropout
from ._inputs import (
    as_kv_heads,
    as_layer_mask,
    as_window,
    check_dropout,
    check_heads,
    check_name,
    check_parameters,
    check_sequences,
    check_strategy,
    checked_sizes,
    configured,
    head_norm,
    input_positions,
    linear,
    normed,
    of_one_dtype,
    processed,
    ProcessHeads,
    project,
    split_key,
)
from ._rotary import check_rotary, Rotary


@with_constants("softmax_scale", "logits_soft_cap")
class MultiheadAttention(eqx.Module):
    r"""A drop-in for `eqx.nn.MultiheadAttention`, in memory linear in the sequence.

    Arguments, initialisation, field names, leaves and results are Equinox's, so changing an import
    keeps models, checkpoints and optimiser states. Two results differ. A query that sees no key
    gives the projection of 0, where Equinox averages all values. Dropout has the same distribution
    but other bits.

    It takes one sequence, `[t, query_size]`; use `jax.vmap` for a batch. Its leaves are arrays
    and, as in Equinox, the two numbers of `dropout`, so plain `jax.jit` and `jax.grad` work over
    any model that has it. With `dropout_p > 0` they do so if the call says `inference=True`;
    else use `eqx.filter_jit` and `eqx.filter_grad`. With `cache=` it returns `(cache, out)`.

    The layer says what is computed, and the strategy says how. So a strategy whose metadata has a
    scale, soft cap, sinks or dropout raises.

    These steps follow each other: projections; `qk_norm`; `rotary`; `process_heads`;
    `softmax_scale`, `logits_soft_cap`, bias and scores; masks; softmax with `softmax_aux`; dropout;
    `gating`; the projection of the output.
    """

    __pdoc__ = without_defaults

    query_proj: eqx.nn.Linear
    key_proj: eqx.nn.Linear
    value_proj: eqx.nn.Linear
    output_proj: eqx.nn.Linear
    dropout: Dropout
    # These leaves are None by default. They come after Equinox's, so that checkpoints agree.
    query_norm: eqx.nn.RMSNorm | eqx.nn.LayerNorm | None
    key_norm: eqx.nn.RMSNorm | eqx.nn.LayerNorm | None
    gate_proj: eqx.nn.Linear | None
    rotary: Rotary | None
    softmax_scale: float | Float[Array, ""] | None = eqx.field(converter=as_constant)
    logits_soft_cap: float | Float[Array, ""] | None = eqx.field(converter=as_constant)
    softmax_aux: Float[Array, "..."] | None
    score: AbstractScore | tuple[AbstractScore, ...] | None
    strategy: AttentionImpl | None

    num_heads: int = eqx.field(static=True)
    query_size: int = eqx.field(static=True)
    key_size: int = eqx.field(static=True)
    value_size: int = eqx.field(static=True)
    output_size: int = eqx.field(static=True)
    qk_size: int = eqx.field(static=True)
    vo_size: int = eqx.field(static=True)
    use_query_bias: bool = eqx.field(static=True)
    use_key_bias: bool = eqx.field(static=True)
    use_value_bias: bool = eqx.field(static=True)
    use_output_bias: bool = eqx.field(static=True)
    num_kv_heads: int = eqx.field(static=True)
    window: tuple[int | None, int | None] | None = eqx.field(static=True)

    def __init__(  # noqa: PLR0913 (one argument for each option of the layer)
        self,
        num_heads: int,
        query_size: int,
        key_size: int | None = None,
        value_size: int | None = None,
        output_size: int | None = None,
        qk_size: int | None = None,
        vo_size: int | None = None,
        use_query_bias: bool = False,
        use_key_bias: bool = False,
        use_value_bias: bool = False,
        use_output_bias: bool = False,
        dropout_p: float = 0.0,
        inference: bool = False,
        dtype: Any = None,
        *,
        num_kv_heads: int | None = None,
        strategy: AttentionImpl | None = None,
        rotary: Rotary | None = None,
        qk_norm: Literal["rms", "layer"] | None = None,
        gating: Literal["elementwise", "headwise"] | None = None,
        window: int | tuple[int | None, int | None] | None = None,
        softmax_scale: Any = None,
        logits_soft_cap: Any = None,
        softmax_aux: Any = None,
        score: AbstractScore | Sequence[AbstractScore] | None = None,
        key: PRNGKeyArray,
    ):
        r"""**Arguments:** these are Equinox's, by position or name:

        - `num_heads`: how many heads the query has.
        - `query_size`, `key_size`, `value_size`: the channels of the inputs. The latter two are
            `query_size` by default.
        - `output_size`: the channels of the output, by default `query_size`.
        - `qk_size`, `vo_size`: the channels per head of query and key, and of the value. The
            default is `query_size // num_heads`.
        - `use_query_bias`, `use_key_bias`, `use_value_bias`, `use_output_bias`: whether that
            projection has a bias.
        - `dropout_p`: the probability that an attention weight is dropped, in `[0, 1)`.
        - `inference`: whether dropout is off. `eqx.nn.inference_mode` changes it, and a call may
            override it.
        - `dtype`: the dtype of all parameters, by default float32, or float64 in 64-bit mode.
        - `key`: the random key of the initialisation, keyword-only.

        These are keyword-only:

        - `num_kv_heads`: how many heads key and value have: a divisor of `num_heads`, its default.
        - `strategy`: where and in which order pairs are visited, by default `Blockwise()`. Its
            output is rounded to its metadata's `runtime_dtype` if that is given, then cast to the
            dtype of the projected value.
        - `rotary`: a [`Rotary`][eqattn.nn.Rotary] that turns queries and keys.
        - `qk_norm`: `"rms"` or `"layer"`, a normalisation over the features of each query and key
            head. Both have a learned scale and no bias.
        - `gating`: whether the output of attention is multiplied by the sigmoid of a projection of
            the query: `"elementwise"`, or by one factor per head, `"headwise"`.
        - `window`: `(left, right)`, both inclusive, None for unbounded; an int for both. It is
            combined with the mask of a call.
        - `softmax_scale`: the factor of the logits, by default `1 / sqrt(qk_size)`.
        - `logits_soft_cap`: `c` in `c * tanh(logit / c)`.
        - `softmax_aux`: sinks, `[num_heads]`, `[num_heads, n]` or `[1, n]`.
        - `score`: modules of `eqattn.scores`, such as `ALiBi`. Their arrays are learned.

        A number for `softmax_scale` or `logits_soft_cap` is a static constant, an array is learned.

        **Raises:** `ValueError` or `TypeError` naming the argument and the remedy.

        ??? cite "Reference"

            Vaswani et al., *Attention is all you need*, 2017 (arXiv:1706.03762). `num_kv_heads`:
            Ainslie et al., *GQA*, 2023 (arXiv:2305.13245). `qk_norm`: Henry et al., *Query-key
            normalization for transformers*, 2020 (arXiv:2010.04245); Dehghani et al., *Scaling
            vision transformers to 22 billion parameters*, 2023 (arXiv:2302.05442). `gating`: Qiu et
            al., *Gated attention for large language models*, 2025 (arXiv:2505.06708).
        """
        self.num_heads, self.query_size = checked_sizes(num_heads=num_heads, query_size=query_size)
        sizes = checked_sizes(key_size=key_size, value_size=value_size, output_size=output_size)
        sizes = (int(self.query_size if x is None else x) for x in sizes)
        self.key_size, self.value_size, self.output_size = sizes
        sizes = checked_sizes(qk_size=qk_size, vo_size=vo_size)
        check_parameters(dtype, use_query_bias, use_key_bias, use_value_bias, use_output_bias)
        check_heads(self.num_heads, self.query_size, None in sizes)
        sizes = (self.query_size // self.num_heads if x is None else x for x in sizes)
        self.qk_size, self.vo_size = sizes
        self.num_kv_heads = as_kv_heads(num_kv_heads, self.num_heads)
        self.use_query_bias, self.use_key_bias = use_query_bias, use_key_bias
        self.use_value_bias, self.use_output_bias = use_value_bias, use_output_bias
        check_dropout(dropout_p)
        check_name("qk_norm", qk_norm, ("rms", "layer"))
        check_name("gating", gating, ("elementwise", "headwise"))
        self._make_parameters(dtype, qk_norm, gating, key)
        self.dropout = Dropout(dropout_p, inference)
        check_rotary(rotary, self.qk_size)
        self.rotary = rotary
        checked = AttentionMetadata(
            softmax_scale=softmax_scale, logits_soft_cap=logits_soft_cap, softmax_aux=softmax_aux
        )
        as_sinks(checked.softmax_aux, self.num_heads)
        self.softmax_scale = checked.softmax_scale
        self.logits_soft_cap = checked.logits_soft_cap
        self.softmax_aux = checked.softmax_aux
        scores = as_scores(score)
        self.score = scores if isinstance(score, Sequence) else score
        check_strategy(strategy)
        self.strategy, self.window = strategy, as_window(window)

    def _make_parameters(self, dtype: Any, qk_norm: Any, gating: Any, key: PRNGKeyArray) -> None:
        """Makes projections and norms, for the sizes that the layer has by now."""
        # Equinox splits the key in four, too. A split in five would give other keys than its four,
        # so the key of the gate is made in another way.
        keys = split_key(key, 4)
        make = lambda i, size, features, bias: eqx.nn.Linear(
            size, features, use_bias=bias, dtype=dtype, key=keys[i]
        )
        heads, kv_heads, qk_size, vo_size = (
            self.num_heads, self.num_kv_heads, self.qk_size, self.vo_size
        )  # fmt: skip
        self.query_proj = make(0, self.query_size, heads * qk_size, self.use_query_bias)
        self.key_proj = make(1, self.key_size, kv_heads * qk_size, self.use_key_bias)
        self.value_proj = make(2, self.value_size, kv_heads * vo_size, self.use_value_bias)
        self.output_proj = make(3, heads * vo_size, self.output_size, self.use_output_bias)
        self.query_norm, self.key_norm = (head_norm(qk_norm, qk_size, dtype) for _ in range(2))
        self.gate_proj = None
        if gating is not None:
            features = heads * (vo_size if gating == "elementwise" else 1)
            keys = [jax.random.fold_in(key, 4)]
            self.gate_proj = make(0, self.query_size, features, False)

    @overload
    def __call__(
        self,
        query: Float[Array, "t query_size"],
        key_: Float[Array, "s key_size"] | None = None,
        value: Float[Array, "s value_size"] | None = None,
        mask: Any = None,
        *,
        key: PRNGKeyArray | None = None,
        inference: Any = None,
        deterministic: Any = None,
        process_heads: ProcessHeads | None = None,
        bias: Float[Array, "..."] | None = None,
        score: AbstractScore | Sequence[AbstractScore] | None = None,
        q_positions: Any = None,
        kv_positions: Any = None,
        cache: None = None,
    ) -> Float[Array, "t output_size"]: ...

    @overload
    def __call__(
        self,
        query: Float[Array, "*b t query_size"],
        key_: Float[Array, "*b s key_size"] | None = None,
        value: Float[Array, "*b s value_size"] | None = None,
        mask: Any = None,
        *,
        key: PRNGKeyArray | None = None,
        inference: Any = None,
        deterministic: Any = None,
        process_heads: ProcessHeads | None = None,
        bias: Float[Array, "..."] | None = None,
        score: AbstractScore | Sequence[AbstractScore] | None = None,
        q_positions: Any = None,
        kv_positions: Any = None,
        cache: Cache,
        counts: int | Sequence[int] | Int[Array, "*b"] | None = None,
        append: bool = True,
    ) -> tuple[Cache, Float[Array, "*b t output_size"]]: ...

    @overload
    def __call__(self, *args: Any, return_max_logits: bool, **kwargs: Any) -> Any: ...

    @jax.named_scope("eqattn.nn.MultiheadAttention")
    def __call__(  # noqa: PLR0913 (one argument for each option of the layer)
        self,
        query: Float[Array, "*b t query_size"],
        key_: Float[Array, "*b s key_size"] | None = None,
        value: Float[Array, "*b s value_size"] | None = None,
        mask: Any = None,
        *,
        key: PRNGKeyArray | None = None,
        inference: Any = None,
        deterministic: Any = None,
        process_heads: ProcessHeads | None = None,
        bias: Float[Array, "..."] | None = None,
        score: AbstractScore | Sequence[AbstractScore] | None = None,
        q_positions: Any = None,
        kv_positions: Any = None,
        cache: Any = None,
        counts: int | Sequence[int] | Int[Array, "*b"] | None = None,
        append: bool = True,
        return_max_logits: Any = False,
    ) -> Any:
        r"""**Arguments:** these are Equinox's:

        - `query`, `key_`, `value`: `[t, query_size]`, `[s, key_size]` and `[s, value_size]`. By
            default `key_` is the query, and `value` is `key_`.
        - `mask`: an array `[t, s]` or `[num_heads, t, s]` of booleans, or of numbers that hide
            where they are 0; or a mask module such as [`eqattn.KeyPadding`][]; or `"causal"`, or
            `"full"` for None.
        - `key`: the random key of the dropout, not used if that is off.
        - `inference`: whether dropout is off; None takes the layer's `inference`.
        - `deterministic`: a deprecated name of `inference`.
        - `process_heads`: a function that changes query `[t, num_heads, qk_size]`, key
            `[s, num_kv_heads, qk_size]` and value `[s, num_kv_heads, vo_size]`, and returns the
            three.

        These are keyword-only:

        - `bias`: an array that is added to the logits, broadcastable to `[num_heads, t, s]`.
        - `score`: modules of `eqattn.scores`, which are applied after those of the layer.
        - `q_positions`, `kv_positions`: integers `[t]` and `[s]`, for rotary positions, masks and
            scores; by default those of the strategy's `token_positions`, else they count from 0.
            With a `Rotary` of `sections` they are coordinates, `[t, axes]` and `[s, axes]`. A call
            must give them, of new keys in a cache too, and masks and scores have the default.
        - `cache`: one of [`eqattn.cache`](api.md#caches) with `num_kv_heads` heads of `qk_size` and
            `vo_size`, and the tokens so far. `key_` and `value` are appended. The query reads all
            that is stored, or what `mask` shows of it. New tokens are at positions `cache.length`,
            `cache.length + 1`, ...; `q_positions` moves those of the query. An axis `s` for keys is
            then that of the places of the cache.
        - `counts`: how many of the new keys, from the first, the cache takes; None for all.
        - `append`: whether there are new keys. If not, the query reads the cache as it is.
        - `return_max_logits`: whether the output comes with the largest logit of each query and
            head, `[t, num_heads]` in float32, as [QK-clip](stats.md#the-largest-logit-and-qk-clip)
            needs them.

        A cache belongs to one sequence: it has `batch=1`, or is a row that `jax.vmap` maps over. Or
        it has `b` rows; all inputs and the output then have these in front, `[b, t, query_size]`,
        and `counts` is `[b]`. Without a strategy a layer reads caches by [`eqattn.Ragged`][].

        **Returns:** `[t, output_size]`, with a cache `(cache, [t, output_size])`. With
        `return_max_logits`, a pair of output and logits stands in place of the output.

        **Raises:** `ValueError` at trace time, naming the shapes and the remedy; `RuntimeError` if
        dropout is on and there is no `key`.
        """
        query, sizes = as_array(query, "query", 2), (self.key_size, self.value_size)
        key_, value = new_keys(query, key_, value, cache, counts, append, sizes)
        result = lambda cache, out: out
        if cache is not None:
            cache, (query, key_, value), of_rows, result = as_rows(
                cache, (query, key_, value), (q_positions, counts, kv_positions)
            )
            q_positions, counts, kv_positions = of_rows
        check_sequences(query, key_, value, () if cache is None else query.shape[:1])
        t, new = query.shape[-2], key_.shape[-2]
        s = new if cache is None else cache.key.shape[1]
        mask = as_layer_mask(mask, self.window, self.num_heads, t, s)
        rate = Dropout.of(self.dropout).rate_of_call(inference, deterministic, key)
        given = (q_positions, kv_positions), process_heads is not None
        at, given = input_positions(self.rotary, self.strategy, cache, mask, (t, new), *given)
        q_positions, kv_positions = given
        heads = processed(process_heads, *self._heads(query, key_, value, at))
        q, k, v = of_one_dtype(*heads) if cache is None else heads  # A cache rounds to its dtype.
        dtype, q_offset = v.dtype, None
        if cache is not None:
            q_offset = cache.length if q_positions is None else None
            of_rows = q_positions, counts
            cache, mask = appended(cache, k, v, of_rows, mask, self.num_heads, self.window)
            k, v, kv_positions = cache.key, cache.value, cache.positions
        places: Any = dict(q_offset=q_offset, q_positions=q_positions, kv_positions=kv_positions)
        out = attention(
            q,
            k,
            v,
            self._configured(cache is not None, rate),
            mask=mask,
            bias=bias,
            score=(*as_scores(self.score), *as_scores(score)) or None,
            key=key if rate else None,
            inference=not rate,
            return_max_logits=return_max_logits,
            **places,
        )
        joined = self._joined(out.attention_outputs.astype(dtype), query)
        return result(cache, (joined, out.max_logits) if return_max_logits else joined)

    def _configured(self, cached: bool, rate: float) -> AttentionImpl:
        """The strategy of a call, with the settings of the layer in its metadata."""
        return configured(
            self.strategy,
            cached,
            softmax_scale=self.softmax_scale,
            logits_soft_cap=self.logits_soft_cap,
            softmax_aux=self.softmax_aux,
            dropout_prob=rate or None,
        )

    def _heads(
        self, query: Array, key_: Array, value: Array, positions: tuple[Any, Any]
    ) -> tuple[Array, Array, Array]:
        """The heads of the inputs: projected, normed, and turned to the positions of queries and
        keys.
        """
        q = project(self.query_proj, query, self.num_heads, self.qk_size)
        k = project(self.key_proj, key_, self.num_kv_heads, self.qk_size)
        v = project(self.value_proj, value, self.num_kv_heads, self.vo_size)
        q, k = normed(self.query_norm, q), normed(self.key_norm, k)
        if self.rotary is not None:
            q, k = map(self.rotary, (q, k), positions)
        return q, k, v

    def _joined(self, out: Float[Array, "*b h v"], query: Array) -> Array:
        """The projection of the heads of an output, which a projection of the query may gate."""
        if self.gate_proj is not None:
            gate = jax.nn.sigmoid(linear(self.gate_proj, query))
            out = out * gate.reshape(*out.shape[:-1], gate.shape[-1] // self.num_heads)
        return linear(
            self.output_proj, out.reshape(*query.shape[:-1], self.num_heads * self.vo_size)
        )
