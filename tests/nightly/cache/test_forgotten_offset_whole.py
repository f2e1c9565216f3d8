"""Every kind of cache in every call of tests/unit/cache/test_forgotten_offset.py."""

import pytest
import test_forgotten_offset as unit


@pytest.mark.parametrize("name", unit.CACHES)
@pytest.mark.parametrize("what", unit.POSITIONAL)
def test_a_forgotten_offset_raises(name, what):
    unit.test_a_forgotten_offset_raises(name, what)


@pytest.mark.parametrize("name", unit.CACHES)
@pytest.mark.parametrize("jit", [False, True])
def test_what_needs_no_offset_does_not_raise(name, jit):
    unit.test_what_needs_no_offset_does_not_raise(name, jit)


@pytest.mark.parametrize("name", unit.CACHES)
@pytest.mark.parametrize(
    "test", [unit.test_it_raises_as_a_program_runs, unit.test_the_right_offset]
)
def test_all_caches(test, name):
    test(name)
