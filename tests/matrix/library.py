"""A case as a call of the library."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .build import Built, DROPOUT_SEED, dtypes_of
from .cases import Case
from .kept import FILLED, is_cascade


# How kernels run: "pallas" where their device is, as `python tests/measure gpu-run` asks.
KERNELS = os.environ.get("EQATTN_KERNELS", "interpret")
WITH_KERNELS = {
    name + suffix: strategy
    for name in ("tpu", "gpu", "triton")
    for suffix, strategy in (("", "blockwise"), ("_ragged", "ragged"))
}
STRATEGIES = WITH_KERNELS | dict.fromkeys(
    ("latent", "paged", "ragged_keys", "paged_keys", *FILLED), "ragged"
)


def _nearer(slopes, logit, b, h, q, k):
    return logit - slopes[h].astype(logit.dtype) * abs(q - k).astype(logit.dtype)


def _by_difference(table, logit, b, h, q, k):
    at = jnp.clip(q - k + len(table) // 2, 0, len(table) - 1)
    return logit + table[at, h].astype(logit.dtype)


def _by_places(table, logit, b, h, q, k):
    return logit + table.reshape(2, 4, -1)[q // 7, k // 5, h].astype(logit.dtype)


def scores_of(case: Case, arguments: dict[str, Any]) -> list:
    """The scores of a call."""
    from eqattn import scores as sc

    score: list = []
    if case["score"] == "lookup":
        score.append(sc.ScoreFn(functools.partial(_nearer, arguments["slopes"])))
    elif "slopes" in arguments:
        score.append(sc.ALiBi(arguments["slopes"]))
    if case["score"] == "differences":
        score.append(sc.ScoreFn(functools.partial(_by_difference, arguments["table"])))
    elif case["score"] == "table":
        score.append(sc.ScoreFn(functools.partial(_by_places, arguments["table"])))
    elif "table" in arguments:
        both = case["score"] != "t5_causal"
        score.append(sc.T5Bias(arguments["table"], bidirectional=both, max_distance=16))
    if "row_features" in arguments:
        pair = arguments["row_features"], arguments["column_features"]
        operands = (sc.Operand(x, axes) for x, axes in zip(pair, ("btf", "bsf")))
        dot = lambda logit, b, h, q, k, x, y: logit + (x @ y).astype(logit.dtype)
        score.append(sc.ScoreFn(dot, tuple(operands)))
    return score


def strategy_of(case: Case, arguments: dict[str, Any]) -> Any:
    """The strategy of a call, with its metadata."""
    import eqattn

    target = case["target"][0]
    block_q, block_k = case["block"]
    in_pages = target.startswith("paged") or is_cascade(case)
    metadata = eqattn.AttentionMetadata(
        runtime_dtype=dtypes_of(case)[0],
        platform=KERNELS if target in WITH_KERNELS else "auto",
        backend={"gpu": "cuda", "triton": "triton"}.get(target.removesuffix("_ragged"), "any"),
        softmax_scale={"none": None, "float": 0.3}.get(case["scale"], arguments.get("scale")),
        logits_soft_cap={"none": None, "float": 2.5}.get(case["cap"], arguments.get("cap")),
        softmax_aux=arguments.get("sinks"),
        dropout_prob=case["dropout"],
        blocksize_q=block_q,
        blocksize_k=None if in_pages else block_k,  # a page
    )
    options = {"axis_name": "sp"} if target.endswith("_keys") else {}
    return eqattn.AttentionRegistry.get(STRATEGIES.get(target, target))(metadata, **options)


def _parted(built: Built) -> tuple[Any, Any]:
    """The mask, the offset and the cache of a call, as arrays that are traced and as the rest. With
    an array offset all arrays are traced; otherwise they are constants of the program.
    """
    traced = built.case["offset"] == "array"
    held = built.mask, built.offset, built.kept.cache
    return eqx.partition(held, eqx.is_array if traced else lambda _: False)


def library_call(built: Built):
    """`(arguments, dynamic) -> (out, lse)` and `dynamic`, the call-time arrays of the mask, the
    offset and the cache.
    """
    case, (dynamic, static) = built.case, _parted(built)
    attend = _cascade if is_cascade(case) else _attention

    def call(arguments, dynamic, **more):
        mask, offset, cache = eqx.combine(dynamic, static)
        arguments = {**built.fixed, **arguments}
        given = dict(mask=mask, q_offset=offset, return_logsumexp=True, **more)
        output = attend(built, arguments, cache, given)
        results = output.attention_outputs, output.logsumexp
        return (*results, output.max_logits) if more else results

    return call, dynamic


def keys_of(built: Built, arguments: dict[str, Any], cache: Any, mask: Any) -> tuple:
    """The keys and values as they are kept, a mask that hides what is not theirs, and their
    positions if they lie in some other order.
    """
    from eqattn._problem.storage import Stored
    from eqattn.cache import LatentKV

    target, (k, v) = built.case["target"][0], (arguments[n] for n in "kv")
    if target == "latent":
        key = LatentKV(v, k)
        return key, key.c_kv, mask, None
    if target.startswith("paged"):
        cache = cache.append(k, v)
        return cache.key, cache.value, mask, None
    if target in FILLED:
        cache = built.kept.append(cache, k, v)
        shown = cache.mask() if mask is None else cache.mask() & mask
        return cache.key, cache.value, shown, cache.positions
    whole = STRATEGIES.get(target, target) == "ragged" and not target.endswith("_keys")
    if whole and k.ndim == 4:
        k, v = Stored(k), Stored(v)  # Arrays are copied for many queries.
    return k, v, mask, None


def _attention(built: Built, arguments: dict[str, Any], cache: Any, given: dict[str, Any]):
    import eqattn

    case = built.case
    k, v, mask, positions = keys_of(built, arguments, cache, given.pop("mask"))
    return eqattn.attention(
        arguments["q"],
        k,
        v,
        strategy_of(case, arguments),
        mask=mask,
        bias=arguments.get("bias"),
        score=scores_of(case, arguments) or None,
        key=jax.random.key(DROPOUT_SEED) if case["dropout"] else None,
        kv_positions=positions,
        **given,
    )


def _cascade(built: Built, arguments: dict[str, Any], cache: Any, given: dict[str, Any]):
    """The mask `Causal()` is that of the call. A bias is one of its scores."""
    import eqattn
    from eqattn import scores as sc
    from eqattn.cache import LatentKVCache

    case, (k, v) = built.case, (arguments[n] for n in "kv")
    score = scores_of(case, arguments)
    cache = built.kept.append(built.kept.filled(cache, k, v), k, v)
    if "bias" in arguments:
        bias = arguments["bias"]
        beyond = cache.key.shape[1] - bias.shape[-1] if case["bias"] == "keys" else 0
        score.append(sc.Bias(jnp.pad(bias, [(0, 0)] * (bias.ndim - 1) + [(0, beyond)])))
    causal = case["mask"] == "causal"
    return eqattn.cascade_attention(
        arguments["q"],
        LatentKVCache(cache) if built.kept.latent else cache,
        strategy_of(case, arguments),
        causal=causal,
        score=score or None,
        block_q=case["block"][0],
        levels=built.kept.levels,
        **(given | ({"mask": None} if causal else {})),
    )


def call_of_keys(built: Built, fn: Callable[..., Any]):
    """`(arguments, dynamic)` of a case to what `fn(query, key_, strategy, **options)` returns, which
    is a function of logits alone; and `dynamic`, as in `library_call`.
    """
    case, (dynamic, static) = built.case, _parted(built)

    def call(arguments, dynamic):
        mask, offset, cache = eqx.combine(dynamic, static)
        arguments = {**built.fixed, **arguments}
        k, _, mask, positions = keys_of(built, arguments, cache, mask)
        return fn(
            arguments["q"],
            k,
            strategy_of(case, arguments),
            mask=mask,
            bias=arguments.get("bias"),
            score=scores_of(case, arguments) or None,
            q_offset=offset,
            kv_positions=positions,
        )

    return call, dynamic
