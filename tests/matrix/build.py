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
from .masks import Draw, MASKS, VISITED
from .oracle import Problem


Q_OFFSET = 3
DROPOUT_SEED = 7


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


def visits_listed_blocks(mask) -> bool:
    """Whether a mask lists blocks that are to be visited where they lie."""
    from eqattn import Selected

    terms = jax.tree.leaves(mask, is_leaf=lambda x: isinstance(x, Selected))
    return any(isinstance(x, Selected) and x.block_k == VISITED[1] for x in terms)


def build(case: Case) -> Built:  # noqa: C901 (each axis of a case)
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
    mask, visible = MASKS[case["mask"]](Draw(rng, lead, h, kv, t, s, shift, visited))

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
