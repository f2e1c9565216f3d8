"""NVIDIA's cuDNN, by `jax.nn.dot_product_attention`: for those who ask for `platform="cudnn"`.

It computes whole calls, so there are no blocks to visit, no Carry, and no derivative of this
library. Which calls it takes was found with cuDNN 9.23, by building its graphs for an H200 without
the device. Any other call raises. The logsumexp is not offered, as JAX rounds it to the dtype of
the inputs, and silently gives it a zero gradient.

Two differences cannot be found while tracing, as they depend on the values. A row that sees no key
has whatever cuDNN makes of it. A NaN in a masked key or value may reach every row. A call raises if
it is known while tracing that a row sees nothing.
"""

import dataclasses
import functools as ft
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..._carry import named_output
from ..._misc import concrete
from ..._sweep.grid import BlockGrid, BlockRequest, BlockSizes
from ..._sweep.lowering import Lowering, XLA
from ...masks._base import And
from ...masks._causal import Causal, SlidingWindow
from ...masks._segments import KeyPadding, QueryPadding
from ...scores._base import Bias


LARGEST_DIM = 256
"""The most numbers of a query, a key or a value. They are a multiple of 8."""

_RESULTS = {
    "return_logsumexp": "jax returns cuDNN's logsumexp rounded to the dtype of the inputs, and "
    "drops its gradient in silence",
    "return_carry": "cuDNN returns no Carry",
    "return_max_logits": "cuDNN returns no largest logits",
    "return_weights": "cuDNN never forms the weights",
}
_POSITIONS = "q_offset", "q_positions", "kv_positions"
# No precision, and the names that JAX has for the one of this library.
_PRECISIONS = None, lax.Precision.DEFAULT, "default", "fastest", "bfloat16"


@dataclasses.dataclass(frozen=True)
class _Mask:
    """A mask in the words of `jax.nn.dot_product_attention`.

    **Arguments:**

    - `causal`: whether a query sees no later key.
    - `left`: how many keys before its own a query sees; None means all.
    - `queries`, `keys`: the lengths of the sequences, as masks hold them; None means whole ones.
    """

    causal: bool = False
    left: int | None = None
    queries: Any = None
    keys: Any = None


def _terms(mask: Any) -> list[Any]:
    """The masks that `&` joins."""
    if isinstance(mask, And):
        return [x for term in mask.terms for x in _terms(term)]
    return [] if mask is None else [mask]


def _described(mask: Any) -> tuple[_Mask, str]:
    """A mask in cuDNN's words, and why it has none; empty if it has."""
    found, wide = _Mask(), False
    for term in _terms(mask):
        if type(term) is Causal:
            if not isinstance(term.offset, int) or term.offset != 0:
                return found, "its causal mask has no offset; slice queries or keys instead"
            found = dataclasses.replace(found, causal=True)
        elif type(term) is SlidingWindow and not term.sinks:
            bounds = [x for x in (found.left, term.left) if x is not None]
            causal = found.causal or term.right == 0
            wide |= term.right != 0 and (term.left, term.right) != (None, None)
            found = dataclasses.replace(found, causal=causal, left=min(bounds, default=None))
        elif type(term) is QueryPadding and found.queries is None:
            found = dataclasses.replace(found, queries=term.lengths)
        elif type(term) is KeyPadding and found.keys is None:
            start = concrete(term.starts)
            if start is None or start.any():
                return found, "its sequences begin at their first key; slice the keys"
            found = dataclasses.replace(found, keys=term.lengths)
        else:
            name = type(term).__name__
            return found, (
                f"it has no {name} among its masks; it has Causal(), with it a SlidingWindow(left, "
                "right) without sinks, or one KeyPadding and one QueryPadding, joined by `&`"
            )
    if wide and not found.causal:
        return found, "its windows are causal; add Causal() to the mask"
    if found.left is not None and (found.queries is not None or found.keys is not None):
        return found, "it was not tried with a window and lengths; leave one of them out"
    return found, ""


def _lengths(lengths: Any, tokens: int, batch: int) -> Array:
    """The lengths as cuDNN takes them, int32 `[batch]`. They are clipped to the number of tokens,
    as cuDNN would read behind the last one.
    """
    lengths = jnp.clip(jnp.asarray(lengths, jnp.int32), 0, tokens)
    return jnp.broadcast_to(lengths.reshape(-1), (batch,))


