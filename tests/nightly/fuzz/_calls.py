"""A call of attention drawn at random: what eqattn is given, and what the oracle makes of it.

The structure of a call is drawn once, and its values as often as wanted. Values are a pair of
PyTrees: `floats`, which are differentiated, and `others`, which are integers and booleans.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eqattn as eq

from . import _features as features, _oracle as oracle
from ._features import Sizes


Values = tuple[dict[str, Any], dict[str, Any]]
HEADS = (
    *((1, 1), (2, 1), (2, 2), (4, 2), (4, 1), (6, 3), (6, 2), (3, 3), (8, 4), (4, 4), (8, 2)),
    (5, 1),
)
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 8, 11, 12, 13, 16, 16, 17, 24)


def draw_sizes(rng: np.random.Generator, **given: Any) -> Sizes:
    """Small sizes of all kinds: primes, ones, queries and keys of other lengths."""
    pick = lambda xs: xs[int(rng.integers(len(xs)))]
    heads, kv = pick(HEADS)
    t = pick(LENGTHS)
    s = t if rng.integers(3) else pick((0, *LENGTHS))
    found = dict(
        lead=pick(((), (2,), (2,), (3,), (2, 2), (1,), (1, 3))),
        t=t,
        s=s,
        heads=heads,
        kv=kv,
        d=int(rng.integers(1, 9)),
        v=int(rng.integers(1, 9)),
    )
    return Sizes(**(found | given))


class Call:
    """One drawn call.

    **Arguments:**

    - `rng`: where the structure is drawn from.
    - `sizes`: the sizes, or None to draw them.
    - `terms`: which masks may be drawn.
    - `places`: where the tokens of arrays stand, `(queries, keys)`: those of a layout; None means
        `0, 1, ...`. Then positions are not given to the call.

    Values are drawn in float64. `dtype` is that of queries, keys and values, and `learned` that of
    all other floats: `narrow` sets both. Then the oracle takes the rounded numbers, and `condition`
    becomes the largest change of any result, as `worst` measures it, if each float is changed by
    half a unit in the last place: no algorithm that rounds can be asked for less.
    """

    dtype: Any = np.dtype(np.float64)
    learned: Any = np.dtype(np.float64)
    condition: float = 0.0

    def __init__(
        self,
        rng: np.random.Generator,
        sizes: Sizes | None = None,
        terms: Any = features.TERMS,
        places: Any = None,
        positions: bool = True,
        plain: bool = False,
    ):
        self.sizes = z = draw_sizes(rng) if sizes is None else sizes
        self.places = places
        masked = bool(rng.integers(6))
        self.mask = features.draw_mask(rng, z, int(rng.integers(3)), terms) if masked else None
        self.scores = () if plain else features.draw_scores(rng, z)
        self.bias = None if plain or rng.integers(3) else features.broadcastable(rng, z.pairs)
        self.sinks = ((), (z.heads,), (z.heads, 2), (1, 3))[max(int(rng.integers(-3, 4)), 0)]
        # None, a number, or an array that is learned.
        self.scale, self.cap = (max(int(rng.integers(-1, 3)), 0) for _ in range(2))
        kinds = ("none", "none", "offset", "offsets", "q", "k", "both")
        kind = kinds[int(rng.integers(len(kinds)))] if positions and places is None else "none"
        self.positions = kind
        self.shared_positions = bool(rng.integers(2))

    def __repr__(self) -> str:
        z = self.sizes
        parts = [f"{z}", f"mask={self.mask and self.mask.name}", f"positions={self.positions}"]
        parts.append(f"scores={[x.name for x in self.scores]} bias={self.bias} sinks={self.sinks}")
        parts.append(f"scale={self.scale} cap={self.cap}")
        return " ".join(parts)

    def values(self, rng: np.random.Generator) -> Values:
        """Draws the values, in float64."""
        z, normal = self.sizes, rng.standard_normal
        floats: dict[str, Any] = {
            "query": normal((*z.lead, z.t, z.heads, z.d)),
            "key_": normal((*z.lead, z.s, z.kv, z.d)),
            "value": normal((*z.lead, z.s, z.kv, z.v)),
            "scores": [x.arrays(rng) for x in self.scores],
        }
        if self.bias is not None:
            floats["bias"] = normal(self.bias)
        if self.sinks:
            floats["sinks"] = normal(self.sinks)
        if self.scale == 2:
            floats["scale"] = np.float64(rng.uniform(0.1, 1))
        if self.cap == 2:
            floats["cap"] = np.float64(rng.uniform(1, 4))
        others = {"mask": () if self.mask is None else self.mask.arrays(rng)}
        rounded = {n: jax.tree.map(lambda x, n=n: np.asarray(x, self._dtype(n)), x)
                   for n, x in floats.items()}  # fmt: skip
        return rounded, others | self._drawn_positions(rng)

    def narrow(self, dtype: Any, learned: Any) -> None:
        """Sets the dtypes of floats."""
        self.dtype, self.learned = np.dtype(dtype), np.dtype(learned)

    def _dtype(self, name: str) -> Any:
        return self.dtype if name in ("query", "key_", "value") else self.learned

    def _observe(self, of: Callable[[Values], Any], values: Values) -> Any:
        """What `of` finds of values in float64. It is also asked how much it changes if these are
        rounded.
        """
        floats, others = values
        exact = jax.tree.map(widened, floats)
        found = of((exact, others))
        if self.dtype != np.float64:
            rng, half = np.random.default_rng(0), 0.5 * float(jnp.finfo(self.dtype).eps)
            by = lambda x: x * (1 + half * rng.choice([-1.0, 1.0], np.shape(x)))
            # With seed 19 in float32, the largest of three draws is half of that of eight.
            for _ in range(8):
                again = of((jax.tree.map(by, exact), others))
                self.condition = max(self.condition, worst(_derived(again), _derived(found))[0])
        return found

    def _drawn_positions(self, rng: np.random.Generator) -> dict[str, Any]:
        z, kind = self.sizes, self.positions
        lead = () if self.shared_positions else z.lead
        if kind in ("offset", "offsets"):
            shape = z.lead if kind == "offsets" else ()
            return {"q_offset": np.asarray(rng.integers(-3, z.s + 2, shape), np.int32)}
        found = {}
        for name, n in (("q_positions", z.t), ("kv_positions", z.s)):
            if kind in (name[0], "both"):
                found[name] = rng.integers(-2, max(z.t, z.s) + 3, (*lead, n)).astype(np.int32)
        return found

    def metadata(self, floats: dict[str, Any], **options: Any) -> Any:
        """The metadata of a strategy for this call."""
        return eq.AttentionMetadata(
            softmax_scale={0: None, 1: 0.4}.get(self.scale, floats.get("scale")),
            logits_soft_cap={0: None, 1: 2.5}.get(self.cap, floats.get("cap")),
            softmax_aux=floats.get("sinks"),
            **options,
        )

    def run(
        self, values: Values, strategy: Callable[[Any], Any], **options: Any
    ) -> tuple[Any, Any]:
        """The output and logsumexp of eqattn. `strategy` makes one of metadata."""
        floats, others = values
        mask = None if self.mask is None else self.mask.build(others["mask"])
        score = [x.build(a) for x, a in zip(self.scores, floats["scores"], strict=True)]
        places = {n: x for n, x in others.items() if n != "mask"}
        found = eq.attention(
            floats["query"],
            floats["key_"],
            floats["value"],
            strategy(self.metadata(floats, **options)),
            mask=mask,
            bias=floats.get("bias"),
            score=score or None,
            return_logsumexp=True,
            **places,
        )
        return found.attention_outputs, found.logsumexp

    def solve(self, values: Values) -> oracle.Found:
        """What the oracle finds."""
        if self.dtype != np.float64:
            pair = lambda x: (x.output, x.logsumexp)
            self._observe(lambda x: pair(self._solve(x)), values)
        return self._solve(values)

    def _solve(self, values: Values) -> oracle.Found:
        floats, others = jax.tree.map(widened, values[0]), values[1]
        z = self.sizes
        q, k = (None, None) if self.places is None else self.places
        pairs = oracle.Pairs.of(
            z.lead,
            z.heads,
            z.t,
            z.s,
            others.get("q_positions", q),
            others.get("kv_positions", k),
            others.get("q_offset", 0),
        )
        visible = True if self.mask is None else self.mask.define(others["mask"], pairs)
        chain = [] if not self.cap else [oracle.soft_cap(floats.get("cap", 2.5))]
        if self.bias is not None:
            chain.append(oracle.bias(floats["bias"]))
        chain += [x.define(a) for x, a in zip(self.scores, floats["scores"], strict=True)]
        with np.errstate(all="ignore"):
            return oracle.attend(
                floats["query"],
                floats["key_"],
                floats["value"],
                visible,
                pairs,
                scale={0: None, 1: 0.4}.get(self.scale, floats.get("scale")),
                scores=chain,
                sinks=floats.get("sinks"),
            )

    def gradients(self, values: Values, cotangents: tuple[Any, Any]) -> dict[str, Any]:
        """The oracle's gradients of `floats`, of rows that see something."""
        both = {"values": values[0], "cotangents": cotangents}
        find = lambda x: self._gradients((x[0]["values"], x[1]), x[0]["cotangents"])
        return self._observe(find, (both, values[1]))

    def _gradients(self, values: Values, cotangents: tuple[Any, Any]) -> dict[str, Any]:
        floats, _ = values
        found = self._solve(values)
        g_out, g_lse = map(widened, cotangents)
        with np.errstate(all="ignore"):
            pulled = found.pull(g_out, np.where(np.isneginf(found.logsumexp.real), 0, g_lse))
        scores = pulled.pop("scores")
        if self.cap:
            pulled["cap"] = scores.pop(0)[0]
        if self.bias is not None:
            pulled["bias"] = scores.pop(0)[0]
        pulled["scores"] = [
            jax.tree.unflatten(jax.tree.structure(a), list(g))
            for a, g in zip(floats["scores"], scores, strict=True)
        ]
        return {name: pulled[name] for name in floats}

    def cotangents(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        z = self.sizes
        sums = np.float64 if self.dtype == np.float64 else np.float32
        return (
            rng.standard_normal((*z.lead, z.t, z.heads, z.v)).astype(self.dtype),
            rng.standard_normal((*z.lead, z.t, z.heads)).astype(sums),
        )


def moved(values: Values, directions: dict[str, Any]) -> Values:
    """The values a complex step along directions."""
    floats, others = values
    step = lambda x, t: widened(x) + 1j * oracle.STEP * widened(t)
    return jax.tree.map(step, floats, directions), others


def _derived(tree: Any) -> Any:
    """The derivatives along the directions of a complex step; real numbers as they are."""
    return jax.tree.map(lambda x: x.imag / oracle.STEP if np.iscomplexobj(x) else x, tree)


def widened(x: Any) -> Any:
    """An array in float64, or complex as it is."""
    return x if np.iscomplexobj(x) else np.asarray(x, np.float64)


def as_jax(tree: Any) -> Any:
    """NumPy arrays as those of JAX, in the dtypes that are enabled."""
    return jax.tree.map(jnp.asarray, tree)


def worst(got: Any, want: Any) -> tuple[float, str]:
    """The largest error of any leaf, relative to the largest number of the leaf or to 1, and
    where it is. NaN, or an infinity that is not wanted, is infinite.
    """
    largest = (0.0, "")
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    for (path, x), y in pairs:
        x, y = np.asarray(x).astype(np.float64), np.asarray(y)
        name = jax.tree_util.keystr(path)
        if x.shape != y.shape:
            return np.inf, f"{name}: shape {x.shape}, wanted {y.shape}"
        same = (x == y) | ((x != x) & (y != y))
        with np.errstate(invalid="ignore"):
            error = np.where(same, 0, abs(x - y))
        error = np.where(np.isnan(error), np.inf, error)
        size = max(1.0, np.max(abs(y), initial=0, where=np.isfinite(y)))
        found = float(np.max(error, initial=0)) / size
        largest = max(largest, (found, name))
    return largest
