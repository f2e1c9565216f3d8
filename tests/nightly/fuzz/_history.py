"""What a cache should hold, and attention over it, in NumPy's float64.

Each row is a list of what happened to it: which token stands at which position. Nothing is shared
with eqattn, neither arrays nor code.
"""

import dataclasses
from typing import Any

import numpy as np

from fuzz._twins import Pairs


@dataclasses.dataclass(frozen=True)
class Event:
    """A token of a row: its position, its place in the arrays of the cache, and its name, which is
    the index of the step, the row and the token that brought it.
    """

    position: int
    place: int
    name: tuple[int, int, int]


@dataclasses.dataclass
class History:
    """The rows of a cache. A ring buffer `wraps` at its capacity, others have None."""

    rows: list[list[Event]]
    lengths: list[int]
    wraps: int | None = None

    @classmethod
    def of(cls, batch: int, wraps: int | None) -> "History":
        return cls([[] for _ in range(batch)], [0] * batch, wraps)

    def append(self, step: int, counts: list[int]) -> None:
        for b, count in enumerate(counts):
            for i in range(count):
                at = self.lengths[b]
                place = at if self.wraps is None else at % self.wraps
                self.rows[b] = [e for e in self.rows[b] if e.place != place]
                self.rows[b].append(Event(at, place, (step, b, i)))
                self.lengths[b] += 1

    def truncate(self, lengths: list[int]) -> None:
        for b, n in enumerate(lengths):
            self.rows[b] = [e for e in self.rows[b] if e.position < n]
            self.lengths[b] = n

    def reorder(self, rows: list[int]) -> None:
        self.rows = [list(self.rows[i]) for i in rows]
        self.lengths = [self.lengths[i] for i in rows]

    def share(self, rows: list[int], from_row: int, tokens: int) -> None:
        for b in rows:
            self.rows[b] = [e for e in self.rows[from_row] if e.position < tokens]
            self.lengths[b] = tokens

    def release(self, rows: list[int]) -> None:
        for b in rows:
            self.rows[b], self.lengths[b] = [], 0

    def places(self, s: int) -> np.ndarray:
        """The position of the token at each place of the arrays, -1 for none, `[b, s]`."""
        found = np.full((len(self.rows), s), -1)
        for b, row in enumerate(self.rows):
            for e in row:
                found[b, e.place] = e.position
        return found


