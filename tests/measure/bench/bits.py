"""Measures what fixed bits cost: strategies with `bitwise=True` against the same without.

There are 8 heads of size 64 in float32, each with its own keys, and for the step of decoding the
rows of `decode`. Blocks have 64 queries and 128 keys, but in the step, where they have one query.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from eqattn import attention, AttentionMetadata, Blockwise, Causal, KeyPadding, Ragged

from .cases import Case, Row
from .decode import compiled, draw
from .timing import rounds_of


def _calls(case: Case, bitwise: bool) -> dict[str, Callable[[], object]]:
    rng = np.random.default_rng(0)
    arrays = [
        jnp.asarray(rng.standard_normal((1, case.tokens, 8, 64)), jnp.float32) for _ in range(4)
    ]
    wide = AttentionMetadata(blocksize_q=64, blocksize_k=128)
    step = AttentionMetadata(blocksize_q=1, blocksize_k=128)

    def forward(query, key_, value):
        strategy = Blockwise(wide, bitwise=bitwise)
        return attention(query, key_, value, strategy, mask=Causal()).attention_outputs

    def gradient(query, key_, value, cotangent):
        return jax.vjp(forward, query, key_, value)[1](cotangent)

    def decode(query, key_, value, lengths):
        strategy = Ragged(step, bitwise=bitwise)
        return attention(query, key_, value, strategy, mask=KeyPadding(lengths)).attention_outputs

    rows = draw(case.tokens)
    lengths = jnp.full(len(rows[0]), case.tokens, jnp.int32)
    made = {
        "forward": compiled(forward, *arrays[:3]),
        "gradient": compiled(gradient, *arrays),
        "decode": compiled(decode, *rows, lengths),
    }
    return {name: call for name, (call, _) in made.items()}


def bits(case: Case, rounds: int) -> Iterator[Row]:
    """Measures each call with fixed bits and without, in turn."""
    fixed, free = _calls(case, True), _calls(case, False)
    for name in fixed:
        times = rounds_of({"eqattn": fixed[name], "free": free[name]}, rounds, wall=False)
        ratio = times["eqattn"] / times["free"]
        low, middle, high = (float(x) for x in np.percentile(ratio, (25, 50, 75)))
        quartiles = {"eqattn": [low, high]}
        yield case.row(f"{name}, fixed / free", {"eqattn": middle}, quartiles=quartiles)


EXPERIMENTS = {"bits": bits}
