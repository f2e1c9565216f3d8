"""Every kind of cache in every way of tests/unit/cache/test_{automatic,explicit}_meshes.py."""

import pytest
import test_automatic_meshes as automatic
import test_explicit_meshes as explicit
from jax.sharding import PartitionSpec as P


@pytest.mark.parametrize("name, platform", automatic.READ)
@pytest.mark.parametrize("tokens", [1, automatic.T])
def test_reading_moves_nothing_between_devices(tokens, name, platform):
    automatic.test_reading_moves_nothing_between_devices(name, platform, tokens)


def test_pages_of_eight_bits_of_layers_stay_sharded_over_heads():
    automatic.test_pages_of_eight_bits_stay_sharded_over_heads(True)


@pytest.mark.parametrize("name", explicit.KINDS)
def test_caches_stay_sharded(name):
    explicit.test_caches_stay_sharded(name)


@pytest.mark.parametrize("spec", [P("dp"), P("dp", None, "tp"), P(None, None, "tp")])
@pytest.mark.parametrize("name", ["cascade", "packed"])
def test_calls_that_reorder_queries(name, spec):
    explicit.test_calls_that_reorder_queries(name, spec)


@pytest.mark.parametrize("name", [*explicit.OVER_KEYS, "layer"])
@pytest.mark.parametrize("rows", [[1, 0], [0, 0]])
def test_rows_are_reordered_and_pages_written_out_where_rows_are_sharded(name, rows):
    explicit.test_rows_are_reordered_and_pages_written_out_where_rows_are_sharded(name, rows)
