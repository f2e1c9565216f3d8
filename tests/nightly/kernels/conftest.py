"""Kernels for Hopper are interpreted here, by the tests of tests/unit/kernels."""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "kernels"))

from _kernels import NEWEST, parametrise  # noqa: E402


def pytest_generate_tests(metafunc):
    parametrise(metafunc, ("cuda",) if NEWEST else ())