def _unseen(mask: _Mask, queries: int, keys: int) -> str:
    """Why it is known that a row sees nothing, or that cuDNN has no such shape; else empty."""
    shapes = f"got {queries} queries and {keys} keys"
    if 0 in (queries, keys):
        return f"it needs a query and a key, {shapes}"
    if mask.causal and queries > keys:
        return f"its causal masks have at least as many keys as queries, {shapes}; pad the keys"
    known = None if mask.queries is None else concrete(mask.queries)
    if known is not None and known.size and known.min() < queries:
        return (
            f"queries from {known.min()} on see nothing, and what cuDNN returns for them is not "
            "defined; slice them off"
        )
    return ""


def _without_keys(mask: _Mask) -> str:
    """Why it is known that no row of a sequence sees anything; empty if it is not."""
    known = None if mask.keys is None else concrete(mask.keys)
    if known is not None and known.size and known.min() <= 0:
        return "a sequence has no keys, and what cuDNN returns for it is not defined; leave it out"
    return ""


def _missing() -> str:
    """Why JAX can call no cuDNN here; empty if it can. JAX looks for it as it traces a call."""
    x = jax.ShapeDtypeStruct((1, 8, 1, 8), jnp.bfloat16)
    call = ft.partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.eval_shape(call, x, x, x)
    except RuntimeError as e:
        if "cuDNN" not in str(e):
            raise
        return "jax has no cuDNN here; install 'jax[cuda13]'"
    return ""


def _output(query: Array, key: Array, value: Array, more: dict[str, Any], fixed: tuple) -> Array:
    """cuDNN's output.

    **Arguments:**

    - `more`: the arguments of `jax.nn.dot_product_attention` that are arrays.
    - `fixed`: pairs of names and values of the others.
    """
    return jax.nn.dot_product_attention(
        query, key, value, implementation="cudnn", **more, **dict(fixed)
    )


def _forward(
    query: Array, key: Array, value: Array, more: dict[str, Any], fixed: tuple
) -> tuple[Array, Any]:
    lengths = query.shape[1], key.shape[1]
    if any(n % 2 for n in lengths):
        raise ValueError(
            "platform='cudnn': for gradients, jax asks for even numbers of queries and keys, got "
            f"{lengths[0]} and {lengths[1]}; pad them, the keys with a KeyPadding, or use "
            "platform='auto' or 'xla'."
        )
    return jax.vjp(lambda q, k, v, more: _output(q, k, v, more, fixed), query, key, value, more)


_attend = jax.custom_vjp(_output, nondiff_argnums=(4,))
_attend.defvjp(_forward, lambda fixed, pull, g: pull(g))


