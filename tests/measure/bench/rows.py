"""Measures rows of many queries: `Ragged` against `Blockwise`, for prompts and in training.

There are four rows in float32, each with half of the tokens of the one before. They have 8 heads of
size 64 and 2 key/value heads. Queries are as many as keys, and then 64, for which `Ragged` leaves
the keys in place.
"""

import functools as ft
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eqattn import attention, Blockwise, Causal, KeyPadding, Ragged
from eqattn._problem.storage import as_stored

from .cases import Case, DIM, HEADS, Row
from .decode import compiled
from .timing import ratios, rounds_of


# By name, a strategy and the form in which it gets keys and values. What is stored stays in place.
WAYS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "eqattn": (Ragged(), lambda x: x),
    "in place": (Ragged(), as_stored),
    "Blockwise": (Blockwise(), lambda x: x),
}


def rows(case: Case, rounds: int) -> Iterator[Row]:
    """Measures the forward pass and the gradients of each way, in turn."""
    lengths = jnp.asarray([case.tokens >> i for i in range(4)], jnp.int32)
    rng = np.random.default_rng(0)

    def forward(way, query, key_, value):
        strategy, form = WAYS[way]
        mask, offset = Causal() & KeyPadding(lengths), case.tokens - query.shape[1]
        keys = form(key_), form(value)
        return attention(query, *keys, strategy, mask=mask, q_offset=offset).attention_outputs

    def gradient(way, query, key_, value, cotangent):
        return jax.vjp(ft.partial(forward, way), query, key_, value)[1](cotangent)

    def draw(tokens, heads):
        return jnp.asarray(rng.standard_normal((4, tokens, heads, DIM)), jnp.float32)

    for queries in (case.tokens, min(64, case.tokens // 16)):
        like, keys = draw(queries, HEADS), [draw(case.tokens, case.kv_heads) for _ in range(2)]
        which = "" if queries == case.tokens else f" of {queries} queries"
        for name, f, more in (("forward", forward, ()), ("gradient", gradient, (like,))):
            made = {way: compiled(ft.partial(f, way), like, *keys, *more) for way in WAYS}
            times = rounds_of({way: call for way, (call, _) in made.items()}, rounds)
            for reference in ("Blockwise", "in place"):
                found = [x["eqattn"] for x in ratios(times, reference)]
                values, quartiles = ({"eqattn": x} for x in found)
                yield case.row(f"{name}{which} / {reference}", values, quartiles=quartiles)
            temporary = {way: nbytes / 2**20 for way, (_, nbytes) in made.items()}
            yield case.row(f"{name}{which}, temp MiB", temporary)


EXPERIMENTS = {"rows": rows}
