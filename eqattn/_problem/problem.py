"""One call of attention, checked and in canonical form.

A `Problem` is what every strategy solves. It has arrays with one flattened batch axis, the mask and
the scores in their fixed order, and the numbers that the metadata holds.

The arguments of a call of attention: their checks and their canonical forms.

A `jax.jit` for functions of modules, cached by value.

Masks, scores and strategies that are rebuilt but equal reuse one trace, in an eager loop too. The
objects that users' functions are compared by are held weakly, so the cache never keeps alive what
these functions captured.

The caches form a tree. The root is for calls without any function of a user's. Each such function
leads to one child per object that it is compared by:

    root: jit            calls without users' functions
      f: jit             calls with a function compared by f
        g: jit           calls with two, compared by f and by g

An edge is an entry of a `WeakKeyDictionary`, so a subtree and its traces are dropped with its key.
A call with a function that no key tells from a later one has a root of its own, which is dropped
after it.
"""

import dataclasses
import functools as ft
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from .._closure import Closure
from .._misc import (
    accumulation_dtype,
    as_array,
    as_flag,
    as_int,
    check_64_bits,
    concrete,
    iota,
    positions_in_reach,
    REACH,
    Static,
    unwrap,
)
from .._pairs import canonical, Operand, read_by
from .._run_time import raise_if
from ..masks._base import (
    AbstractMask,
    check_call,
    Dense,
    leaf_terms,
    map_terms,
    named_operands,
    placed,
)
from ..masks._causal import Causal
from ..masks._segments import KeyPadding
from ..scores._base import AbstractScore, AbstractWrapper, as_bias, SoftCap
from ..scores._dropout import seed_of
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


def is_unsure(part: AbstractMask | AbstractScore) -> bool:
    """Whether a mask or a score may lack an operation in some kernels, or may read a table by
    `q - k`. Those of this library say so of themselves. Those of users are asked in each call.
    """
    return _unwrapped(part).may_lack_kernels or _is_foreign(part)


def of_a_user(part: AbstractMask | AbstractScore) -> bool:
    """Whether a user wrote what a mask or a score computes, so that it may do anything."""
    return not _unwrapped(part).tried_in_kernels or _is_foreign(part)


def _unwrapped(part: Any) -> Any:
    while isinstance(part, AbstractWrapper):
        part = part.score
    return part


def _is_foreign(part: Any) -> bool:
    """Whether the class of a mask or a score is none of this library."""
    return not type(_unwrapped(part)).__module__.startswith("eqattn.")


