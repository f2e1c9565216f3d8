"""Generation with caches. Prompts of unequal length enter in pieces, then all rows go on."""

import dataclasses
import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from .decoder import Decoder, empty_caches


@dataclasses.dataclass(frozen=True)
class Choice:
    """How a token is chosen: the likeliest at temperature 0, else sampled from the `top_k`
    likeliest, if that is not 0, and of these from the fewest that have the probability `top_p`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __call__(self, logits: Float[Array, " n"], key: PRNGKeyArray) -> Int[Array, ""]:
        if self.temperature == 0:
            return jnp.argmax(logits)
        likeliest, order = jax.lax.top_k(logits, min(self.top_k or len(logits), len(logits)))
        likeliest = likeliest / self.temperature
        p = jax.nn.softmax(likeliest)
        before = jnp.cumsum(p) - p
        return order[
            jax.random.categorical(key, jnp.where(before < self.top_p, likeliest, -jnp.inf))
        ]


@functools.partial(jax.jit, static_argnums=5, donate_argnums=1)
def advance(
    model: Decoder,
    caches: tuple[Any, ...],
    tokens: Int[Array, "rows t"],
    counts: Int[Array, " rows"],
    key: PRNGKeyArray,
    choice: Choice,
) -> tuple[tuple[Any, ...], Int[Array, " rows"]]:
    """Takes `counts` tokens into each row, and chooses the one after them."""
    caches, logits = model.step(caches, tokens, counts)
    return caches, jax.vmap(choice)(logits, jax.random.split(key, len(logits)))


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    length: int,
    *,
    kind: str = "ring",
    piece: int = 64,
    choice: Choice = Choice(),
    key: PRNGKeyArray | None = None,
    stop: Collection[int] = (),
) -> Iterator[list[int | None]]:
    """An iterator over the next token of each row, `length` times, or None after one of `stop`.

    **Raises:** `ValueError` if the model cannot take such prompts, or so long a text.
    """
    if not prompts or not all(prompts):
        raise ValueError("each prompt needs a token at least, such as a start of the text.")
    tokens, known = {x for prompt in prompts for x in prompt}, len(model.embedding)
    if wrong := [x for x in tokens if not 0 <= x < known]:
        raise ValueError(f"a prompt has the token {wrong[0]}; the model knows those below {known}.")
    model.check_length(max(map(len, prompts)) + length - 1)  # the last token is not read
    return _generate(model, prompts, length, kind, piece, choice, key, stop)


def _generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    length: int,
    kind: str,
    piece: int,
    choice: Choice,
    key: PRNGKeyArray | None,
    stop: Collection[int],
) -> Iterator[list[int | None]]:
    rows, lengths = len(prompts), np.array([len(p) for p in prompts])
    piece = min(piece, int(lengths.max()))
    caches = empty_caches(model, rows, int(lengths.max()) + length, piece, kind)
    keys = iter(jax.random.split(jax.random.key(0) if key is None else key, length + lengths.max()))
    last = np.zeros(rows, np.int32)
    for start in range(0, lengths.max(), piece):
        counts = np.clip(lengths - start, 0, piece).astype(np.int32)
        tokens = np.zeros((rows, piece), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : counts[row]] = prompt[start : start + piece]
        caches, new = advance(model, caches, tokens, counts, next(keys), choice)
        last = np.where((counts > 0) & (start + counts == lengths), new, last)
    live = np.ones(rows, bool)
    for _ in range(length):
        yield [int(x) if on else None for x, on in zip(last, live, strict=True)]
        live &= ~np.isin(last, list(stop))
        if not live.any():
            return
        counts = live.astype(np.int32)
        caches, new = advance(model, caches, last[:, None], counts, next(keys), choice)
        last = np.asarray(new)
