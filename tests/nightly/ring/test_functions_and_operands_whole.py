"""What masks and scores read: every kind, transformation, strategy and kind of axes."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from ring.common import grid_of, mesh_of
from ring.test_functions_and_operands import (
    both,
    check,
    closures,
    grad,
    jvp,
    KINDS,
    names,
    TRANSFORMS,
)

from eqattn.strategies import AllGather, Ring, Ulysses


AXES = [AxisType.Auto, AxisType.Explicit]
STRATEGIES = [AllGather, Ring, Ulysses]


@pytest.mark.parametrize("axes", AXES, ids=names)
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("cls", STRATEGIES, ids=names)
@pytest.mark.parametrize("transform", TRANSFORMS, ids=names)
@pytest.mark.parametrize("kind", KINDS, ids=names)
def test_everything(kind, transform, cls, placed, axes):
    check(kind, transform, mesh_of(2, axes), cls, placed=placed)


@pytest.mark.parametrize("kind", [closures, both], ids=names)
def test_two_explicit_axes(kind):
    check(kind, grad, grid_of(2, 2, AxisType.Explicit), Ring, head_axis="hp")


@pytest.mark.parametrize("axes", AXES, ids=names)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16], ids=names)
def test_dtypes(dtype, axes):
    check(both, grad, mesh_of(2, axes), Ring, dtype)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("transform", [grad, jvp], ids=names)
@pytest.mark.parametrize("cls", [AllGather, Ring, Ulysses], ids=names)
def test_closures_in_a_shard_map_of_ones_own(cls, transform, checked):
    check(closures, transform, mesh_of(2), cls, checked=checked, axis_name="sp")
