"""Under `jax.disable_jit`, where a model is stepped through: within the bound of the oracle."""

import jax
import numpy as np
import pytest

import eqattn
from eqattn import masks as m

from . import build, transforms
from .cases import AXES
from .library import library_call
from .test_conformance import judge, mesh_of


PLAIN = {axis: values[0] for axis, values in AXES.items()}
PLAIN |= {"mask": "and", "length": (3, 5), "block": (2, 3), "bias": "heads", "sinks": "H"}
CASES = [PLAIN | {"transform": transform} for transform in AXES["transform"]]
CASES += [PLAIN | {"target": (name, 1)} for name in ("dense", "ragged")]
CASES += [PLAIN | {"target": ("ring", 2), "transform": "grad", "length": (4, 4)}]
# Steps in Python are slow, so one transformation of each kind runs here, and all at night.
LATER = "linearize", "vmap", "checkpoint", "jit", "scan", "hvp"
FEW = [x for x in CASES if x["transform"] not in LATER or x["target"] != PLAIN["target"]]


def name_of(case):
    return f"{case['transform']}-{case['target'][0]}"


@pytest.mark.parametrize("case", FEW, ids=name_of)
def test_transform(case):
    built = build.build(case)
    call, dynamic = library_call(built)
    transform = transforms.TRANSFORMS[case["transform"]]
    with mesh_of(case), jax.disable_jit():
        result = transform(
            lambda a, **more: call(a, dynamic, **more),
            built.variants,
            built.directions,
            (built.ct_out, built.ct_lse),
        )
    worst = judge(jax.tree.map(np.asarray, result), built)
    assert worst and max(worst.values()) <= 1, worst


def test_layer_with_a_cache():
    """Token by token is all at once."""
    key, other = jax.random.split(jax.random.key(0))
    layer = eqattn.nn.MultiheadAttention(2, 8, key=key)
    x = jax.random.normal(other, (1, 3, 8))
    want = jax.vmap(lambda x: layer(x, mask=m.Causal()))(x)
    with jax.disable_jit():
        cache, outs = eqattn.cache.KVCache.empty(1, 3, 2, 4), []
        for i in range(3):
            cache, out = layer(x[:, i : i + 1], mask=m.Causal(), cache=cache)
            outs.append(out)
    np.testing.assert_allclose(np.concatenate(outs, 1), want, rtol=0, atol=1e-6)
