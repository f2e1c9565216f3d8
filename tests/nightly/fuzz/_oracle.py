"""Dense attention in NumPy's float64, with a pullback written by hand: what the fuzzers compare with.

It shares no code with eqattn, nor with `tests/matrix/oracle.py`, whose axes it extends: any
leading axes, positions of each row and key, a chain of scores with parameters, max logits. All of
it is holomorphic where it is smooth. So complex inputs give exact derivatives along a direction:
the imaginary part of an output is a tangent, and that of a pullback a Hessian-vector product.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


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


def t5_buckets(distance: np.ndarray, buckets: int, furthest: int, both: bool) -> np.ndarray:
    """The bucket of `k - q`: exact up to half of the buckets, then logarithmic."""
    first = 0
    if both:
        buckets //= 2
        first = np.where(distance > 0, buckets, 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = buckets // 2
    ratio = np.log(np.maximum(distance, 1) / exact) / np.log(furthest / exact)
    # At a border the logarithm is an integer, which rounding must not move below it.
    far = np.minimum(exact + (ratio * (buckets - exact) + 1e-9).astype(int), buckets - 1)
    return first + np.where(distance < exact, distance, far)


def table_of_distances(table: np.ndarray, index: Callable[[Pairs], np.ndarray]) -> Score:
    """`x + table[index, h]`, of a table `[n, heads]`; that of T5, by `t5_buckets`."""

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
    max_logits: np.ndarray
    weights: np.ndarray
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
    factor: np.ndarray | None = None,
) -> Found:
    """Attention over all pairs at once.

    **Arguments:**

    - `visible`: booleans that broadcast to `[*b, h, t, s]`.
    - `scores`: what follows the scaled product, in order: cap, bias, then the scores of a call.
    - `sinks`: `[h, n]`, or `[1, n]` for all heads.
    - `factor`: what probabilities are multiplied with in the numerator (that of dropout).
    """
    heads, kv_heads = query.shape[-2], key_.shape[-2]
    group = heads // kv_heads
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    visible = np.broadcast_to(visible, pairs.shape)
    # What nobody sees may be NaN or infinite: it must reach nothing, so it is replaced by 0.
    seen_k = visible.reshape(*visible.shape[:-3], kv_heads, group, *visible.shape[-2:])
    seen_k = np.moveaxis(seen_k.any(axis=(-3, -2)), -1, -2)[..., None]
    seen_q = np.moveaxis(visible.any(axis=-1), -1, -2)[..., None]
    q, k, v = np.where(seen_q, query, 0), np.where(seen_k, key_, 0), np.where(seen_k, value, 0)
    k_all, v_all = np.repeat(k, group, axis=-2), np.repeat(v, group, axis=-2)

    product = np.einsum("...thd,...shd->...hts", q, k_all)
    logits, pulls = scale * product, []
    for score in scores:
        logits, pull = score(logits, pairs)
        pulls.append(pull)
    logits = np.where(visible, logits, -np.inf)
    sink = np.zeros((heads, 0)) if sinks is None else sinks
    sink = np.broadcast_to(sink, (heads, sink.shape[-1]))
    sink_logits = np.broadcast_to(sink[:, None, :], (*logits.shape[:-1], sink.shape[-1]))
    both = np.concatenate([logits, sink_logits], axis=-1)
    empty = ~np.isfinite(both.real).any(axis=-1, keepdims=True)
    top = np.where(empty, 0, both.real.max(axis=-1, keepdims=True, initial=-np.inf))
    unnormalised = np.where(np.isneginf(both.real), 0, np.exp(both - top))
    total = unnormalised.sum(axis=-1, keepdims=True)
    p_both = unnormalised / np.where(empty, 1, total)
    p, p_sink = p_both[..., : logits.shape[-1]], p_both[..., logits.shape[-1] :]
    kept = p if factor is None else p * factor
    output = np.einsum("...hts,...shv->...thv", kept, v_all)
    lse = np.where(empty, -np.inf, np.log(np.where(empty, 1, total)) + top)[..., 0]
    max_logits = logits.real.max(axis=-1, initial=-np.inf)

    def pull_all(g_output: np.ndarray, g_lse: np.ndarray | None = None) -> dict[str, Any]:
        g_p = np.einsum("...thv,...shv->...hts", g_output, v_all)
        g_p = g_p if factor is None else g_p * factor
        inner = (g_p * p).sum(axis=-1, keepdims=True)
        g_rows = 0 if g_lse is None else np.moveaxis(g_lse, -1, -2)[..., None]
        g = p * (g_p - inner + g_rows)
        g_sink = p_sink * (-inner + g_rows)
        g_v = np.einsum("...hts,...thv->...shv", kept, g_output)
        parameters: list[list[np.ndarray]] = []
        for pull in reversed(pulls):
            g, found = pull(g)
            g = np.where(visible, g, 0)
            parameters.insert(0, found)
        g_k = np.einsum("...hts,...thd->...shd", scale * g, q)
        grouped = (*key_.shape[:-1], group)
        sink_shape = () if sinks is None else (heads, sinks.shape[-1])
        return {
            "query": np.einsum("...hts,...shd->...thd", scale * g, k_all),
            "key_": g_k.reshape(*grouped, g_k.shape[-1]).sum(axis=-2),
            "value": g_v.reshape(*grouped, g_v.shape[-1]).sum(axis=-2),
            "scale": (g * product).sum(),
            "scores": parameters,
            "sinks": None
            if sinks is None
            else summed_to(
                g_sink.sum(axis=tuple(range(g_sink.ndim - 3))).sum(axis=-2).reshape(sink_shape),
                sinks.shape,
            ),
        }

    return Found(output, np.moveaxis(lse, -2, -1), np.moveaxis(max_logits, -2, -1), p, pull_all)
