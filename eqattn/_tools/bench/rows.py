"""Measures rows of many queries: `Ragged` against `Blockwise`, for prompts and in training.

There are four rows in float32, each with half of the tokens of the one before. They have 8 heads of
size 64 and 2 key/value heads. Queries are as many as keys, and then 64, for which `Ragged` leaves
the keys in place.
"""

import functools as ft
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from ... import attention, Blockwise, Causal, KeyPadding, Ragged
from .cases import Case, DIM, HEADS, Row
from .decode import compiled
from .timing import ratios, rounds_of


def rows(case: Case, rounds: int) -> Iterator[Row]:
    """Measures the forward pass and the gradients of both, in turn."""
    lengths = jnp.asarray([case.tokens >> i for i in range(4)], jnp.int32)
    rng = np.random.default_rng(0)

    def forward(strategy, query, key_, value):
        mask, offset = Causal() & KeyPadding(lengths), case.tokens - query.shape[1]
        return attention(query, key_, value, strategy, mask=mask, q_offset=offset).attention_outputs

    def gradient(strategy, query, key_, value, cotangent):
        return jax.vjp(ft.partial(forward, strategy), query, key_, value)[1](cotangent)

    def draw(tokens, heads):
        return jnp.asarray(rng.standard_normal((4, tokens, heads, DIM)), jnp.float32)

    for queries in (case.tokens, min(64, case.tokens // 16)):
        like, keys = draw(queries, HEADS), [draw(case.tokens, case.kv_heads) for _ in range(2)]
        which = "" if queries == case.tokens else f" of {queries} queries"
        for name, f, more in (("forward", forward, ()), ("gradient", gradient, (like,))):
            both = {"eqattn": Ragged(), "Blockwise": Blockwise()}
            made = {n: compiled(ft.partial(f, x), like, *keys, *more) for n, x in both.items()}
            times = rounds_of({n: call for n, (call, _) in made.items()}, rounds)
            medians, quartiles = ratios(times, "Blockwise")
            ours = dict(values={"eqattn": medians["eqattn"]})
            ours |= dict(quartiles={"eqattn": quartiles["eqattn"]})
            yield case.row(f"{name}{which} / Blockwise", **ours)
            temporary = {n: nbytes / 2**20 for n, (_, nbytes) in made.items()}
            yield case.row(f"{name}{which}, temp MiB", temporary)


EXPERIMENTS = {"rows": rows}
