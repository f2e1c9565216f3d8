"""Sharded arrays: all that may be placed, and every strategy."""

import pytest
import test_sharding as unit

from eqattn import AllGather, Blockwise, Ulysses


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("name", unit.ALONE)
def test_query_of_no_mesh(name, ring):
    unit.test_query_of_no_mesh(name, ring)


@pytest.mark.parametrize("strategy", [Blockwise, Ulysses, AllGather])
def test_functions_read_global_arrays(strategy, monkeypatch):
    unit.test_functions_read_global_arrays_on_explicit_axes(strategy, monkeypatch)