@dataclasses.dataclass
class Tokens:
    """The numbers of all tokens by their names, as they were read back, in float64."""

    keys: dict[tuple[int, int, int], np.ndarray] = dataclasses.field(default_factory=dict)
    values: dict[tuple[int, int, int], np.ndarray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Call:
    """What attention is asked: the twins of masks and scores, and the numbers of the metadata.

    `at_q` and `at_k` are functions from places to positions for queries, `(b, i)`, and keys,
    `(b, event)`. `moved` is what a tree does to them, or None.
    """

    seen: Any
    score: Any
    scale: float
    cap: float | None
    sinks: np.ndarray | None
    at_q: np.ndarray
    at_k: Any
    moved: Any = None


@dataclasses.dataclass
class Answer:
    """`out` `[t, h, v]` and `lse` `[t, h]`. `logits` are those of each head, `[t, n]`, -inf where a
    key is hidden, and `positions` `[n]` those of the keys before a tree moved them.
    """

    out: np.ndarray
    lse: np.ndarray
    logits: list[np.ndarray]
    positions: np.ndarray
    most: float
    dq: np.ndarray | None = None
    dk: dict | None = None
    dv: dict | None = None
    learned: dict[str, Any] = dataclasses.field(default_factory=dict)

    def learn(self, name: str, gradient: Any) -> None:
        self.learned[name] = self.learned.get(name, 0) + gradient


def attend(
    history: History, tokens: Tokens, b: int, q: np.ndarray, call: Call, wanted: Any = None
) -> Answer:
    """Attention of queries `[t, h, d]` of a row over all that it has. With `wanted` `[t, h, v]`,
    the gradients of `sum(wanted * out)` too, those of keys and values by name, and `learned`, those
    of the numbers of the metadata.
    """
    t, heads, _ = q.shape
    row = history.rows[b]
    width = next(iter(tokens.values.values())).shape[-1] if tokens.values else 0
    at_k = np.array([call.at_k(b, e) for e in row], np.int64).reshape(1, -1)
    nothing = np.zeros((t, heads, width)), np.full((t, heads), -np.inf)
    answer = Answer(*nothing, [], at_k[0], 0.0, np.zeros_like(q), {}, {})
    at_q = call.at_q[b][:, None]
    move = call.moved or (lambda b, x: x)
    places = np.array([e.place for e in row], np.int64).reshape(1, -1)
    keys = np.array([tokens.keys[e.name] for e in row])
    values = np.array([tokens.values[e.name] for e in row])
    for h in range(heads):
        sinks = np.zeros(0) if call.sinks is None else call.sinks[min(h, len(call.sinks) - 1)]
        if not row:
            answer.logits.append(np.zeros((t, 0)))
            if len(sinks):
                answer.lse[:, h] = np.log(np.exp(sinks).sum())
            continue
        group = h * keys.shape[1] // heads
        k, v = keys[:, group], values[:, group]
        p = Pairs(b, h, move(b, at_q), move(b, at_k), at_q, at_k, np.arange(t)[:, None], places)
        raw = call.scale * q[:, h] @ k.T
        x, slope = raw, np.ones_like(raw)
        if call.cap is not None:
            x, slope = call.cap * np.tanh(x / call.cap), 1 - np.tanh(x / call.cap) ** 2
        x, more = call.score(p, x)
        ok = np.broadcast_to(call.seen(p), x.shape)
        x = np.where(ok, x, -np.inf)
        answer.logits.append(x)
        answer.most = max(answer.most, abs(x[ok]).max(initial=0))
        every = np.concatenate([x, np.broadcast_to(sinks, (t, len(sinks)))], 1)
        top = every.max(1, keepdims=True)
        top = np.where(np.isfinite(top), top, 0)
        e, den = np.exp(x - top), np.exp(every - top).sum(1, keepdims=True)
        with np.errstate(divide="ignore"):
            answer.lse[:, h] = (top + np.log(den))[:, 0]
        weights = e / np.where(den == 0, 1, den)
        answer.out[:, h] = weights @ v
        if wanted is None:
            continue
        g = wanted[:, h]
        of_weights = g @ v.T
        mean = (weights * of_weights).sum(1, keepdims=True)
        of_capped = weights * (of_weights - mean) * more
        of_logits = of_capped * slope
        answer.learn("softmax_scale", (of_logits * raw).sum() / call.scale)
        if call.cap is not None:
            by_cap = np.tanh(raw / call.cap) - raw / call.cap * slope
            answer.learn("logits_soft_cap", (of_capped * by_cap).sum())
        if call.sinks is not None:
            of_sinks = np.zeros_like(call.sinks)
            shares = np.exp(sinks - top) / den  # [t, n]
            of_sinks[min(h, len(of_sinks) - 1)] = -(shares * mean).sum(0)
            answer.learn("softmax_aux", of_sinks)
        answer.dq[:, h] += call.scale * of_logits @ k
        for n, event in enumerate(row):
            dk = answer.dk.setdefault(event.name, np.zeros(keys.shape[1:]))
            dv = answer.dv.setdefault(event.name, np.zeros(values.shape[1:]))
            dk[group] += call.scale * of_logits[:, n] @ q[:, h]
            dv[group] += weights[:, n] @ g
    return answer


def turned(
    x: np.ndarray,
    position: int,
    dim: int | None,
    interleaved: bool,
    sections: tuple[int, ...] | None = None,
    back: bool = False,
) -> np.ndarray:
    """Rotary positions of vectors `[..., d]`, of which the first `dim` features turn, or turn `back`.
    With `sections`, so many pairs turn by each axis of `axes_of` the position.
    """
    dim = x.shape[-1] if dim is None else dim
    frequency = 10_000.0 ** (-np.arange(0, dim, 2) / max(dim, 1))
    if sections is not None:
        position = np.repeat(axes_of(position, np)[: len(sections)], sections)
    angle = position * frequency * (-1 if back else 1)
    first, second = (np.arange(dim // 2) * 2, np.arange(dim // 2) * 2 + 1) if interleaved else (
        np.arange(dim // 2), np.arange(dim // 2) + dim // 2
    )  # fmt: skip
    out = x.copy()
    out[..., first] = x[..., first] * np.cos(angle) - x[..., second] * np.sin(angle)
    out[..., second] = x[..., second] * np.cos(angle) + x[..., first] * np.sin(angle)
    return out


def axes_of(position: Any, xp: Any) -> Any:
    """Three positions of a token, `[..., 3]`, as an image or a video has them."""
    return xp.stack([position, position // 2, position % 3], -1)