class Problem(eqx.Module):
    """Attention of `query` `[B, T, H, D]` over `key` `[B, S, K, D]` and `value` `[B, S, K, V]`.

    **Arguments:**

    - `query`: an array.
    - `key`, `value`: arrays or `AbstractStored`.
    - `mask`: an `AbstractMask`, or None if all pairs are visible.
    - `scores`: transforms of a logit, in the order in which they are applied.
    - `scale`: the factor on the products of query and key, a float or scalar array.
    - `sinks`: further logits of each row, which have no value, `[H|1, n]`; or None.
    - `seed`: the seed of `keep_mask`, or None without dropout.
    - `q_positions`, `kv_positions`: int32 `[B|1, T]` and `[B|1, S]`; None means `0, 1, ...`.
    - `q_start`, `q_shift`: numbers that are added to the positions of queries: a static int, and
        int32 `[B|1, 1]` or None.
    - `batch_shape`: the batch axes that `B` flattens.
    - `rate`: the dropout probability, which is used if there is a seed.
    - `logits_dtype`: a dtype that logits are rounded to, or None.
    - `precision`: that of products. None means exact ones for float32, and else JAX's default.
    - `shards`: the number of devices whose keys an array holds that varies with query and key.
    - `partition`: the names of the mesh axes that shard the batch and the heads, and of those known
        to shard nothing; or None.
    - `kv_places`: the places of keys whose positions a mask has moved, int32 `[B|1, S]`, or None.
    - `b_indices`, `h_indices`: what masks, scores and dropout get as `b` and `h`, int32 `[B]` and
        `[B|1, H]`; None means `0, 1, ...`
    """

    query: Array
    key: Any
    value: Any
    mask: AbstractMask | None
    scores: tuple[AbstractScore, ...]
    scale: Any
    sinks: Array | None
    seed: Array | None
    q_positions: Any
    kv_positions: Any
    q_shift: Any
    q_start: int = eqx.field(static=True)
    batch_shape: tuple[int, ...] = eqx.field(static=True)
    rate: float = eqx.field(static=True)
    logits_dtype: Any = eqx.field(static=True)
    precision: Any = eqx.field(static=True)
    shards: int = eqx.field(static=True, default=1)
    partition: tuple[Any, ...] | None = eqx.field(static=True, default=None)
    kv_places: Any = None
    b_indices: Any = None
    h_indices: Any = None

    @classmethod
    def from_call(  # noqa: PLR0913 (what a call gives, each checked here)
        cls,
        query: Any,
        key: Any,
        value: Any,
        metadata: Any,
        *,
        mask: Any = None,
        bias: Any = None,
        score: Any = None,
        dropout_key: Any = None,
        q_offset: Any = None,
        q_positions: Any = None,
        kv_positions: Any = None,
        precision: Any = None,
        shards: int = 1,
        partition: tuple[Any, ...] | None = None,
    ) -> "Problem":
        """Checks the arguments of `attention` and brings them to canonical form."""
        for name in ("runtime_dtype", "runtime_softmax_dtype"):
            check_64_bits(name, getattr(metadata, name))
        query = jnp.asarray(as_array(query, "query"))
        key, value = as_keys_and_values(key, value)
        check_shapes(query, key, value)
        *batch_shape, t, heads, _ = query.shape
        batch_shape, s = tuple(batch_shape), key.shape[-3]
        scores = _all_scores(metadata.logits_soft_cap, bias, score)
        mask = as_mask(mask)
        kv_positions = as_positions(kv_positions, s, batch_shape, "kv_positions")
        check_call(mask, batch_shape, heads, key.shape[-2], t, s * shards, kv_positions)
        check_one_offset(q_offset, q_positions)
        if q_offset is None and q_positions is None:
            mask = of_first_tokens(mask, scores, query)
        q_start, q_shift = as_offset(q_offset, batch_shape, t)
        out = cls(
            query=_flatten(query, batch_shape),
            key=_flatten(key, batch_shape),
            value=_flatten(value, batch_shape),
            mask=mask,
            scores=scores,
            scale=_scale_of(metadata, query.shape),
            sinks=as_sinks(metadata.softmax_aux, heads),
            seed=None if dropout_key is None else seed_of(dropout_key),
            q_positions=as_positions(q_positions, t, batch_shape, "q_positions"),
            kv_positions=kv_positions,
            q_shift=q_shift,
            q_start=q_start,
            batch_shape=batch_shape,
            rate=metadata.dropout_prob,
            logits_dtype=metadata.runtime_softmax_dtype,
            precision=precision,
            shards=shards,
            partition=partition,
        )
        for part in (*scores, *([] if mask is None else [mask])):
            for name, operand in named_operands(part):
                out.canonical(operand, name)
        return out

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The numbers of queries, keys, query heads and key/value heads, `(T, S, H, K)`."""
        _, t, h, _ = self.query.shape
        _, s, k, _ = self.key.shape
        return t, s, h, k

    @property
    def reads_pairs(self) -> bool:
        """Whether a mask or a score reads an array with a number for each pair of tokens."""
        return any(x.of_pairs for part in self.parts for _, x in named_operands(part))

    @property
    def parts(self) -> tuple[Any, ...]:
        """The scores, and then the mask if there is one."""
        return (*self.scores, *([] if self.mask is None else [self.mask]))

    @property
    def accumulation_dtype(self) -> jnp.dtype:
        """The dtype of logits and sums: float32, or float64 for float64 inputs."""
        return accumulation_dtype(self.query.dtype)

    def canonical(self, operand: Operand, name: str = "operand") -> Array | np.ndarray:
        """Brings an operand to the form `[B|1, H|1, T|1, S|1]`, perhaps with a last axis of
        features.
        """
        (t, s, heads, _), lead = self.sizes, operand.array.shape[: -1 - len(operand.feature_shape)]
        if operand.axes.removesuffix("f").endswith("ts") and lead[-1] != 1:
            s *= self.shards
        return canonical(operand, self.batch_shape, heads, t, s, name)

    def positions(self) -> tuple[Any, Any]:
        """The positions of queries `[B|1, T]` and keys `[B|1, S]`, NumPy arrays where static."""
        t, s, _, _ = self.sizes
        q, k = self.q_positions, self.kv_positions
        q = (iota(t)[None] if q is None else q) + np.int32(self.q_start)
        q = q if self.q_shift is None else q + self.q_shift
        return q, iota(s)[None] if k is None else k

    def at_places(self, q: Any = None, k: Any = None, lists: bool = True) -> "Problem":
        """Returns the problem with the mask of the tokens at its places, and with the positions
        that this mask gives them. Without a term that goes by places, it is the problem itself.

        **Arguments:**

        - `q`, `k`: the places of queries `[t]` and keys `[s]` where the problem does not say them.
            None means `0, 1, ...`
        - `lists`: whether a list of keys becomes an array of bools. Otherwise it stays.
        """
        if not any(x.by_place and (lists or not x.selects) for x in leaf_terms(self.mask)):
            return self
        given = (self.q_positions, q), (self.kv_positions, k)
        q, k = (x[None] if old is None and x is not None else old for old, x in given)
        whole = dataclasses.replace(self, q_positions=q, kv_positions=k)
        places = whole.positions()
        mask, q, k = placed(self.mask, self.batch_shape, self.sizes[2], *places, lists)
        moved = {}
        if any(term.moves_positions for term in leaf_terms(self.mask)):
            moved = dict(q_positions=q, kv_positions=k, kv_places=places[1])
            moved |= dict(q_start=0, q_shift=None)
        return dataclasses.replace(self, mask=mask, **moved)

    def indices(self) -> list[Any]:
        """Returns the indices `b`, `h`, `q`, `k` of every pair, each `[B|1, H|1, T|1, S|1]`."""
        batch, heads = math.prod(self.batch_shape), self.sizes[2]
        b = (iota(batch) if self.b_indices is None else self.b_indices).reshape(-1, 1, 1, 1)
        h = iota(heads)[None] if self.h_indices is None else self.h_indices
        h = h[:, :, None, None]
        q, k = self.positions()
        return [b, h, q[:, None, :, None], k[:, None, None, :]]


def _all_scores(soft_cap: Any, bias: Any, score: Any) -> tuple[AbstractScore, ...]:
    """The scores of a call in their order: soft cap, bias, and then those that it names."""
    scores = as_scores(score)
    if bias is not None:
        scores = (as_bias(bias), *scores)
    return scores if soft_cap is None else (SoftCap(soft_cap), *scores)


def _scale_of(metadata: Any, query: tuple[int, ...]) -> Any:
    scale = metadata.softmax_scale
    if scale is not None and jnp.ndim(scale) > 0:
        raise ValueError(
            f"softmax_scale must be one number, got shape {jnp.shape(scale)}; multiply the "
            f"query {query} by a scale per head or dim."
        )
    return query[-1] ** -0.5 if scale is None else scale


def _flatten(x: Any, batch_shape: tuple[int, ...]) -> Any:
    """Flattens the batch axes of an array into one."""
    if len(batch_shape) == 1:
        return x
    if isinstance(x, AbstractStored):
        axes = f"{type(x).__name__} {x.shape} has {len(batch_shape)} batch axes and needs one"
        raise ValueError(f"{axes}: reshape what it holds, or pass x.materialise().")
    return x.reshape(math.prod(batch_shape), *x.shape[-3:])


class _Jits:
    """A node of the tree: one jitted function per combination of objects that users' functions are
    compared by. It dies with any of them, and so does all that its traces captured.
    """

    def __init__(self, make: Callable):
        self.make, self.jitted, self.further = make, make(), weakref.WeakKeyDictionary()

    def of(self, owner: Any) -> "_Jits":
        """The child for one more object."""
        if owner not in self.further:
            self.further[owner] = _Jits(self.make)
        return self.further[owner]


def cached(fn: Callable) -> Callable:
    """Jits `fn(*trees, **static)`: arrays in the trees are traced, and all else is static."""

    def make():
        @ft.partial(jax.jit, static_argnums=(1, 2, 3))
        def jitted(arrays, treedef, others, static):
            leaves = iter(arrays)
            leaves = [next(leaves) if kind is _ARRAY else x for kind, x in others]
            return fn(*jax.tree.unflatten(treedef, leaves), **dict(static))

        return jitted

    root = _Jits(make)

    @ft.wraps(fn)
    def call(*trees, **static):
        leaves = jax.tree.leaves(trees, is_leaf=lambda x: isinstance(x, Closure))
        recipes = [x.recipe for x in leaves if isinstance(x, Closure)]
        node = root if all(x.remembered for x in recipes) else _Jits(make)
        for owner in [owner for x in recipes for owner in x.owners]:
            node = node.of(owner())
        leaves, treedef = jax.tree.flatten(trees)
        arrays = [x for x in leaves if isinstance(x, jax.Array | np.ndarray)]
        others = tuple(  # Types are compared, too, as 1 == True == 1.0.
            (_ARRAY, None) if isinstance(x, jax.Array | np.ndarray) else (type(x), x)
            for x in leaves
        )
        return node.jitted(arrays, treedef, others, tuple(sorted(static.items())))

    return call


_ARRAY = type("Traced", (), {"__repr__": lambda self: "traced"})()
