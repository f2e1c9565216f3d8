"""The reference: dense float64 NumPy attention with hand-derived derivatives.

Nothing here is shared with eqattn. Every function is plain NumPy on whatever array type it is
given, so the same formulas run in float64, longdouble, complex (complex-step derivatives) and on
the error-carrying and dual arrays of `bound.py`.

Shapes: `q [B,T,H,D]`, `k [B,S,K,D]`, `v [B,S,K,V]`, pair arrays `[B,H,T,S]`, `out [B,T,H,V]`, `lse
[B,T,H]`.

With `x = q.k`, `a = scale x`, `t = tanh(a/cap)`, `c = cap t`, `z = c + bias - slope |i-j| +
table[bucket] + row_features.column_features`, after which functions of a pair may follow, `p = exp(z -
lse)` over the visible keys, `lse` over visible keys and sinks, `r = keep / (1 - rate)`:

    out_i = sum_j r_ij p_ij v_j

Reverse mode, with cotangents `g` of out and `l` of lse:

    dp_ij = r_ij g_i.v_j        delta_i = sum_j p_ij dp_ij      dz_ij = p_ij (dp_ij - delta_i + l_i)
    dv_j = sum_i r_ij p_ij g_i  dsink_in = p_in (l_i - delta_i) da_ij = dz_ij (1 - t_ij^2)
    dq_i = sum_j scale da_ij k_j  dk_j = sum_i scale da_ij q_i  dscale = sum_ij da_ij x_ij
    dcap = sum_ij dz_ij (t_ij - (a_ij/cap)(1 - t_ij^2))

Forward mode: `z' = (1 - t^2) a' + cap' (t - (a/cap)(1 - t^2)) + bias' + ...`, `lse' = sum_j p_ij
z'_ij + sum_n p_in s'_n`, `out' = sum_j r_ij p_ij ((z'_ij - lse'_i) v_j + v'_j)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np


DIFFERENTIABLE = (
    *("q", "k", "v", "bias", "sinks", "scale", "cap", "slopes", "table"),
    *("row_features", "column_features"),
)


# Any function of the logits of all pairs: it returns the new ones and their pullback, which takes a
# cotangent to that of the old ones and to what else is learned. Without derivatives, that is None.
Score = Callable[[Any], tuple[Any, Callable[[Any], tuple[Any, Any]] | None]]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention problem. `None` switches a feature off."""

    q: Any  # [B,T,H,D]
    k: Any  # [B,S,K,D]
    v: Any  # [B,S,K,V]
    scale: Any  # scalar
    mask: Any = None  # bool, broadcastable to [B,H,T,S]
    bias: Any = None  # [B|1,H|1,T|1,S|1]
    cap: Any = None  # scalar
    slopes: Any = None  # [H], with distance [T,S]
    distance: Any = None
    table: Any = None  # [buckets,H], with bucket [T,S] int
    bucket: Any = None
    row_features: Any = None  # [B,T,1,F], with column_features [B,S,1,F]
    column_features: Any = None
    sinks: Any = None  # [H], [H,n] or [1,n]
    keep: Any = None  # bool [B,H,T,S]
    rate: float = 0.0
    scores: tuple[Score, ...] = ()  # of [B,H,T,S]; they follow all else that makes a logit

    def replace(self, **changes) -> Problem:
        return dataclasses.replace(self, **changes)

    def arguments(self) -> dict[str, Any]:
        """The differentiable arguments that are active."""
        return {n: getattr(self, n) for n in DIFFERENTIABLE if getattr(self, n) is not None}

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """B, T, S, H, K."""
        (b, t, h, _), (_, s, kv, _) = np.shape(self.q), np.shape(self.k)
        return b, t, s, h, kv


@dataclasses.dataclass(frozen=True)
class Forward:
    out: Any
    lse: Any
    max: Any
    den: Any
    # What the derivatives reuse, all [B,H,T,S] except p_sinks [B,H,T,n].
    x: Any
    a: Any
    t: Any
    z: Any  # the logits
    p: Any
    w: Any
    p_sinks: Any
    visible: Any
    pulls: list  # of `scores`


def plain(x) -> np.ndarray:
    """The real float array inside a complex, dual or error-carrying one."""
    while hasattr(x, "primal"):
        x = x.primal
    return np.real(x)


