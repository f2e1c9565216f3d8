"""Most tests interpret kernels for TPUs here, and those for GPUs in tests/nightly/kernels. matrix/ interprets
those in Triton, too.
"""

from _kernels import parametrise


def pytest_generate_tests(metafunc):
    parametrise(metafunc, nightly=False)
