"""Drawn calls of attention over one block of pairs, and what they are in float64."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from eqattn import MaskFn, ScoreFn
from eqattn.scores import Operand

from ._drawn import Drawing
from ._expressions import Expression, NOISE, Noisy, Number, traced


KEYS = 8
TIMES = 10  # how many times the oracle disturbs what is rounded
_AXES = {"h": "h", "q": "t", "k": "s", "qk": "ts"}
SCALES = (None, None, 0.4, 1.0, -0.7, 0.0)


def _place(name: str) -> str:
    return name.partition("_")[2]


def _given(name: str) -> bool:
    """Whether an array is an operand. Otherwise the function looks it up."""
    return _place(name) == "qk" or (_place(name) != "" and int(name[1]) % 2 == 0)


@dataclasses.dataclass
class Function:
    """A drawn function of a pair.

    **Arguments:**

    - `expression`: what it computes.
    - `arrays`: what it reads, by name.
    """

    expression: Expression
    arrays: dict[str, Any]

    @property
    def operands(self) -> list[str]:
        return [n for n in self.arrays if _given(n)]

    def of_pair(self, arrays: dict[str, Any], scalars: tuple, given: tuple) -> Any:
        """The function of scalars, of `s`, `b`, `h`, `q` and `k` or only the last four."""
        at = dict(zip("sbhqk"[-len(scalars) :], scalars)) | dict(zip(self.operands, given))

        def leaf(value):
            if not isinstance(value, str):
                return value
            if value in at:
                return at[value]
            x = arrays[value]
            return x[at[_place(value)]] if _place(value) else x

        return traced(self.expression, leaf)

    def wrapped(self, kind: Any, arrays: dict[str, Any]) -> Any:
        """A `ScoreFn` or a `MaskFn`."""
        count = 5 if kind is ScoreFn else 4
        fn = lambda *xs: self.of_pair(arrays, xs[:count], xs[count:])
        given = tuple(Operand(arrays[n], _AXES[_place(n)]) for n in self.operands)
        return kind(fn, arrays=given)

    def exact(self, noisy: Noisy, indices: dict[str, Any], s: Any = None) -> Any:
        """The function with NumPy, of all pairs `[times, keys, heads, queries]`."""

        def leaf(value):
            if not isinstance(value, str):
                x = np.asarray(value)
            elif value == "s":
                return s
            elif value in indices:
                x = indices[value]
            else:
                x, place = self.arrays[value], _place(value)
                x = x[tuple(indices[a] for a in place)] if place else x
            x = np.broadcast_to(x, noisy.shape)
            if np.issubdtype(x.dtype, np.floating):
                return Number(np.float64(x), np.zeros(noisy.shape))
            return x if x.dtype == np.bool_ else x.astype(np.int64)

        return self.expression.evaluate(leaf, noisy.apply, {})


@dataclasses.dataclass
class Case:
    """A call.

    **Arguments:**

    - `heads`, `kv_heads`: the heads of queries and of keys.
    - `scores`, `mask`: what is done to logits. The last score hides pairs where `hides` is False.
    - `scale`: the softmax scale; None is the usual one.
    - `learned`: whether the arrays of scores are differentiated, too.
    - `q`, `g`, `out`: the queries, and the cotangents and values of outputs. Keys and values are
        unit vectors, so that products are what the queries and the cotangents say.
    """

    heads: int
    kv_heads: int
    scores: list[Function]
    mask: Function | None
    hides: Function | None
    scale: float | None
    learned: bool
    q: Any
    g: Any
    out: Any
    room: Any

    @classmethod
    def draw(cls, seed: int) -> "Case":
        rng = np.random.default_rng(seed)
        heads, kv_heads = ((1, 1), (2, 2), (2, 1))[rng.integers(3)]
        queries = KEYS // 2 if heads != kv_heads else KEYS
        sizes = dict(h=heads, q=queries, k=KEYS)
        drawing = Drawing(rng, sizes, {}, True)
        scores = []
        for _ in range(1 + drawing.likely(0.2)):
            drawing = Drawing(rng, sizes, {}, True)
            scores.append(Function(drawing.draw("f", int(rng.integers(1, 6))), drawing.arrays))
        if drawing.likely(0.3):  # a factor behind all, as of a learned temperature
            last = scores[-1]
            drawing.arrays = last.arrays
            last.expression = drawing.scaled(last.expression)
        drawing = Drawing(rng, sizes, {}, False)
        masked, mask = drawing.likely(0.7), drawing.draw("b", int(rng.integers(1, 4)))
        normal = lambda *n: np.float32(jnp.asarray(rng.standard_normal(n), jnp.bfloat16))
        case = cls(
            heads=heads,
            kv_heads=kv_heads,
            scores=scores,
            mask=Function(mask, drawing.arrays) if masked else None,
            hides=None,
            scale=SCALES[rng.integers(len(SCALES))],
            learned=drawing.likely(0.3),
            q=2 * normal(1, queries, heads, KEYS),
            g=normal(1, queries, heads, KEYS),
            out=normal(1, queries, heads, KEYS),
            room=rng.uniform(-1, 3, (heads, queries)).astype(np.float32),
        )
        if drawing.likely(0.15):
            drawing = Drawing(rng, sizes, {}, True)
            case.hides = Function(drawing.draw("b", 2), drawing.arrays)
        return case

    def __str__(self) -> str:
        also = "" if self.hides is None else f", shows {self.hides.expression}"
        seen = "" if self.mask is None else f", mask {self.mask.expression}"
        scores = "; ".join(str(x.expression) for x in self.scores)
        return f"{self.heads}/{self.kv_heads} heads, scale {self.scale}: {scores}{also}{seen}"

    @property
    def arrays(self) -> list[dict[str, Any]]:
        """The arrays of each score, of what hides pairs, and of the mask."""
        last = [self.hides, self.mask]
        return [x.arrays for x in self.scores] + [{} if x is None else x.arrays for x in last]

    def built(self, arrays: list[dict[str, Any]]) -> tuple[list[Any], Any]:
        """The scores and the mask as a user gives them, of these arrays."""
        scores = [x.wrapped(ScoreFn, a) for x, a in zip(self.scores, arrays)]
        if self.hides is not None:
            shows = dataclasses.replace(self.hides)
            fn = lambda *xs: jnp.where(shows.of_pair(arrays[-2], xs[:5], xs[5:]), xs[0], -jnp.inf)
            given = tuple(Operand(arrays[-2][n], _AXES[_place(n)]) for n in shows.operands)
            scores.append(ScoreFn(fn, arrays=given))
        mask = None if self.mask is None else self.mask.wrapped(MaskFn, arrays[-1])
        return scores, mask


@dataclasses.dataclass
class Exact:
    """A case in float64. Arrays are `[times, keys, heads, queries]`, with and without disturbances.

    **Arguments:**

    - `logits`, `rates`: the new logits, -inf where hidden, and their derivatives by the product of
        queries and keys.
    - `visible`: which pairs count.
    - `bad`: where float32 cannot be judged.
    - `noisy`: what disturbed them.
    """

    logits: Any
    rates: Any
    visible: Any
    bad: Any
    noisy: Noisy

    @classmethod
    def of(cls, case: Case, seed: int, dots: Any, noise: float = NOISE) -> "Exact":
        """The logits of a case, given products of queries and keys `[keys, heads, queries]`."""
        queries = case.q.shape[1]
        shape = (TIMES, KEYS, case.heads, queries)
        noisy = Noisy(np.random.default_rng([seed, 7]), shape, noise)
        indices = dict(
            b=np.zeros((1, 1, 1), int),
            k=np.arange(KEYS)[:, None, None],
            h=np.arange(case.heads)[:, None],
            q=np.arange(queries),
        )
        scale = KEYS**-0.5 if case.scale is None else np.float64(np.float32(case.scale))
        x = Number(np.broadcast_to(dots, shape), np.ones(shape))
        x = noisy.apply("mul", x, Number(np.full(shape, scale), np.zeros(shape)))
        mask = shows = np.ones(shape, bool)
        with np.errstate(all="ignore"):
            for score in case.scores:
                x = score.exact(noisy, indices, x)
            if case.hides is not None:
                shows = case.hides.exact(noisy, indices, x)
            if case.mask is not None:
                mask = case.mask.exact(noisy, indices)
            noisy.checked(x)
            bad = noisy.bad | (np.abs(x.value) > 1e4).any(0) | (shows != shows[:1]).any(0)
            logits = np.where(mask & shows, x.value, -np.inf)
        bad = np.broadcast_to(bad, shape[1:])
        # What is masked has derivatives at a visible pair, which must be good.
        bad = bad | ((bad & mask[0]).any() & ~mask[0])
        return cls(logits, x.rate, (mask & shows)[0], bad, noisy)


def turned(x: Any) -> Any:
    """Rows `[1, queries, heads, n]` as `[n, heads, queries]`."""
    return np.float64(x[0]).transpose(2, 1, 0)


@dataclasses.dataclass
class Given:
    """The gradients of a case whose logsumexps are given, where keys and values are unit vectors.

    **Arguments:**

    - `exact`: the case.
    - `lse`: the logsumexps `[heads, queries]`.
    - `p`, `pairs`: the probabilities, and the cotangents of the products of queries and keys.
    - `bad`: where these cannot be judged.
    """

    exact: Exact
    lse: Any
    p: Any
    pairs: Any
    bad: Any

    @classmethod
    def of(cls, case: Case, seed: int) -> "Given":
        exact = Exact.of(case, seed, turned(case.q))
        noisy, logits = exact.noisy, exact.logits
        with np.errstate(all="ignore"):
            top = np.where(exact.visible & ~exact.bad, logits[0], -np.inf).max(0)
            lse = np.float64(np.float32(top + case.room))
            sizes = 1 + np.abs(logits) + np.abs(lse)
            p = np.where(exact.visible, np.exp(logits - lse), 0)
            p = noisy.noise(p, np.where(np.isfinite(sizes), sizes, 1))
            terms = turned(case.g * case.out)
            delta = noisy.shift(terms.sum(0), np.abs(terms).sum(0))
            dp = noisy.noise(turned(case.g) - delta)
            pairs = np.where(exact.visible, noisy.noise(p * dp * exact.rates), 0)
        return cls(exact, lse, p, pairs, exact.bad | (lse == -np.inf) & exact.visible)


def dense(case: Case, seed: int, q: Any, k: Any, v: Any, g: Any) -> list[tuple[Any, Any, Any]]:
    """The output and the gradients by queries, keys and values of dense attention: for each its
    numbers, how far disturbances move them, and the size of what they are sums of.

    **Arguments:**

    - `q`, `k`, `v`, `g`: queries, keys, values and cotangents, `[tokens, heads, n]`.
    """
    group = case.heads // case.kv_heads
    k, v = (np.repeat(x, group, 1) for x in (k, v))
    exact = Exact.of(case, seed, np.einsum("khd,qhd->khq", k, q))
    logits = np.where(exact.bad & exact.visible, np.nan, exact.logits)
    with np.errstate(all="ignore"):
        top = logits.max(1, keepdims=True)
        p = np.exp(logits - np.where(np.isfinite(top), top, 0))
        total = p.sum(1, keepdims=True)
        p = p / np.where(total == 0, 1, total)
        dp = np.einsum("khd,qhd->khq", v, g)
        rates = np.where(exact.visible, exact.rates, 0)
        inner = dp - (p * dp).sum(1, keepdims=True)
        ds, sizes = p * inner * rates, p * (np.abs(dp) + np.abs(p * dp).sum(1, keepdims=True))
        sizes = sizes * np.abs(rates)
    found = []
    shared = lambda x: x.reshape(*x.shape[:2], case.kv_heads, group, -1).sum(3)
    for x, size, other, how in (
        (p, p, v, "zkhq,khd->zqhd"),
        (ds, sizes, k, "zkhq,khd->zqhd"),
        (ds, sizes, q, "zkhq,qhd->zkhd"),
        (p, p, g, "zkhq,qhd->zkhd"),
    ):
        y, most = np.einsum(how, x, other), np.einsum(how, size, np.abs(other))
        if how.endswith("zkhd"):
            y, most = shared(y), shared(most)
        found.append((y[0], np.abs(y - y[0]).max(0), most[0]))
    return found
