"""Lists of keys beside scores, on every mesh."""

import pytest
import ring.test_lists_on_meshes as unit
from jax.sharding import AxisType

from eqattn import AllGather, Ring, Ulysses


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("mesh", unit.MESHES)
@pytest.mark.parametrize("score", unit.SCORES)
@pytest.mark.parametrize("strategy", [Ring, Ulysses, AllGather])
def test_scores_beside_a_list(strategy, score, mesh, kind):
    unit.test_scores_beside_a_list(strategy, score, mesh, kind)


def test_rows_that_pad_a_list_in_a_ring():
    unit.test_rows_that_pad_a_list_are_not_singular(Ring)
