"""Caches as they are in use, over the axes of the matrix: rows that share pages, in eight bits and of
latents too, rows in eight bits, and ring buffers.
"""

import contextlib

import jax
import numpy as np
import pytest

from .build import build
from .cases import AXES, invalid, needs_x64, TARGET_LIMITS, with_every_mask
from .kept import FILLED
from .library import library_call
from .test_conformance import check


# What a case has in place of what these targets do not take.
OTHER = {
    "bias": {"full": "keys", "heads": "rows", "batch": "keys", "unbatched": "rows"},
    "score": {"features": "lookup"},
    "dropout": {0.25: 0.0},
    "mask": {
        **{"segments": "neighbourhood", "and": "function", "dense": "queries"},
        **{"array": "table", "selected": "tree"},
    },
}


def of(target: str) -> list:
    """The cases of the pairwise array, for another target."""
    found = []
    for case in with_every_mask():
        case = case | {"target": (target, 1)}
        if target != "int8":
            case |= {a: to.get(case[a], case[a]) for a, to in OTHER.items()}
        if target == "ring_buffer" and case["bias"] == "keys":
            case["bias"] = "none"
        if target == "cascade_latent":
            case["heads"] = case["heads"][0], 1
        if case["mask"] == "tree":
            case["offset"] = "none"
        if invalid(case) is None:
            found.append(case)
    return found


def of_each(axis: str) -> list:
    """A case for each value of an axis and each target."""
    return [c for target in FILLED for c in {x[axis]: x for x in of(target)}.values()]


EACH = "transform", "mask", "score"
# One derivative each way, for two that differ most. All others run at night.
FEW = ("cascade_latent", "jvp"), ("ring_buffer", "vmap_grad")


@pytest.mark.parametrize("target, transform", FEW)
def test_some_transforms(target, transform):
    (case,) = (
        c for c in of_each("transform") if (c["target"][0], c["transform"]) == (target, transform)
    )
    check(case)


SHARED = {axis: values[0] for axis, values in AXES.items()}
SHARED |= {"target": ("cascade", 1), "length": (5, 21), "lead": (2, 2), "dtype": "bfloat16"}
SHARED |= {"sinks": "Hn", "cap": "array", "mask": "window", "score": "alibi", "transform": "jit"}


def test_rows_that_share_pages():
    """Values, largest logits and gradients in bfloat16, those of shared pages included."""
    owner = build(SHARED).kept.owner
    readers = (owner == np.arange(len(owner))[:, None, None]).sum(1)
    assert readers.max() > 2, "no page has three rows"
    check(SHARED)


PER_KEY = "an array per key must be the same for all of them"
LIST = "a Selected has lists or places of its own for each"
REFUSED = {"bias": PER_KEY, "score": PER_KEY, "mask": PER_KEY, "dropout": "has no dropout"}
REFUSED["heads"] = "The latents of a token are one head"
LIMITS = [
    (target, axis, value)
    for target in ("cascade", "cascade_latent", "cascade_int8")
    for axis, values in TARGET_LIMITS[target].items()
    for value in values
]


@pytest.mark.parametrize("target, axis, value", LIMITS)
def test_what_a_cascade_cannot_do_raises(target, axis, value):
    # Their keys are whole pages, so that arrays have an entry for each.
    case = SHARED | {"target": (target, 1), "length": (5, 16), "dtype": "float32", axis: value}
    assert invalid(case)
    with jax.enable_x64(True) if needs_x64(case) else contextlib.nullcontext():
        built = build(case)
        call, dynamic = library_call(built)
        with pytest.raises(ValueError, match=LIST if value == "selected" else REFUSED[axis]):
            jax.eval_shape(call, built.variants[0], dynamic)
