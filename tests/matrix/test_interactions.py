"""What lowerings decide together, all with all: few and many keys, groups of heads, dropout, dtypes, and
forward or gradient. Pairs of axes are not enough where a program depends on three of them.
"""

import concurrent.futures
import threading

import jax
import numpy as np
import pytest

from . import transforms
from .build import build
from .cases import AXES
from .library import library_call
from .test_conformance import judge


PLAIN = {axis: values[0] for axis, values in AXES.items()}
LENGTHS = (1, 2, 3, 4, 8, 15, 16, 17, 33, 64)
HEADS = ((1, 1), (2, 2), (4, 2), (4, 1), (6, 2))
TARGETS = ("blockwise", "dense", "ragged")
# Few keys are one block, as they are by default; the two longest are several.
SHORT, LONG = {"block": (128, 128)}, {"block": (16, 16)}
# Gradients take most of the time, and the other strategies share most with Blockwise. So some of
# their lengths are here, and all of them in tests/nightly/test_matrix_calls.py.
FEW = (1, 4, 15, 16, 33)
HERE = [("blockwise", heads, way) for heads in HEADS for way in ("forward", "gradient")]
HERE += [(target, (4, 2), way) for target in TARGETS[1:] for way in ("forward", "gradient")]
SECONDS = 20  # to compile what a case adds to its program, a hundred times what it takes


def forward(call, variants, directions, cts):
    """The output alone, as in inference: what nobody asks for is not compiled."""
    return {"values": [{"out": call(variants[0])[0]}]}


DIRECTIONS = {"forward": forward, "gradient": transforms.grad}


def compiled(program, *args, seconds: int):
    """The compiled program. A compilation without end cannot be interrupted, but left alone."""
    lowered, found = jax.jit(program).lower(*args), concurrent.futures.Future()

    def run():
        try:
            found.set_result(lowered.compile())
        except Exception as e:
            found.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    try:
        return found.result(seconds)
    except TimeoutError:
        pytest.fail(f"not compiled within {seconds} seconds")


def check(target, heads, direction, dropout, dtype, lengths) -> None:
    """One program has the calls of all lengths, as many small programs cost more."""
    own = dict(target=(target, 1), heads=heads, dropout=dropout, dtype=dtype)
    blocks = lambda n: SHORT if n < 33 else LONG
    cases = [build(PLAIN | own | blocks(n) | {"length": (n, n)}) for n in lengths]

    def program(inputs):
        results = []
        for case, (variants, directions, cts) in zip(cases, inputs):
            call, dynamic = library_call(case)
            run = lambda arguments, call=call, dynamic=dynamic: call(arguments, dynamic)
            results.append(DIRECTIONS[direction](run, variants, directions, cts))
        return results

    inputs = [(c.variants, c.directions, (c.ct_out, c.ct_lse)) for c in cases]
    results = compiled(program, inputs, seconds=SECONDS * len(cases))(inputs)
    for n, case, result in zip(lengths, cases, jax.tree.map(np.asarray, results)):
        worst = judge(result, case)
        assert max(worst.values()) <= 1, (n, worst)


def name_of(value) -> str | None:
    return "{}x{}".format(*value) if isinstance(value, tuple) else None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("target, heads, direction", HERE, ids=name_of)
def test_all_with_all(target, heads, direction, dropout, dtype):
    whole = (target, direction) == ("blockwise", "forward")
    check(target, heads, direction, dropout, dtype, LENGTHS if whole else FEW)
