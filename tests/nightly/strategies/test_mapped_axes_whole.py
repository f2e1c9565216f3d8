"""`jax.vmap` over explicit axes that shard batch and tokens."""

import pytest
import test_mapped_axes as unit
from jax.sharding import PartitionSpec as P
from test_mapped_axes import mesh  # noqa: F401, a fixture


@pytest.mark.parametrize("spec", [P("dp"), P("dp", "sp")], ids=["batch", "batch and tokens"])
@pytest.mark.parametrize("name", unit.CASES)
def test_what_makes_axes_manual_is_mapped(name, spec, mesh, x64):  # noqa: F811
    unit.test_what_makes_axes_manual_is_mapped(name, spec, mesh, x64)
