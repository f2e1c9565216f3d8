"""Masks and scores drawn at random: as eqattn takes them, and as the oracle defines them.

A drawn feature has its structure fixed and its arrays free. So one program serves many draws of
the values, and arrays may be mapped, sharded or scanned over.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matrix import oracle_masks as om

import eqattn as eq
from eqattn import scores as sc

from . import _oracle as oracle
from ._oracle import Pairs


@dataclass(frozen=True)
class Sizes:
    """The shape of a call: `[*lead, t, heads, d]`, `[*lead, s, kv, d]`, `[*lead, s, kv, v]`."""

    lead: tuple[int, ...]
    t: int
    s: int
    heads: int
    kv: int
    d: int
    v: int

    @property
    def pairs(self) -> tuple[int, ...]:
        return (*self.lead, self.heads, self.t, self.s)


@dataclass(frozen=True)
class Feature:
    """`arrays` draws a PyTree of NumPy arrays; `build` makes eqattn's object of it, and `define`
    the oracle's. `axes` says which axis of each array is which: letters of `"bhtsf"` and `"."`.
    """

    name: str
    arrays: Callable[[np.random.Generator], Any]
    build: Callable[[Any], Any]
    define: Callable[..., Any]
    axes: Any = ()


def fixed(name: str, mask: Any, visible: Callable[[Pairs], np.ndarray]) -> Feature:
    """A mask without arrays."""
    return Feature(name, lambda rng: (), lambda a: mask, lambda a, p: visible(p))


def per_row(x: np.ndarray) -> np.ndarray:
    """`[*b]` beside pairs `[*b, h, t, s]`; a number has no axes."""
    return np.asarray(x)[..., None, None, None]


def _per_batch(rng: np.random.Generator, lead: tuple[int, ...], low: int, high: int) -> Callable:
    """Draws an int, or one for each batch element."""
    shape = lead if rng.integers(2) else ()
    return lambda rng: rng.integers(low, high + 1, shape).astype(np.int32)


def _lead(rng: np.random.Generator, lead: tuple[int, ...]) -> tuple[int, ...]:
    """Leading axes that broadcast to `lead`, or none."""
    if not rng.integers(3):
        return ()
    return tuple(1 if not rng.integers(3) else n for n in lead)


def causal(rng: np.random.Generator, z: Sizes) -> Feature:
    """`k <= q + offset`."""
    if rng.integers(2):
        by = int(rng.integers(-2, z.s + 1)) * int(rng.integers(2))
        return fixed(f"Causal({by})", eq.Causal(by), lambda p: p.k <= p.q + by)
    draw = _per_batch(rng, z.lead, -2, z.s)
    return Feature("Causal(b)", draw, eq.Causal, lambda a, p: p.k <= p.q + per_row(a))


def window(rng: np.random.Generator, z: Sizes) -> Feature:
    """`-right <= q - k <= left`, or one of the first keys."""
    left, right = (int(rng.integers(0, 7)) for _ in range(2))
    left, right = (None, right) if not rng.integers(5) else (left, right)
    right = None if not rng.integers(5) and left is not None else right
    sinks = int(rng.integers(3))

    def visible(p: Pairs) -> np.ndarray:
        far = p.q - p.k
        inside = (far <= (np.inf if left is None else left)) & (
            -far <= (np.inf if right is None else right)
        )
        return inside | (p.k < sinks) if sinks else inside  # without, none at negative positions

    return fixed(f"Window({left},{right},{sinks})", eq.SlidingWindow(left, right, sinks), visible)


def segments(rng: np.random.Generator, z: Sizes) -> Feature:
    """Equal ids that are not negative."""
    lead, both = _lead(rng, z.lead), z.t == z.s and bool(rng.integers(2))
    ids = lambda rng, n: np.sort(rng.integers(-1, 3, (*lead, n)), -1).astype(np.int32)

    def arrays(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        return (ids(rng, z.t),) if both else (ids(rng, z.t), ids(rng, z.s))

    def visible(a: Any, p: Pairs) -> np.ndarray:
        q, k = a[0][..., None, :, None], a[-1][..., None, None, :]
        return (q == k) & (q >= 0)

    axes = ("bt",) if both else ("bt", "bs")
    return Feature("Segments", arrays, lambda a: eq.Segments(*a), visible, axes)


def padding(rng: np.random.Generator, z: Sizes) -> Feature:
    """`start <= k < length`, or `q < length`."""
    ends = _per_batch(rng, z.lead, 0, z.s)
    if rng.integers(3):
        low = _per_batch(rng, z.lead, 0, z.s // 2)
        return Feature(
            "KeyPadding",
            lambda rng: (ends(rng), low(rng)),
            lambda a: eq.KeyPadding(*a),
            lambda a, p: (p.k >= per_row(a[1])) & (p.k < per_row(a[0])),
        )
    return Feature("QueryPadding", ends, eq.QueryPadding, lambda a, p: p.q < per_row(a))


def prefix(rng: np.random.Generator, z: Sizes) -> Feature:
    """`k < prefix` or `k <= q`."""
    draw = _per_batch(rng, z.lead, 0, z.s)
    return Feature("PrefixLM", draw, eq.PrefixLM, lambda a, p: (p.k < per_row(a)) | (p.k <= p.q))


def chunks(rng: np.random.Generator, z: Sizes) -> Feature:
    """By blocks of tokens."""
    n = int(rng.integers(1, 9))
    if rng.integers(2):
        return fixed(f"BlockCausal({n})", eq.BlockCausal(n), lambda p: p.k // n <= p.q // n)
    same = lambda p: (p.k // n == p.q // n) & (p.k <= p.q)
    return fixed(f"ChunkedCausal({n})", eq.ChunkedCausal(n), same)


def dense(rng: np.random.Generator, z: Sizes) -> Feature:
    """A boolean array that broadcasts to the pairs."""
    shape = broadcastable(rng, z.pairs)
    wrap = eq.DenseMask if rng.integers(2) else (lambda a: a)
    draw = lambda rng: rng.random(shape) < 0.6
    axes = "bhts"[-len(shape) :] if len(shape) < 4 else "." * (len(shape) - 3) + "hts"
    return Feature(f"Dense{shape}", draw, wrap, lambda a, p: a, axes)


def of_heads(rng: np.random.Generator, z: Sizes) -> Feature:
    """A function of a pair with an array of its own, of heads, in its closure."""

    def build(reach: Any) -> Any:
        reach = jnp.asarray(reach)
        return eq.MaskFn(lambda b, h, q, k: (q - k <= reach[h]) & (k - q < 3 + b % 2))

    def visible(reach: np.ndarray, p: Pairs) -> np.ndarray:
        return (p.q - p.k <= reach[:, None, None]) & (p.k - p.q < 3 + p.b % 2)

    draw = lambda rng: rng.integers(0, z.s + 2, z.heads).astype(np.int32)
    return Feature("MaskFn(heads)", draw, build, visible, "h")


def _differ(b: Any, h: Any, q: Any, k: Any, mine: Any, theirs: Any) -> Any:
    return (mine != theirs) | (q == k)


def of_tokens(rng: np.random.Generator, z: Sizes) -> Feature:
    """A function of a pair with an operand of each side."""
    lead = _lead(rng, z.lead)

    def arrays(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        return tuple(rng.integers(0, 3, (*lead, n)).astype(np.int32) for n in (z.t, z.s))

    def visible(a: Any, p: Pairs) -> np.ndarray:
        return _differ(p.b, p.h, p.q, p.k, a[0][..., None, :, None], a[1][..., None, None, :])

    build = lambda a: eq.MaskFn(_differ, (a[0],), (a[1],))
    return Feature("MaskFn(tokens)", arrays, build, visible, ("bt", "bs"))


def of_features(rng: np.random.Generator, z: Sizes) -> Feature:
    """Whether a product of the features of a pair is positive."""

    def arrays(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        return tuple(rng.standard_normal((*z.lead, n, 2)).astype(np.float32) for n in (z.t, z.s))

    def build(a: Any) -> Any:
        operands = sc.Operand(a[0], "btf"), sc.Operand(a[1], "bsf")
        return eq.MaskFn(lambda b, h, q, k, x, y: x @ y > 0, arrays=operands)

    visible = lambda a, p: (np.einsum("...tf,...sf->...ts", *a) > 0)[..., None, :, :]
    return Feature("MaskFn(features)", arrays, build, visible, ("btf", "bsf"))


TERMS = (causal, causal, window, segments, padding, prefix, chunks, dense, of_heads, of_tokens)
TERMS = (*TERMS, of_features)


def broadcastable(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to `shape`: some axes are 1, and some of the first left out."""
    found = tuple(1 if not rng.integers(3) else n for n in shape)
    return found[int(rng.integers(len(found))) :]


