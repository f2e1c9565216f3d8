"""From a case to arrays: the library's arguments on one side, the oracle's problem on the other."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import bound, oracle_dropout as od, oracle_masks as om
from .cases import Case, name_of
from .kept import is_cascade, Kept, kept, numbers_of_eight_bits, offset_of, rows_of
from .oracle import Problem


Q_OFFSET = 3
DROPOUT_SEED = 7
VISITED = (
    6,
    8,
)  # The sizes of listed blocks that are visited where they lie, however small they are.


@dataclasses.dataclass(frozen=True)
class Built:
    """`variants` share every argument but q, k and v; transforms with a leading axis use two of
    them. `fixed` are arguments that have no derivative.
    """

    case: Case
    variants: tuple[dict[str, Any], ...]  # the differentiable arguments, as the library takes them
    directions: dict[str, Any]
    ct_out: Any
    ct_lse: Any
    mask: Any
    offset: Any
    problems: tuple[Problem, ...]
    precision: bound.Precision
    kept: Kept
    fixed: dict[str, Any]

    def to_oracle(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Library shapes to the oracle's: leading axes flattened, values exact."""
        return {
            n: np.asarray(x).astype(self.precision.reference).reshape(self.shape_of(n))
            for n, x in self.kept.joined(arguments).items()
        }

    def of_library(self, gradients: dict[str, Any]) -> dict[str, Any]:
        """The oracle's gradients as those of the library's arguments."""
        return self.kept.parted(gradients, self.case["dims"][1], dtypes_of(self.case)[0])

    def shape_of(self, name: str):
        return np.shape(getattr(self.problems[0], name))

    @functools.cached_property
    def oracle_directions(self):
        return self.to_oracle(self.directions)

    @functools.cached_property
    def oracle_cts(self):
        (b, t, h, _), v = np.shape(self.problems[0].q), np.shape(self.problems[0].v)[-1]
        ct_out = np.asarray(self.ct_out).astype(self.precision.reference).reshape(b, t, h, v)
        return ct_out, np.asarray(self.ct_lse).astype(self.precision.reference).reshape(b, t, h)

    def values(self, i=0):
        return bound.values(self.problems[i], self.precision)

    def grads(self, i=0):
        return self.of_library(bound.grads(self.problems[i], *self.oracle_cts, self.precision))

    def tangents(self, i=0):
        return bound.tangents(self.problems[i], self.oracle_directions, self.precision)

    def hvps(self, i=0):
        return self.of_library(
            bound.hvps(self.problems[i], *self.oracle_cts, self.oracle_directions, self.precision)
        )


def dtypes_of(case: Case):
    """Of the inputs, and of parameters and logsumexp."""
    dtype = jnp.dtype(case["dtype"])
    return dtype, jnp.dtype("float64" if case["dtype"] == "float64" else "float32")


def sums_by_product(case: Case) -> bool:
    """Whether the kernel of a case is to be that of chips with wide matrix units."""
    return case["target"][0] == "tpu" and case["dtype"] == "bfloat16" and case["lead"] == (2, 2)


def bias_shape(kind: str, lead, h, t, s):
    ones = (1,) * len(lead)
    return {
        "full": (*lead, h, t, s),
        "heads": (*ones, h, t, s),
        "keys": (*lead, 1, 1, s),
        "rows": (*ones, h, t, 1),
        "batch": (*lead, 1, t, s),
        "unbatched": (h, t, s),
    }[kind]


