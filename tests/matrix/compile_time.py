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


KINDS = "Blockwise", "Ragged", "MultiheadAttention"
SECONDS = 20


class Case(NamedTuple):
    """One program to compile: a call of a strategy, or the layer."""

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
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    import eqattn

    rate = 0.1 if case.dropout else 0.0
    key, features = jax.random.key(0), 8

    def zeros(*shape):
        return jnp.zeros(shape, case.dtype)

    if case.kind == "MultiheadAttention":
        size = case.heads * features
        layer = eqattn.nn.MultiheadAttention(
            case.heads, size, num_kv_heads=case.kv_heads, dropout_p=rate, key=key
        )
        arrays, rest = eqx.partition(layer, eqx.is_inexact_array)
        arrays = jax.tree.map(lambda x: x.astype(case.dtype), arrays)

        def call(arrays, x, key):
            return eqx.combine(arrays, rest)(x, x, x, key=key)

        return call, [arrays, zeros(case.length, size), key]

    strategy = getattr(eqattn, case.kind)(eqattn.AttentionMetadata(dropout_prob=rate))

    def call(query, key_value, key):
        key = key if case.dropout else None
        return eqattn.attention(query, key_value, key_value, strategy, key=key).attention_outputs

    query = zeros(1, case.length, case.heads, features)
    return call, [query, zeros(1, case.length, case.kv_heads, features), key]


def _compile(case: Case) -> None:
    import jax

    f, args = _program(case)
    if case.gradient:
        of_sum: Any = lambda *xs: f(*xs).astype("float32").sum()
        jax.jit(jax.grad(of_sum, (0, 1))).lower(*args).compile()
    else:
        jax.jit(f).lower(*args).compile()


def main() -> None:
    import eqattn  # noqa: F401, as imports are not part of a case's time

    for case in json.load(sys.stdin):
        used = time.process_time()
        # Past this, the kernel ends the process, whatever library it is in.
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(used) + SECONDS, hard))
        _compile(Case(*case))
        print(f"{time.process_time() - used:.2f} s", flush=True)


if __name__ == "__main__":
    main()