def draw_mask(rng: np.random.Generator, z: Sizes, depth: int = 2, terms: Any = TERMS) -> Feature:
    """A mask of the algebra: a term, or two joined, or one negated."""
    kind = int(rng.integers(4)) if depth else 0
    if kind < 2:
        return terms[int(rng.integers(len(terms)))](rng, z)
    left, right = (draw_mask(rng, z, depth - 1, terms) for _ in range(2))
    if kind == 2 and not rng.integers(3):
        negated = lambda a: ~_as_mask(left.build(a))
        return Feature(
            f"~{left.name}", left.arrays, negated, lambda a, p: ~left.define(a, p), left.axes
        )
    union = kind == 3
    sign = "|" if union else "&"

    def build(a: Any) -> Any:
        x, y = left.build(a[0]), right.build(a[1])
        x = _as_mask(x)
        return x | y if union else x & y

    def visible(a: Any, p: Pairs) -> np.ndarray:
        x, y = left.define(a[0], p), right.define(a[1], p)
        return x | y if union else x & y

    return Feature(
        f"({left.name} {sign} {right.name})",
        lambda rng: (left.arrays(rng), right.arrays(rng)),
        build,
        visible,
        (left.axes, right.axes),
    )


def _as_mask(x: Any) -> Any:
    return x if isinstance(x, eq.masks.AbstractMask) else eq.DenseMask(x)


