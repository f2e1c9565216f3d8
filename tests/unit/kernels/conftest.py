"""Kernels for TPUs and in Triton are interpreted here, and those for Hopper in tests/nightly/kernels."""

from _kernels import parametrise


def pytest_generate_tests(metafunc):
    parametrise(metafunc, nightly=False)
