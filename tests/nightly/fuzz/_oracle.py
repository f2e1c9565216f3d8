"""The scores of drawn calls as functions of the oracle, `tests/matrix/oracle.py`, each with a pullback
written by hand.

All of it is holomorphic where it is smooth. So complex inputs give exact derivatives along a
direction: the imaginary part of an output is a tangent, and that of a pullback a Hessian-vector
product.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matrix import oracle


STEP = 1e-30  # of a complex step: squares vanish, and nothing is subtracted


@dataclass
class Pairs:
    """Where pairs lie: integers that broadcast to `[*b, h, t, s]`, and the shape itself."""

    b: np.ndarray
    h: np.ndarray
    q: np.ndarray
    k: np.ndarray
    shape: tuple[int, ...]

    @classmethod
    def of(
        cls,
        batch: tuple[int, ...],
        heads: int,
        tokens: int,
        keys: int,
        q_positions: Any = None,
        kv_positions: Any = None,
        q_offset: Any = 0,
    ) -> "Pairs":
        """The pairs of a call; `b` is the flattened index of the leading axes."""
        b = np.arange(int(np.prod(batch))).reshape(*batch, 1, 1, 1)
        q = np.arange(tokens) if q_positions is None else np.asarray(q_positions)
        k = np.arange(keys) if kv_positions is None else np.asarray(kv_positions)
        q = q + np.asarray(q_offset)[..., None]
        return cls(
            b,
            np.arange(heads)[:, None, None],
            q[..., None, :, None],
            k[..., None, None, :],
            (*batch, heads, tokens, keys),
        )


def summed_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The transpose of broadcasting `shape` to that of `x`."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    ones = tuple(i for i, n in enumerate(shape) if n == 1 and x.shape[i] != 1)
    return x.sum(axis=ones, keepdims=True)


# A score maps logits and pairs to logits and a pullback. That takes the cotangent of the result
# to those of the logits and of the parameters, in the order in which the score holds them.
Pull = Callable[[np.ndarray], tuple[np.ndarray, list[np.ndarray]]]
Score = Callable[[np.ndarray, Pairs], tuple[np.ndarray, Pull]]


def bias(array: np.ndarray) -> Score:
    """Adds an array that broadcasts to the logits."""

    def apply(x: np.ndarray, pairs: Pairs) -> tuple[np.ndarray, Pull]:
        return x + array, lambda g: (g, [summed_to(g, array.shape)])

    return apply


def soft_cap(cap: Any) -> Score:
    """`cap * tanh(x / cap)`."""

    def apply(x: np.ndarray, pairs: Pairs) -> tuple[np.ndarray, Pull]:
        t = np.tanh(x / cap)

        def pull(g: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
            slope = 1 - t * t
            return g * slope, [(g * (t - slope * x / cap)).sum()]

        return cap * t, pull

    return apply


def alibi(slopes: np.ndarray) -> Score:
    """`x - slope[h] * |q - k|`."""

    def apply(x: np.ndarray, pairs: Pairs) -> tuple[np.ndarray, Pull]:
        far = np.abs(pairs.q - pairs.k)

        def pull(g: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
            along = -(g * far)
            return g, [along.reshape(-1, *along.shape[-3:]).sum(axis=(0, 2, 3))]

        return x - slopes[:, None, None] * far, pull

    return apply


def table_of_distances(table: np.ndarray, index: Callable[[Pairs], np.ndarray]) -> Score:
    """`x + table[index, h]`, of a table `[n, heads]`; as T5's."""

    def apply(x: np.ndarray, pairs: Pairs) -> tuple[np.ndarray, Pull]:
        at = np.broadcast_to(index(pairs), pairs.shape)
        head = np.broadcast_to(pairs.h, pairs.shape)

        def pull(g: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
            total = np.zeros(table.shape, g.dtype)
            np.add.at(total, (at, head), g)
            return g, [total]

        return x + table[at, head], pull

    return apply


def logarithmic(strength: np.ndarray) -> Score:
    """`x - strength * log1p(|q - k|)`, of one learned number."""

    def apply(x: np.ndarray, pairs: Pairs) -> tuple[np.ndarray, Pull]:
        far = np.log1p(np.abs(pairs.q - pairs.k))
        return x - strength * far, lambda g: (g, [-(g * far).sum()])

    return apply


def squared(rows: np.ndarray, columns: np.ndarray) -> Score:
    """`x + rows[b, q] * columns[b, k] * x ** 2`: nonlinear, and with operands of both sides."""

    def apply(x: np.ndarray, pairs: Pairs) -> tuple[np.ndarray, Pull]:
        r, c = rows[..., None, :, None], columns[..., None, None, :]

        def pull(g: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
            along = g * x * x
            to_rows = summed_to(along * c, r.shape)[..., 0, :, 0]
            to_columns = summed_to(along * r, c.shape)[..., 0, 0, :]
            return g * (1 + 2 * r * c * x), [to_rows, to_columns]

        return x + r * c * x * x, pull

    return apply


def second_product(left: np.ndarray, right: np.ndarray) -> Score:
    """`x + left[b, q] . right[b, k]`, a product of features."""

    def apply(x: np.ndarray, pairs: Pairs) -> tuple[np.ndarray, Pull]:
        def pull(g: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
            g_pairs = g.sum(axis=-3)
            to_left = np.einsum("...ts,...sf->...tf", g_pairs, right)
            to_right = np.einsum("...ts,...tf->...sf", g_pairs, left)
            return g, [to_left, to_right]

        return x + np.einsum("...tf,...sf->...ts", left, right)[..., None, :, :], pull

    return apply


@dataclass
class Found:
    """The results, `[*b, t, h, v]` and `[*b, t, h]`, and the pullback of their cotangents."""

    output: np.ndarray
    logsumexp: np.ndarray
    pull: Callable[..., dict[str, Any]]


def attend(
    query: np.ndarray,
    key_: np.ndarray,
    value: np.ndarray,
    visible: np.ndarray,
    pairs: Pairs,
    *,
    scale: Any = None,
    scores: Sequence[Score] = (),
    sinks: np.ndarray | None = None,
) -> Found:
    """Attention over all pairs at once.

    **Arguments:**

    - `visible`: booleans that broadcast to `[*b, h, t, s]`.
    - `scores`: what follows the scaled product, in order: cap, bias, then the scores of a call.
    - `sinks`: those of each head, or of all heads.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    chain = [lambda x, score=score: score(x, pairs) for score in scores]
    problem = oracle.of_any_axes(query, key_, value, visible, chain, scale=scale, sinks=sinks)
    found, lead = oracle.forward(problem), query.shape[:-3]
    of_batch = lambda x: np.reshape(x, (*lead, *x.shape[1:]))
    output, lse = of_batch(found.out), of_batch(found.lse)

    def pull(g_output: np.ndarray, g_lse: Any = 0.0) -> dict[str, Any]:
        g_lse = np.broadcast_to(g_lse, lse.shape)
        cts = (np.reshape(g, x.shape) for g, x in ((g_output, found.out), (g_lse, found.lse)))
        grads = {"scores": [], "sinks": None, **oracle.vjp(problem, *cts)}
        tokens = {"query": "q", "key_": "k", "value": "v"}
        return grads | {name: of_batch(grads[n]) for name, n in tokens.items()}

    return Found(output, lse, pull)