# Scores: `define` takes the arrays and makes an `oracle.Score`, whose parameters are the leaves.


def _normal(*shape: int) -> Callable:
    return lambda rng: rng.standard_normal(shape)


def alibi(rng: np.random.Generator, z: Sizes) -> Feature:
    draw = lambda rng: (rng.uniform(0.05, 0.4, z.heads),)
    return Feature("ALiBi", draw, lambda a: sc.ALiBi(*a), lambda a: oracle.alibi(*a), ("h",))


def t5(rng: np.random.Generator, z: Sizes) -> Feature:
    both, furthest = bool(rng.integers(2)), int(rng.integers(12, 40))
    n = 8

    def define(a: Any) -> oracle.Score:
        bucket = lambda p: om.t5_bucket_of(p.k - p.q, n, both, furthest)
        return oracle.table_of_distances(a[0], bucket)

    draw = lambda rng: (rng.standard_normal((n, z.heads)),)
    build = lambda a: sc.T5Bias(*a, bidirectional=both, max_distance=furthest)
    return Feature("T5Bias", draw, build, define, (".h",))


def capped(rng: np.random.Generator, z: Sizes) -> Feature:
    draw = lambda rng: (np.float64(rng.uniform(1, 4)),)
    return Feature("SoftCap", draw, lambda a: sc.SoftCap(*a), lambda a: oracle.soft_cap(*a), ("",))


def biased(rng: np.random.Generator, z: Sizes) -> Feature:
    shape = broadcastable(rng, z.pairs)
    axes = "bhts"[-len(shape) :] if len(shape) < 4 else "." * (len(shape) - 3) + "hts"
    draw = lambda rng: (rng.standard_normal(shape),)
    return Feature(f"Bias{shape}", draw, lambda a: sc.Bias(*a), lambda a: oracle.bias(*a), (axes,))


def closure(rng: np.random.Generator, z: Sizes) -> Feature:
    """A function whose parameter is in its closure."""

    def build(a: Any) -> Any:
        (strength,) = a

        def far(logit: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return logit - strength.astype(logit.dtype) * jnp.log1p(abs(q - k).astype(logit.dtype))

        return sc.ScoreFn(far)

    draw = lambda rng: (np.float64(rng.uniform(0.1, 1)),)
    return Feature("ScoreFn(closure)", draw, build, lambda a: oracle.logarithmic(*a), ("",))


def nonlinear(rng: np.random.Generator, z: Sizes) -> Feature:
    """A function of the logit and of an operand of each side, perhaps with a rule of its own."""
    own_rule = bool(rng.integers(2))

    def fn(logit: Any, b: Any, h: Any, q: Any, k: Any, x: Any, y: Any) -> Any:
        return logit + (x * y).astype(logit.dtype) * (square(logit) if own_rule else logit**2)

    def build(a: Any) -> Any:
        return sc.ScoreFn(fn, (sc.Operand(a[0], "bt"), sc.Operand(a[1], "bs")))

    draw = lambda rng: tuple(0.3 * rng.standard_normal((*z.lead, n)) for n in (z.t, z.s))
    name = f"ScoreFn(nonlinear{', custom_jvp' * own_rule})"
    return Feature(name, draw, build, lambda a: oracle.squared(*a), ("bt", "bs"))


@jax.custom_jvp
def square(x: Any) -> Any:
    """With a rule of its own, which is differentiated again."""
    return x * x


@square.defjvp
def _square_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    return square(x), 2 * x * dx


def product(rng: np.random.Generator, z: Sizes) -> Feature:
    """A second product, of features."""
    add = lambda logit, b, h, q, k, x, y: logit + (x @ y).astype(logit.dtype)

    def build(a: Any) -> Any:
        return sc.ScoreFn(add, (sc.Operand(a[0], "btf"), sc.Operand(a[1], "bsf")))

    draw = lambda rng: tuple(rng.standard_normal((*z.lead, n, 3)) for n in (z.t, z.s))
    define = lambda a: oracle.second_product(*a)
    return Feature("ScoreFn(features)", draw, build, define, ("btf", "bsf"))


SCORES = (alibi, t5, capped, biased, closure, nonlinear, product)


def draw_scores(rng: np.random.Generator, z: Sizes, most: int = 2) -> tuple[Feature, ...]:
    """A chain of at most so many scores."""
    count = max(int(rng.integers(-1, most + 1)), 0)
    return tuple(SCORES[int(rng.integers(len(SCORES)))](rng, z) for _ in range(count))
