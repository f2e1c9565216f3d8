"""What new functions read, in all ways and of both kinds."""

import pytest
import test_closure as unit
from test_closure import wide  # noqa: F401, a fixture for all tests


@pytest.mark.parametrize("kind", ["number", "array"])
@pytest.mark.parametrize("how", unit.SPACES)
def test_a_new_function_reads_what_a_class_or_a_module_holds_now(how, kind, monkeypatch):
    unit.test_a_new_function_reads_what_a_class_or_a_module_holds_now(how, kind, monkeypatch)
