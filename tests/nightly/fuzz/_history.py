"""What a cache should hold, and the oracle's attention over it.

Each row is a list of what happened to it: which token stands at which position. Nothing is shared
with eqattn, neither arrays nor code.
"""

import dataclasses
from typing import Any

import numpy as np
from matrix import oracle

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
    """`out` `[t, h, v]` and `lse` `[t, h]`. `logits` are those of each head, `[h, t, n]`, -inf where a
    key is hidden, and `positions` `[n]` those of the keys before a tree moved them.
    """

    out: np.ndarray
    lse: np.ndarray
    logits: np.ndarray
    positions: np.ndarray
    most: float
    dq: np.ndarray | None = None
    dk: dict | None = None
    dv: dict | None = None
    learned: dict[str, Any] = dataclasses.field(default_factory=dict)


LEARNED = {"scale": "softmax_scale", "cap": "logits_soft_cap", "sinks": "softmax_aux"}


def attend(
    history: History, tokens: Tokens, b: int, q: np.ndarray, call: Call, wanted: Any = None
) -> Answer:
    """Attention of queries `[t, h, d]` of a row over all that it has, by the oracle. With `wanted`
    `[t, h, v]`, the gradients of `sum(wanted * out)` too, those of keys and values by name, and
    `learned`, those of the numbers of the metadata.
    """
    t, heads, d = q.shape
    row = history.rows[b]
    given = [*tokens.values.values()] or [np.zeros((1, 0)) if wanted is None else wanted]
    width = given[0].shape[-1]
    at_q, at_k = call.at_q[b][:, None], np.array([call.at_k(b, e) for e in row], np.int64)[None]
    move = call.moved or (lambda b, x: x)
    places = np.array([e.place for e in row], np.int64)[None]
    where = (move(b, at_q), move(b, at_k), at_q, at_k, np.arange(t)[:, None], places)
    pairs = [Pairs(b, h, *where) for h in range(heads)]

    def score(z):
        found = [call.score(p, x) for p, x in zip(pairs, z[0])]
        new, slope = (np.stack(x)[None] for x in zip(*found))
        return new, lambda g: (g * slope, None)

    keys = np.array([tokens.keys[e.name] for e in row]) if row else np.zeros((0, 1, d))
    values = np.array([tokens.values[e.name] for e in row]) if row else np.zeros((0, 1, width))
    seen = [np.broadcast_to(call.seen(p) if row else True, (t, len(row))) for p in pairs]
    problem = oracle.Problem(
        q=q[None], k=keys[None], v=values[None], mask=np.stack(seen)[None], scores=(score,) * bool(row),
        scale=call.scale, cap=call.cap, sinks=call.sinks,
    )  # fmt: skip
    found = oracle.forward(problem)
    most = abs(found.z[found.visible]).max(initial=0)
    logits = np.where(found.visible, found.z, -np.inf)[0]
    answer = Answer(found.out[0], found.lse[0], logits, at_k[0], most, np.zeros_like(q), {}, {})
    if wanted is None:
        return answer
    grads = oracle.vjp(problem, wanted[None], np.zeros(found.lse.shape))
    answer.dq = grads["q"][0]
    answer.dk, answer.dv = ({e.name: x for e, x in zip(row, grads[n][0])} for n in "kv")
    answer.learned = {name: grads[n] for n, name in LEARNED.items() if n in grads}
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
