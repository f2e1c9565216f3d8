"""The tests of tests/unit/kernels interpret the kernels for GPUs here, and more calls of others."""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "kernels"))

from _kernels import newest, parametrise  # noqa: E402


def pytest_generate_tests(metafunc):
    parametrise(metafunc, nightly=True)


def pytest_collection_modifyitems(items):
    for item in items:
        if getattr(item, "callspec", None) and item.callspec.params.get("interpreted") == "cuda":
            item.add_marker(newest)
