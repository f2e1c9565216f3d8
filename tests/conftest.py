"""Everything in this suite runs under JAX's strictest promotion rules, on one CPU thread per program."""

import os


# Small programs on small machines: XLA's thread pool costs more than it gives, and xdist already uses the cores.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"

import jax  # noqa: E402
import pytest  # noqa: E402


jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: the 3-wise conformance array; select with `-m slow`")


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def unchecked():
    """As users run it: without the type checker that this suite adds."""
    from jaxtyping import config

    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
