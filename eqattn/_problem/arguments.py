"""The arguments of a call of attention: their checks and their canonical forms."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from .._misc import (
    accumulation_dtype,
    as_array,
    as_flag,
    as_int,
    concrete,
    positions_in_reach,
    REACH,
    Static,
    unwrap,
)
from .._misc.run_time import raise_if
from .._pairs import canonical, Operand, read_by
from ..masks._base import AbstractMask, Dense
from ..masks._causal import Causal
from ..masks._padding import KeyPadding
from ..masks._terms import leaf_terms, map_terms
from ..scores._base import AbstractScore
from .storage import AbstractStored, check_computable


if TYPE_CHECKING:
    MaskLike = AbstractMask | Bool[Array | np.ndarray, "..."] | Literal["causal", "full"] | None
    ScoreLike = AbstractScore | Sequence[AbstractScore] | None
else:  # At run time `as_mask` and `as_scores` check them, and their errors name the remedy.
    MaskLike = ScoreLike = Any


def as_keys_and_values(key, value) -> tuple[Any, Any]:
    """Keys and values as arrays or as they are stored, but not as a cache of both."""
    for name, x in (("key_", key), ("value", value)):
        if isinstance(x, eqx.Module) and not isinstance(x, AbstractStored):
            raise TypeError(
                f"{name} must be an array, got {type(x).__name__}; of a cache pass cache.key "
                "and cache.value, with cache.mask(), q_offset= and "
                "kv_positions=cache.positions."
            )
    key, value = (
        x if isinstance(x, AbstractStored) else jnp.asarray(as_array(x, name))
        for name, x in (("key_", key), ("value", value))
    )
    return key, value


def check_shapes(query, key, value) -> None:
    """Raises with the shapes and the remedy unless query, key and value fit together."""
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_computable(**{name: x.dtype})
        if x.ndim < 3:
            raise ValueError(
                f"{name} must be [*batch, tokens, heads, dim], got shape {x.shape}; "
                "add a heads axis of size 1 for single-head attention."
            )
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            f"query, key and value must have one dtype, got {query.dtype}, {key.dtype}, "
            f"{value.dtype}; cast them first."
        )
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(f"The batch axes differ: {shapes}; broadcast them first.")
    for n in (query.shape[-3], key.shape[-3]):
        if isinstance(n, int) and n > REACH:
            raise ValueError(f"There may be at most 2**30 queries and keys, got {n}: {shapes}.")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query and key differ in their last axis (head dim): {shapes}; project both to one "
            "size."
        )
    if key.shape[-3:-1] != value.shape[-3:-1]:
        raise ValueError(
            f"key and value differ in tokens or heads: {shapes}; each key needs its own value."
        )
    heads, kv_heads = query.shape[-2], key.shape[-2]
    if 0 in (heads, kv_heads, query.shape[-1]):
        raise ValueError(f"There must be at least one head and one head dim: {shapes}; got none.")
    if heads % kv_heads:
        raise ValueError(
            f"{heads} query heads are not a multiple of {kv_heads} key/value heads: {shapes}; "
            "repeat or drop heads until they are."
        )


def named_mask(mask: Any) -> Any:
    """The masks that the names `"causal"` and `"full"` mean. Anything that is not a name is
    returned as it is.
    """
    if not isinstance(mask, str):
        return mask
    if mask not in ("causal", "full"):
        raise ValueError(
            f"mask must be one of 'causal', 'full', or None; got {mask!r}. Other masks are modules "
            "such as eqattn.SlidingWindow(left, right)."
        )
    return Causal() if mask == "causal" else None


def as_mask(mask) -> AbstractMask | None:
    """Makes a mask module from a module, a boolean array, a name or None."""
    mask = named_mask(mask)
    if mask is None or isinstance(mask, AbstractMask):
        return mask
    listed = isinstance(mask, list | tuple)
    if listed and (len(mask) == 0 or any(isinstance(m, AbstractMask | str) for m in mask)):
        raise TypeError(
            f"mask must be one mask, got a {type(mask).__name__} of {len(mask)}: combine several, "
            "`a & b` for pairs that all of them show, `a | b` for those that any of them shows. "
            "None is no mask."
        )
    if isinstance(mask, jax.Array | np.ndarray | list):
        mask = as_array(mask, "mask")
        if mask.dtype != bool:
            raise TypeError(
                f"A mask array must be boolean (True = visible), got {mask.dtype}; compare it "
                "(`x > 0`), or pass additive values as `bias`."
            )
        return Dense(mask)
    remedy = "masks such as eqattn.Causal() combine by `&`, `|` and `~`"
    if isinstance(mask, type):
        remedy = f"make one, {mask.__name__}(...)"
    elif callable(mask):
        remedy = "wrap a function of one pair as eqattn.MaskFn(fn)"
    got = getattr(mask, "__name__", type(mask).__name__)
    raise TypeError(
        f"mask must be a mask module, a boolean array, 'causal', 'full' or None, got {got}; "
        f"{remedy}."
    )


def as_scores(score) -> tuple[AbstractScore, ...]:
    """Makes a tuple of scores from a score, a sequence of them or None."""
    if score is None:
        return ()
    scores = tuple(score) if isinstance(score, Sequence) else (score,)
    for s in scores:
        if not isinstance(s, AbstractScore):
            raise TypeError(
                f"score must be score modules, got {type(s)}; wrap a function as ScoreFn(fn)."
            )
    return scores


def check_one_offset(q_offset, q_positions) -> None:
    """Raises if both ways to move the queries are given."""
    if q_offset is not None and q_positions is not None:
        raise ValueError("Pass q_offset or q_positions, not both.")


def of_first_tokens(
    mask: AbstractMask | None, scores: Sequence[AbstractScore], query: Array
) -> AbstractMask | None:
    """The mask of a call that does not say where its queries `[*b, t, h, d]` stand, so that they
    are the first tokens.

    Over a cache that is right while it holds no other tokens than theirs. Where lengths are known,
    they are checked at once, and else as the program runs.

    **Raises:** `ValueError`, with the remedy, if a cache holds more tokens, and any pair depends on
    where its query stands.
    """
    terms, t, dtype = leaf_terms(mask), query.shape[-3], accumulation_dtype(query.dtype)
    if not any(x.needs_offset for x in terms):
        return mask
    if not any(_reads_query(x, dtype) for x in (*terms, *scores)):
        return mask
    message = (
        f"q_offset is missing: a row of the cache holds more tokens than the {t} queries, which "
        "would stand at its beginning. Pass q_offset= the length of the cache before the append, "
        "or q_positions=; q_offset=0 where they are its first tokens"
    )

    def checked(term: Any) -> AbstractMask:
        if not term.needs_offset:
            return term
        lengths, known = term.lengths, concrete(term.lengths)
        if known is not None and (known > t).any():
            raise ValueError(f"{message}. Got lengths {known.tolist()}.")
        if known is None:
            lengths = raise_if(lengths, lengths > t, message)
        return KeyPadding(lengths, term.starts)

    return None if mask is None else map_terms(mask, checked)


def _reads_query(part: AbstractMask | AbstractScore, dtype: Any) -> bool:
    """Whether what a mask or a score says of a pair depends on the position of its query. Logits
    are of this dtype.
    """
    if isinstance(part, AbstractMask) and part.by_place:
        return not part.selects  # a list has a row for each query, wherever that stands
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    of_pair = [scalar] * 4
    if not isinstance(part, AbstractMask):
        of_pair = [jax.ShapeDtypeStruct((), dtype), *of_pair]
    given = [jax.ShapeDtypeStruct(x.feature_shape, x.array.dtype) for x in part.operands()]
    fn = part.visible if isinstance(part, AbstractMask) else part.transform
    query = len(of_pair) - 2
    return query in read_by(jax.make_jaxpr(fn)(*of_pair, *given).jaxpr, 0)


def as_positions(positions, n: int, batch_shape: tuple[int, ...], name: str):
    """Brings explicit positions to the form int32 `[B|1, n]`."""
    if positions is None:
        return None
    own, positions = name == "q_positions", jnp.asarray(positions_in_reach(positions, name))
    flat = canonical(Operand(positions, "bt" if own else "bs"), batch_shape, 1, n, n, name)[:, 0]
    return jnp.broadcast_to(flat[..., 0] if own else flat[:, 0], (flat.shape[0], n))


def as_offset(offset, batch_shape: tuple[int, ...], t: int) -> tuple[int, Any]:
    """Turns an offset `[*b]` of `t` queries into a static start, or into int32 `[B|1, 1]`. The
    other of the two is 0 or None.
    """
    if offset is None:
        return 0, None
    offset = as_int(offset, "q_offset", added=True)
    known = concrete(unwrap(offset))
    if known is not None and known.size and int(known.max()) + t > REACH:
        raise ValueError(
            f"The positions of {t} queries from q_offset on must be below 2**30, got q_offset="
            f"{known.max()}."
        )
    if isinstance(offset, Static):
        return offset.value, None
    offset = canonical(Operand(offset, "b"), batch_shape, 1, 1, 1, "q_offset")
    return 0, jnp.asarray(offset[:, 0, :, 0])


def as_sinks(sinks, heads: int):
    """Turns sinks `[H]`, `[H, n]` or `[1, n]` into `[H|1, n]`."""
    if sinks is None:
        return None
    if sinks.ndim == 1 and sinks.shape[0] == heads:
        return sinks[:, None]
    if sinks.ndim == 2 and sinks.shape[0] in (1, heads):
        return sinks
    raise ValueError(
        f"softmax_aux of shape {sinks.shape} is neither [num_heads] = [{heads}] (one sink per "
        f"head), [num_heads, n] nor [1, n] (sinks shared by all heads); reshape shared sinks to "
        "[1, n]."
    )


def choose_bias(mask: Any, bias: Any, init_bias: Callable[[], Array] | None) -> Any:
    """The bias of a `forward_*`. `init_bias` is called only if both mask and bias are None."""
    if mask is None and bias is None and init_bias is not None:
        return init_bias()
    return bias


def choose_dropout_key(metadata: Any, deterministic: bool, dropout_rng: Any) -> Any:
    """The random key of a `forward_*`'s dropout; None if dropout is off.

    **Raises:** `ValueError` if dropout is on and there is no key.
    """
    deterministic = as_flag(deterministic, "inference (deterministic of forward_*)")
    if dropout_rng is not None and not hasattr(dropout_rng, "dtype"):
        raise TypeError(f"key must be one key from jax.random.key, got {dropout_rng!r}.")
    if deterministic or metadata.dropout_prob == 0:
        return None
    if dropout_rng is None:
        raise ValueError(
            f"dropout_prob={metadata.dropout_prob} needs a key: pass key= (dropout_rng= of "
            "forward_*), or switch dropout off by inference=True (deterministic=True)."
        )
    return dropout_rng


def check_precision(precision: Any) -> None:
    """**Raises:** `ValueError` unless it is a precision of JAX, or None."""
    if precision is None:
        return
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    try:
        jax.eval_shape(lambda x: jax.lax.dot(x, x, precision=precision), one)
    except (TypeError, ValueError) as e:
        raise ValueError(
            f"precision must be one of jax.lax.Precision, its name or None, got {precision!r}."
        ) from e