@dataclasses.dataclass(frozen=True)
class CuDNNLowering(Lowering):
    """Whole calls by cuDNN. It visits no blocks, so that none of the sizes and classes count."""

    device = "NVIDIA's cuDNN"
    cleans_values = False
    skips_corners = False
    finishes_rows = False
    splits_over_devices = True
    drops_single_axes = False

    def multiplies_narrow(self) -> bool:
        return True

    def choose_blocks(self, request: BlockRequest) -> BlockSizes:
        return XLA.choose_blocks(request)

    def unsupported_dtype(self, dtype: Any) -> str:
        if dtype in (jnp.bfloat16, jnp.float16):
            return ""
        return f"it multiplies bfloat16 and float16, not {dtype}"

    def unsupported_primitive(self, jaxpr: Any) -> str:
        del jaxpr
        return ""

    def unsupported_function(self, jaxpr: Any, is_mask: bool) -> str:
        del jaxpr, is_mask
        return "is no bias"

    def unsupported_features(self, features: Mapping[str, Any], metadata: Any) -> str:  # noqa: C901 (one branch for each refusal)
        for name, reason in _RESULTS.items():
            if features.get(name):
                return f"{name}: {reason}"
        mask = features.get("mask")
        if mask is not None and any(features.get(name) is not None for name in _POSITIONS):
            return f"{' or '.join(_POSITIONS)}: its tokens have the positions 0, 1, ..."
        if mask is not None and mask is not True:
            described, reason = _described(mask)
            if reason := reason or _without_keys(described):
                return reason
        scores = features.get("score")
        scores = () if scores in (None, True) else scores
        scores = (*scores,) if isinstance(scores, Sequence) else (scores,)
        if other := [type(x).__name__ for x in scores if type(x) is not Bias]:
            return f"it has no {other[0]}: of all scores it has a bias"
        if len(scores) + (features.get("bias") is not None) > 1:
            return "it has one bias; add them up"
        dropped = metadata.dropout_prob > 0 and not features.get("inference")
        if dropped or features.get("dropout"):
            return "dropout: its bits are others than those of every other platform"
        if features.get("precision") not in _PRECISIONS:
            return f"it has one precision, not {features['precision']}; leave it None"
        if metadata.logits_soft_cap is not None:
            return "logits_soft_cap: it has no soft cap"
        if metadata.softmax_aux is not None:
            return "softmax_aux: it has no sinks"
        if metadata.runtime_softmax_dtype not in (None, jnp.float32):
            return "runtime_softmax_dtype: its logits are float32; leave it None"
        if isinstance(metadata.softmax_scale, jax.Array):
            return "softmax_scale: it is compiled with its scale; give a Python number"
        if (metadata.blocksize_q, metadata.blocksize_k) != (None, None):
            return "blocksize_q and blocksize_k: its blocks are its own; leave them None"
        return _missing()

    def lower(self, ctx: Any, layout: BlockGrid, visits: Sequence[Any]) -> None:
        raise ValueError(
            "platform='cudnn': cuDNN computes whole calls and returns no Carry; use "
            "platform='auto' or 'xla'."
        )

    def attend(self, problem: Any) -> Array:
        query, key, value = problem.query, problem.key, problem.value
        mask, _ = _described(problem.mask)
        bias = next((x.operands()[0] for x in problem.scores), None)
        bias = None if bias is None else problem.canonical(bias)
        if reason := self._why_not(problem, mask, bias):
            raise ValueError(
                f"platform='cudnn': cuDNN cannot compute this call ({reason}); platform='auto' or "
                "'xla' can."
            )
        (batch, t, *_), s = query.shape, key.shape[1]
        more = {} if bias is None else dict(bias=bias)
        if mask.queries is not None:
            more["query_seq_lengths"] = _lengths(mask.queries, t, batch)
        if mask.keys is not None:
            more["key_value_seq_lengths"] = _lengths(mask.keys, s, batch)
        fixed: dict[str, Any] = dict(scale=float(problem.scale), is_causal=mask.causal)
        if mask.left is not None:
            fixed["local_window_size"] = mask.left, 0
        return named_output(_attend(query, key, value, more, tuple(fixed.items())))[0]

    def _why_not(self, problem: Any, mask: _Mask, bias: Array | None) -> str:
        """Why cuDNN cannot compute a call of these shapes; empty if it can."""
        (batch, t, heads, dim), s = problem.query.shape, problem.key.shape[1]
        width = problem.value.shape[-1]
        if not (isinstance(t, int) and isinstance(s, int)):
            return f"its sizes are known when it is compiled, got {t} queries and {s} keys"
        if dim != width:
            return f"jax gives it values as wide as keys, got {dim} and {width}; pad the smaller"
        if dim % 8 or dim > LARGEST_DIM:
            return (
                f"its head dims are multiples of 8 up to {LARGEST_DIM}, got {dim}; pad queries, "
                "keys and values, and give softmax_scale"
            )
        if bias is not None:
            lead, wanted = bias.shape[:2], [(1, heads), (batch, heads), (batch, 1)]
            if bias.shape[2:] != (t, s) or lead not in wanted:
                return (
                    f"its bias is [{heads}, {t}, {s}], [{batch}, {heads}, {t}, {s}] or [{batch}, "
                    f"1, {t}, {s}], got one that is {bias.shape} with all its axes; broadcast it"
                )
            if bias.dtype != problem.query.dtype:
                return f"its bias is {problem.query.dtype} as the query is, not {bias.dtype}"
        return _unseen(mask, t, s)