def _heads_last(x):  # [B,H,T] -> [B,T,H]
    return np.einsum("bht->bth", x)


def _grouped(x, kv: int):  # [B,T,H,...] -> [B,T,K,G,...]
    b, t, h, d = np.shape(x)
    return np.reshape(x, (b, t, kv, h // kv, d))


def _pairs_grouped(x, kv: int):  # [B,H,T,S] -> [B,K,G,T,S]
    b, h, t, s = np.shape(x)
    return np.reshape(x, (b, kv, h // kv, t, s))


def scores_of(rows, columns):
    """`rows [B,T,H,D] . columns [B,S,K,D] -> [B,H,T,S]` with grouped heads."""
    (b, t, h, _), (_, s, kv, _) = np.shape(rows), np.shape(columns)
    return np.reshape(np.einsum("btkgd,bskd->bkgts", _grouped(rows, kv), columns), (b, h, t, s))


def weighted_rows(pairs, columns):
    """`sum_s pairs[b,h,t,s] columns[b,s,k,:] -> [B,T,H,:]`."""
    (b, h, t, _), (_, _, kv, v) = np.shape(pairs), np.shape(columns)
    return np.reshape(
        np.einsum("bkgts,bskv->btkgv", _pairs_grouped(pairs, kv), columns), (b, t, h, v)
    )


def weighted_columns(pairs, rows, kv: int):
    """`sum_t,g pairs[b,h,t,s] rows[b,t,h,:] -> [B,S,K,:]`."""
    return np.einsum("bkgts,btkgv->bskv", _pairs_grouped(pairs, kv), _grouped(rows, kv))


def _sinks_matrix(problem: Problem):
    sinks = problem.sinks
    return np.reshape(sinks, (np.shape(sinks)[0], -1)) if np.ndim(plain(sinks)) == 1 else sinks


def _clean(problem: Problem, visible) -> Problem:
    """Masked content is never read: zero the rows that see nothing and the columns nothing sees."""
    b, t, s, h, kv = problem.sizes
    row = visible.any(-1).transpose(0, 2, 1)[..., None]
    column = visible.reshape(b, kv, h // kv, t, s).any((2, 3)).transpose(0, 2, 1)[..., None]
    return problem.replace(
        q=np.where(row, problem.q, 0.0),
        k=np.where(column, problem.k, 0.0),
        v=np.where(column, problem.v, 0.0),
    )


def _prepare(problem: Problem):
    b, t, s, h, _ = problem.sizes
    visible = np.broadcast_to(True if problem.mask is None else problem.mask, (b, h, t, s))
    return _clean(problem, visible), visible


def forward(problem: Problem) -> Forward:
    problem, visible = _prepare(problem)
    x = np.where(visible, scores_of(problem.q, problem.k), 0.0)
    a = problem.scale * x
    t = None
    z = a
    if problem.cap is not None:
        t = np.tanh(a / problem.cap)
        z = problem.cap * t
    if problem.bias is not None:
        z = z + problem.bias
    if problem.slopes is not None:
        z = z - np.reshape(problem.slopes, (1, -1, 1, 1)) * problem.distance
    if problem.table is not None:
        z = z + np.einsum("tsn,nh->hts", _one_hot(problem), problem.table)[None]
    if problem.row_features is not None:
        z = z + scores_of(problem.row_features, problem.column_features)
    pulls = []
    for score in problem.scores:
        z, pull = score(z)
        pulls.append(pull)

    # The maximum is a gauge: any value gives the same answer, so it is a plain constant here.
    top = np.max(np.where(visible, plain(z), -np.inf), axis=-1, initial=-np.inf)
    if problem.sinks is not None:
        sinks = _sinks_matrix(problem)
        top = np.maximum(top, np.max(plain(sinks), axis=-1)[None, :, None])
    safe_max = np.where(np.isfinite(top), top, 0.0)

    e = np.where(visible, np.exp(np.where(visible, z - safe_max[..., None], 0.0)), 0.0)
    den = np.sum(e, axis=-1)
    e_sinks = None
    if problem.sinks is not None:
        e_sinks = np.exp(np.reshape(sinks, (1, *_pad_sink_shape(sinks))) - safe_max[..., None])
        den = den + np.sum(e_sinks, axis=-1)
    alive = plain(den) > 0
    safe = np.where(alive, den, 1.0)
    p = e / safe[..., None]
    w = p if problem.keep is None else np.where(problem.keep, p, 0.0) * (1 / (1 - problem.rate))
    lse = np.where(alive, np.log(safe) + safe_max, -np.inf)
    return Forward(
        out=weighted_rows(w, problem.v),
        lse=_heads_last(lse),
        max=top.transpose(0, 2, 1),
        den=_heads_last(den),
        x=x,
        a=a,
        t=t,
        z=z,
        p=p,
        w=w,
        p_sinks=None if e_sinks is None else e_sinks / safe[..., None],
        visible=visible,
        pulls=pulls,
    )


def _pad_sink_shape(sinks):
    h, n = np.shape(sinks)
    return h, 1, n


def _one_hot(problem: Problem) -> np.ndarray:
    return np.eye(np.shape(problem.table)[0])[problem.bucket]


def _unbroadcast(x, shape):
    axes = tuple(
        i for i, (n, m) in enumerate(zip(np.shape(x), shape, strict=True)) if m == 1 and n != 1
    )
    return np.reshape(np.sum(x, axis=axes), shape) if axes else x


def vjp(problem: Problem, ct_out, ct_lse) -> dict[str, Any]:
    """Gradients of `<ct_out, out> + <ct_lse, lse>` for every active argument, and for what the
    `scores` learn, a list in their order. Rows with lse = -inf get none.
    """
    problem, visible = _prepare(problem)
    f = forward(problem)
    kv = problem.sizes[-1]
    ct_lse = np.einsum("bth->bht", ct_lse)
    dp = scores_of(ct_out, problem.v)
    if problem.keep is not None:
        dp = np.where(problem.keep, dp, 0.0) * (1 / (1 - problem.rate))
    dp = np.where(visible, dp, 0.0)
    delta = np.einsum("bhts,bhts->bht", f.p, dp)
    row = ct_lse - delta
    dz = f.p * (dp + row[..., None])
    grads = {"v": weighted_columns(f.w, ct_out, kv)}
    if problem.scores:
        grads["scores"] = []
    for pull in reversed(f.pulls):
        dz, learned = pull(dz)
        dz = np.where(visible, dz, 0.0)
        grads["scores"].insert(0, learned)

    da = dz
    if problem.cap is not None:
        slope = 1.0 - f.t * f.t
        da = dz * slope
        grads["cap"] = np.sum(dz * (f.t - f.a / problem.cap * slope))
    dx = problem.scale * da
    grads["q"] = weighted_rows(dx, problem.k)
    grads["k"] = weighted_columns(dx, problem.q, kv)
    grads["scale"] = np.sum(da * f.x)
    if problem.bias is not None:
        grads["bias"] = _unbroadcast(dz, np.shape(problem.bias))
    if problem.slopes is not None:
        grads["slopes"] = -np.sum(dz * problem.distance, axis=(0, 2, 3))
    if problem.table is not None:
        grads["table"] = np.einsum("bhts,tsn->nh", dz, _one_hot(problem))
    if problem.row_features is not None:
        shared = np.sum(dz, axis=(1,))
        b, t, s = np.shape(shared)
        shared = np.reshape(shared, (b, 1, t, s))
        grads["row_features"] = weighted_rows(shared, problem.column_features)
        grads["column_features"] = weighted_columns(shared, problem.row_features, 1)
    if problem.sinks is not None:
        pairs = np.sum(f.p_sinks * row[..., None], axis=(0, 2))
        grads["sinks"] = np.reshape(
            _unbroadcast(pairs, np.shape(_sinks_matrix(problem))), np.shape(problem.sinks)
        )
    return grads


def jvp(problem: Problem, tangents: dict[str, Any]) -> dict[str, Any]:  # noqa: C901 (a switch over kinds)
    """Tangents of out and lse. `tangents` holds any subset of the active arguments. Of problems with
    `scores`, take a complex step of `forward`.
    """
    assert not problem.scores
    problem, visible = _prepare(problem)
    f = forward(problem)
    dot = {n: tangents[n] for n in tangents if tangents[n] is not None}
    row = visible.any(-1).transpose(0, 2, 1)[..., None]
    pieces = [np.zeros(())]
    if "q" in dot:
        pieces.append(problem.scale * scores_of(np.where(row, dot["q"], 0.0), problem.k))
    if "k" in dot:
        pieces.append(problem.scale * scores_of(problem.q, dot["k"]))
    if "scale" in dot:
        pieces.append(dot["scale"] * f.x)
    da = sum(pieces[1:], pieces[0])
    dz = da
    if problem.cap is not None:
        slope = 1.0 - f.t * f.t
        dz = slope * da
        if "cap" in dot:
            dz = dz + dot["cap"] * (f.t - f.a / problem.cap * slope)
    if "bias" in dot:
        dz = dz + dot["bias"]
    if "slopes" in dot:
        dz = dz - np.reshape(dot["slopes"], (1, -1, 1, 1)) * problem.distance
    if "table" in dot:
        dz = dz + np.einsum("tsn,nh->hts", _one_hot(problem), dot["table"])[None]
    if "row_features" in dot:
        dz = dz + scores_of(dot["row_features"], problem.column_features)
    if "column_features" in dot:
        dz = dz + scores_of(problem.row_features, dot["column_features"])
    dz = np.where(visible, dz, 0.0)
    dlse = np.einsum("bhts,bhts->bht", f.p, dz)
    if "sinks" in dot:
        ds = np.reshape(dot["sinks"], np.shape(_sinks_matrix(problem)))
        dlse = dlse + np.sum(f.p_sinks * np.reshape(ds, (1, *_pad_sink_shape(ds))), axis=-1)
    dw = f.w * (dz - dlse[..., None])
    out = weighted_rows(dw, problem.v)
    if "v" in dot:
        out = out + weighted_rows(f.w, dot["v"])
    return {"out": out, "lse": _heads_last(dlse)}


def hvp(problem: Problem, ct_out, ct_lse, tangents: dict[str, Any]) -> dict[str, Any]:
    """Derivative of the gradient along `tangents`, by complex step: exact to rounding, as no
    difference is taken.
    """
    step = 1e-40
    moved = problem.replace(**{n: getattr(problem, n) + 1j * step * t for n, t in tangents.items()})
    return {n: np.imag(g) / step for n, g in vjp(moved, ct_out, ct_lse).items()}


# --- other forms of the arguments ---


def of_any_axes(q, k, v, mask=True, scores=(), keep=None, **features) -> Problem:
    """The problem of `q [*b,T,H,D]`, `k [*b,S,K,D]` and `v [*b,S,K,V]`, whose leading axes become one.
    What is of pairs, and what `scores` get and return, is `[*b,H,T,S]`.
    """
    lead, (t, h, _), s = np.shape(q)[:-3], np.shape(q)[-3:], np.shape(k)[-3]
    b, pairs = int(np.prod(lead)), (*lead, h, t, s)
    flat = lambda x: np.reshape(x, (b, h, t, s))

    def on_pairs(score):
        def apply(z):
            z, pull = score(np.reshape(z, pairs))

            def flat_pull(g):
                g, learned = pull(np.reshape(g, pairs))
                return flat(g), learned

            return flat(z), flat_pull

        return apply

    q, k, v = (np.reshape(x, (b, *np.shape(x)[-3:])) for x in (q, k, v))
    mask, keep = (None if x is None else flat(np.broadcast_to(x, pairs)) for x in (mask, keep))
    scores = tuple(map(on_pairs, scores))
    return Problem(q=q, k=k, v=v, mask=mask, scores=scores, keep=keep, **features)


def plain_problem(
    q, k, v, transform=None, visible=True, sinks=None, keep=None, rate=0.0
) -> Problem:
    """A problem of arrays with any leading axes. `transform` makes logits of products; by default, it
    divides these by the root of D.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    sinks = None if sinks is None else np.asarray(sinks, np.float64)
    scores = () if transform is None else (lambda z: (transform(z), None),)
    scale = np.shape(q)[-1] ** -0.5 if transform is None else 1.0
    return of_any_axes(q, k, v, visible, scores, keep, rate=rate, scale=scale, sinks=sinks)


def exact(q, *args, **kwargs):
    """Output `[*b,T,H,V]`, logsumexp `[*b,T,H]` and weights `[*b,H,T,S]` of a `plain_problem`."""
    f, lead = forward(plain_problem(q, *args, **kwargs)), np.shape(q)[:-3]
    return tuple(np.reshape(x, (*lead, *np.shape(x)[1:])) for x in (f.out, f.lse, f.w))
