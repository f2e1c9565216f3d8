"""Kernels for TPUs and in Triton are interpreted here; those for Hopper, whose interpreter takes many
times as long, by the same tests in tests/nightly/kernels.
"""

from _kernels import parametrise


def pytest_generate_tests(metafunc):
    parametrise(metafunc, ("tpu", "triton"))
