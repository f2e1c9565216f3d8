"""What policies of `jax.checkpoint` keep, of further strategies."""

import pytest
import test_remat as unit
from test_remat import mesh  # noqa: F401, a fixture


@pytest.mark.parametrize("name", ["kernel", "ragged", "ulysses"])
def test_a_named_output_is_not_computed_anew(name, mesh):  # noqa: F811
    unit.test_a_named_output_is_not_computed_anew(name, mesh)
