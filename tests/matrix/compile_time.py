"""Compiles calls in processes of their own, under XLA's default flags, as users compile them.

The suite's own processes compile without optimisation, so they never see an optimiser that does not
end. Time is that of the processor, which does not depend on what else the machine does.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

import eqattn


KINDS = "Blockwise", "Ragged", "MultiheadAttention", "ScoreFn"
SECONDS = 20
FEATURES = 8


class Case(NamedTuple):
    """One program to compile: a call of a strategy, the layer, or a call with a costly score."""

    kind: str  # one of KINDS
    length: int
    heads: int
    kv_heads: int
    dropout: bool
    gradient: bool
    dtype: str


def not_in_time(cases: Sequence[Case]) -> list[Case]:
    """The cases that take more than `SECONDS` to trace and compile."""
    late, left = [], list(cases)
    env = {name: x for name, x in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    while left:
        child = subprocess.run(
            [sys.executable, "-P", __file__],
            input=json.dumps(left),
            capture_output=True,
            text=True,
            env=env | {"JAX_PLATFORMS": "cpu"},
        )
        if child.returncode == 0:
            return late
        # The child writes a line for each case that it has compiled.
        assert child.returncode == -signal.SIGXCPU, child.stderr
        done = child.stdout.count("\n")
        late.append(left[done])
        left = left[done + 1 :]
    return late


def _program(case: Case) -> tuple[Callable, list]:
    """The function of a case, and its arguments."""
    return (_layer if case.kind == "MultiheadAttention" else _call)(case)


def _layer(case: Case) -> tuple[Callable, list]:
    size = case.heads * FEATURES
    layer = eqattn.nn.MultiheadAttention(
        case.heads,
        size,
        num_kv_heads=case.kv_heads,
        dropout_p=0.1 * case.dropout,
        key=jax.random.key(0),
    )
    arrays, rest = eqx.partition(layer, eqx.is_inexact_array)
    arrays = jax.tree.map(lambda x: x.astype(case.dtype), arrays)
    args = [arrays, jnp.zeros((case.length, size), case.dtype), jax.random.key(0)]
    return lambda arrays, x, key: eqx.combine(arrays, rest)(x, x, x, key=key), args


def _call(case: Case) -> tuple[Callable, list]:
    metadata = eqattn.AttentionMetadata(dropout_prob=0.1 * case.dropout)
    strategy = (eqattn.Ragged if case.kind == "Ragged" else eqattn.Blockwise)(metadata)
    options: Any = dict(score=eqattn.ScoreFn(_hashed)) if case.kind == "ScoreFn" else {}

    def call(query, key_value, key):
        key = key if case.dropout else None
        out = eqattn.attention(query, key_value, key_value, strategy, key=key, **options)
        return out.attention_outputs

    shapes = [(1, case.length, heads, FEATURES) for heads in (case.heads, case.kv_heads)]
    return call, [*[jnp.zeros(shape, case.dtype) for shape in shapes], jax.random.key(0)]


def _hashed(logit, b, h, q, k):
    """A capped logit with noise of the pair: long chains of operations, each result read twice."""
    b, h, q, k = (x.astype("uint32") for x in (b, h, q, k))
    x, y = b, h
    for word in (q, k):
        for _ in range(20):
            x = x + y
            y = (y << 13 | y >> 19) ^ x
        y = y + word
    return 30 * jnp.tanh(logit / 30) + y.astype(logit.dtype) * 2**-40


def _compile(case: Case) -> None:
    f, args = _program(case)
    if case.gradient:
        of_sum: Any = lambda *xs: f(*xs).astype("float32").sum()
        jax.jit(jax.grad(of_sum, (0, 1))).lower(*args).compile()
    else:
        jax.jit(f).lower(*args).compile()


def main() -> None:
    for case in json.load(sys.stdin):
        used = time.process_time()
        # Past this, the kernel ends the process, whatever library it is in.
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(used) + SECONDS, hard))
        _compile(Case(*case))
        print(f"{time.process_time() - used:.2f} s", flush=True)


if __name__ == "__main__":
    main()
