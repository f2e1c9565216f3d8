"""What new functions read, in all ways and of both kinds."""

import pytest
import test_closure as unit
from test_closure import wide  # noqa: F401, a fixture for all tests


@pytest.mark.parametrize("kind", ["number", "array"])
@pytest.mark.parametrize("how", unit.SPACES)
def test_a_new_function_reads_what_a_class_or_a_module_holds_now(how, kind, monkeypatch):
    unit.test_a_new_function_reads_what_a_class_or_a_module_holds_now(how, kind, monkeypatch)


@pytest.mark.parametrize("how", unit.CHANGES, ids=lambda f: f.__name__)
def test_an_array_that_changes_between_eager_calls(how):
    unit.test_an_array_that_changes_between_eager_calls(how)


@pytest.mark.parametrize("constants", unit.CONSTANTS, ids=str)
def test_constants_are_told_apart(constants):
    unit.test_constants_are_told_apart(constants)


@pytest.mark.parametrize("make", [unit.anew_partial, unit.anew_method])
def test_a_function_that_is_made_anew(make):
    unit.test_a_function_that_is_made_anew_is_compiled_once(make)


@pytest.mark.parametrize("space", [unit.Settings, vars(unit)], ids=["class", "global"])
def test_equal_values_of_several_names_are_told_apart(space, monkeypatch):
    unit.test_equal_values_of_several_names_are_told_apart(space, monkeypatch)


@pytest.mark.parametrize("make", [unit.anew, unit.anew_partial])
def test_what_a_function_holds_is_freed_with_it(make):
    unit.test_what_a_function_holds_is_freed_with_it(make)
