"""Dropout of a problem: the words of each row, and the factors on the probabilities of a block."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._sweep.grid import BATCH, HEAD
from ..scores._dropout import is_kept, kept_factor, row_words
from .exchange import HeadExchange
from .problem import Problem


WORDS = ("first_word", "second_word")
"""The roles of the operands that hold the words of each row."""


def words_of(problem: Problem, spread: HeadExchange) -> dict[str, Array]:
    """The words `[B, H, T, 1]` of each row, by role; none without dropout.

    Where devices exchange tokens for heads, the words belong to the heads and tokens that this
    device has after the exchange. It knows the positions of these tokens.
    """
    if problem.seed is None or problem.rate == 0:
        return {}
    b, h, q, _ = (jnp.asarray(x) for x in problem.indices())
    if spread.inside:
        heads = h.reshape(h.shape[0], problem.sizes[3], -1)  # of each key/value head, its queries'
        h = spread.tokens_to_heads(heads, (BATCH, HEAD)).reshape(h.shape[0], -1, 1, 1)
    return dict(zip(WORDS, row_words(problem.seed, b, h, q)))


def weights_of(problem: Problem, named: dict[str, Array], dtype: jnp.dtype) -> list[Array]:
    """The factors on the probabilities of a block `[keys, rows]`; an empty list without dropout.

    **Arguments:**

    - `named`: the blocks of the problem's operands, by role, each `[keys|1, rows|1]`.
    """
    if WORDS[0] not in named:
        return []
    words = named[WORDS[0]], named[WORDS[1]]
    keep = is_kept(words, named["kv_position"], problem.rate)
    return [jnp.where(keep, np.asarray(kept_factor(problem.rate), dtype), 0)]