def make_mask(kind: str, rng, lead, heads, t, s, offset: int, visited: bool):
    """The library's mask and the oracle's. `visited` says whether a list is one of blocks that are
    visited where they lie.
    """
    from eqattn import masks as m

    b, (h, kv) = int(np.prod(lead)), heads

    def per_batch(low, high):
        x = rng.integers(low, high, lead, dtype=np.int32)
        return jnp.asarray(x), x.reshape(b)

    def ids(n):
        x = np.sort(rng.integers(-1, 3, (*lead, n)), -1).astype(np.int32)
        return jnp.asarray(x), x.reshape(b, n)

    if kind == "none":
        return None, None
    if kind == "causal":
        return m.Causal(), om.causal(t, s, 0, offset)
    if kind == "causal_offset":
        shift = s - t if s != t else 2
        return m.Causal(shift), om.causal(t, s, shift, offset)
    if kind == "window":
        return m.SlidingWindow(5, 2), om.window(t, s, 5, 2, 0, offset)
    if kind == "window_sinks":
        return m.SlidingWindow(3, 1, sinks=2), om.window(t, s, 3, 1, 2, offset)
    if kind == "segments":
        (q_ids, q_plain), (kv_ids, kv_plain) = ids(t), ids(s)
        return m.Segments(q_ids, kv_ids), om.segments(q_plain, kv_plain)
    if kind == "lengths":
        ends, plain = per_batch(0, s + 1)
        return m.KeyPadding(ends), om.lengths(t, s, plain)
    if kind == "starts":
        (starts, low), (ends, high) = per_batch(0, s // 2 + 1), per_batch(s // 2, s + 1)
        return m.KeyPadding(ends, starts), om.lengths(t, s, high, low)
    if kind == "prefix":
        prefix, plain = per_batch(0, s // 2 + 1)
        return m.PrefixLM(prefix), om.prefix_lm(t, s, plain, offset)
    if kind == "block_causal":
        return m.BlockCausal(4), om.block_causal(t, s, 4, offset)
    if kind == "chunked_causal":
        return m.ChunkedCausal(5), om.chunked_causal(t, s, 5, offset)
    if kind == "tree":
        parents = tree_of(t, rng)
        return m.Tree(jnp.asarray(parents), start=s - t), om.tree(t, s, parents, s - t)
    if kind == "selected":
        # A list for each head and query, or of blocks, for each head and query or for blocks of
        # queries and all heads or each.
        forms = (h, 1, 1), (1, 3, 4), (h, t, 3), (h, 1, VISITED[1]), (1, *VISITED), (kv, *VISITED)
        forms = forms[3:] if visited else forms
        all_heads, block_q, block_k = forms[int(rng.integers(len(forms)))]
        blocks = -(-s // block_k)
        shape = (*lead, all_heads, -(-t // block_q), min(blocks, 5))
        listed = rng.integers(-1, blocks, shape, dtype=np.int32)
        plain = om.selected(t, s, listed.reshape(b, *shape[-3:]), block_q, block_k)
        if all_heads == kv:  # the query heads of a key head have its list
            plain = np.repeat(plain, h // kv, 1)
        mask = m.Selected(jnp.asarray(listed), block_q, block_k)
        if rng.integers(2):
            return m.Causal() & mask, plain & om.causal(t, s, 0, offset)
        return m.SlidingWindow(1, 0) | mask, plain | om.window(t, s, 1, 0, 0, offset)
    if kind == "neighbourhood":
        shape, tile, window = (max(s // 5, 3), 5), (2, 3), (3, 3)
        mask = m.Neighbourhood(m.TileOrder(shape, tile), window)
        return mask, om.neighbourhood(t, s, shape, tile, window, offset)
    if kind == "queries":
        ends, plain = per_batch(0, t + 1)
        return m.QueryPadding(ends), om.query_lengths(t, s, plain, offset)
    if kind == "function":
        shown = lambda b, h, q, k: (3 * q + k + b + 2 * h) % 5 > 1
        return m.MaskFn(shown), om.function(b, h, t, s, offset)
    if kind == "table":
        seen = rng.random((4, 5)) < 0.6
        mask = m.MaskFn(functools.partial(seen_in, jnp.asarray(seen)))
        return mask, om.of_places(t, s, seen, (5, 4), offset)
    if kind == "dense":
        x = rng.random((*lead, h, t, s)) < 0.6
        return m.Dense(jnp.asarray(x)), x.reshape(b, h, t, s)
    if kind == "array":
        x = rng.random((*lead, 1, t, s)) < 0.6
        return jnp.asarray(x), x.reshape(b, 1, t, s)
    if kind == "and":
        (q_ids, q_plain), (kv_ids, kv_plain) = ids(t), ids(s)
        ends, plain = per_batch(0, s + 1)
        mask = m.Causal() & m.Segments(q_ids, kv_ids) & m.KeyPadding(ends)
        return mask, om.causal(t, s, 0, offset) & om.segments(q_plain, kv_plain) & om.lengths(
            t, s, plain
        )
    if kind == "or":
        ends, plain = per_batch(0, s + 1)
        return m.SlidingWindow(2, 0) | m.KeyPadding(ends), om.window(
            t, s, 2, 0, 0, offset
        ) | om.lengths(t, s, plain)
    if kind == "not":
        mask = ~m.SlidingWindow(2, 1) & m.BlockCausal(8)
        return mask, ~om.window(t, s, 2, 1, 0, offset) & om.block_causal(t, s, 8, offset)
    raise AssertionError(kind)


def visits_listed_blocks(mask) -> bool:
    """Whether a mask lists blocks that are to be visited where they lie."""
    from eqattn import Selected

    terms = jax.tree.leaves(mask, is_leaf=lambda x: isinstance(x, Selected))
    return any(isinstance(x, Selected) and x.block_k == VISITED[1] for x in terms)


def seen_in(table, b, h, q, k):
    return table[q // 5, k // 4]


def tree_of(n: int, rng) -> np.ndarray:
    """The parents of a random forest, whose nodes stand in any order."""
    parents = np.array([rng.integers(-1, i) if i else -1 for i in range(n)], np.int32)
    at = rng.permutation(n).astype(np.int32)
    shuffled = np.empty(n, np.int32)
    shuffled[at] = np.where(parents < 0, -1, at[parents])
    return shuffled


def build(case: Case) -> Built:
    """Call under `jax.enable_x64` for cases that `needs_x64`."""
    rng = np.random.default_rng(zlib.crc32(name_of(case).encode()))
    (t, s), (h, kv), (d, dv), lead = case["length"], case["heads"], case["dims"], rows_of(case)
    b, dtype, wide = int(np.prod(lead)), *dtypes_of(case)
    given = None if case["offset"] == "none" else Q_OFFSET
    # The queries of a tree are the drafts, at the end of the keys.
    first = s - t if case["mask"] == "tree" else offset_of(case, given)
    store = kept(case, rng, dtype, first)

    size = d + dv if store.latent else d  # of a query
    default = case["operands"] == "default"
    of_bias, of_others = (dtype, wide) if default else (jnp.dtype(case["operands"]),) * 2

    def normal(shape, kind):
        return jnp.asarray(rng.standard_normal(shape).astype(kind))

    def operand(x, kind):
        """Of numbers that the sums' dtype has too: the bound takes operands as exact."""
        return jnp.asarray(np.asarray(x, wide).astype(kind))

    shapes = {"q": (*lead, t, h, size), "k": (*lead, s, kv, d), "v": (*lead, s, kv, dv)}

    def eight_bits(name):
        return jnp.asarray(numbers_of_eight_bits(rng, shapes[name]).astype(dtype))

    fixed = {n: eight_bits(n) for n in "kv"} if store.quantized else {}

    def qkv():
        return {n: normal(shape, dtype) for n, shape in shapes.items() if n not in fixed}

    shared: dict[str, Any] = {}
    if case["bias"] != "none":
        # All rows of a cascade share what varies with keys.
        shape = bias_shape(case["bias"], () if is_cascade(case) else lead, h, t, s)
        shared["bias"] = operand(rng.standard_normal(shape), of_bias)
    if case["sinks"] != "none":
        shape = {"H": (h,), "Hn": (h, 3), "1n": (1, 2)}[case["sinks"]]
        shared["sinks"] = operand(rng.standard_normal(shape), of_others)
    if case["score"] in ("alibi", "both", "lookup"):
        shared["slopes"] = operand(rng.uniform(0.05, 0.3, h), of_others)
    if case["score"] in ("t5", "t5_causal", "both", "differences", "table"):
        shared["table"] = operand(rng.standard_normal((8, h)), of_others)
    if case["score"] == "features":
        for name, n in (("row_features", t), ("column_features", s)):
            shared[name] = operand(rng.standard_normal((*lead, n, 3)), of_others)
    for name, value in (("scale", 0.3), ("cap", 2.5)):
        if case[name] == "array":
            shared[name] = operand(value, of_others)
    variants = tuple({**qkv(), **shared} for _ in range(2))
    directions = {n: operand(rng.standard_normal(x.shape), x.dtype) for n, x in variants[0].items()}

    offset = jnp.asarray(first, jnp.int32) if case["offset"] == "array" else first
    if is_cascade(case):
        offset = (jnp if case["offset"] == "array" else np).full(b, first, np.int32)
    shift = 0 if first is None else first
    visited = case["target"][0] == "blockwise"  # the others gather what some of their lists name
    mask, visible = make_mask(case["mask"], rng, lead, (h, kv), t, s, shift, visited)

    if store.visible is not None:
        visible = store.visible if visible is None else visible & store.visible

    kernel = case["target"][0].startswith(("tpu", "gpu", "triton"))
    by_product = sums_by_product(case) and not case["dropout"]
    narrow = kernel or jax.default_backend() != "cpu"  # On a CPU, XLA's products are wide.
    carried = case["target"][0] == "tpu_ragged"
    how = dict(normalised=narrow, by_product=by_product, carried=carried)
    precision = bound.precision_of(dtype, **how)
    constants: dict[str, Any] = {
        "mask": visible,
        "scale": {"none": size**-0.5}.get(case["scale"], 0.3),
    }
    if case["cap"] != "none":
        constants["cap"] = 2.5
    at = None
    if case["mask"] == "tree":
        at = om.tree_positions(t, s, np.asarray(mask.parents), s - t)
    if "slopes" in shared:
        constants["distance"] = om.distance(t, s, shift, at)
    if case["score"] == "differences":
        constants["bucket"] = om.clipped_difference(t, s, 8, shift, at)
    elif case["score"] == "table":
        constants["bucket"] = om.of_places(t, s, np.arange(8).reshape(2, 4), (7, 5), shift, at)
    elif "table" in shared:
        constants["bucket"] = om.t5_bucket(t, s, 8, case["score"] != "t5_causal", 16, shift, at)
    if case["dropout"]:
        rate, places = case["dropout"], at or om.grid(t, s, shift)
        keep = od.kept(jax.random.key(DROPOUT_SEED), b, h, *places, rate)
        constants |= {"keep": keep, "rate": od.dropped_share(rate)}

    def flat(name, x):
        x = np.asarray(x).astype(precision.reference)
        if name in "qkv":
            return x.reshape(b, *x.shape[len(lead) :])
        if name.endswith("features"):
            return x.reshape(b, -1, 1, x.shape[-1])
        return x.reshape(int(np.prod(x.shape[:-3])), *x.shape[-3:]) if name == "bias" else x

    problems = tuple(
        Problem(**constants | {n: flat(n, x) for n, x in store.joined({**fixed, **a}).items()})
        for a in variants
    )
    return Built(
        case=case,
        variants=variants,
        directions=directions,
        ct_out=normal((*lead, t, h, dv), dtype),
        ct_lse=normal((*lead, t, h), wide),
        mask=mask,
        offset=offset,
        problems=problems,
        precision=precision,
        kept=store,
        fixed=fixed,
    )
