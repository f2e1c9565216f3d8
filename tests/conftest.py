"""Everything in this suite runs under JAX's strictest promotion rules, one CPU thread a program,
with eight virtual devices.
"""

import collections
import gc
import importlib.metadata
import os
import zlib


# Many small programs on a small machine: threads and optimisation cost more than they give. Set
# the level yourself (XLA_FLAGS=--xla_backend_optimization_level=3) to test optimised code.
defaults = [
    "--xla_cpu_multi_thread_eigen=false",
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_force_host_platform_device_count=8",
]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # A third less time for compiling; later versions have no such flag and end at its sight.
    defaults.append("--xla_cpu_use_fusion_emitters=false")
flags = os.environ.get("XLA_FLAGS", "")
flags = " ".join([flags, *[f for f in defaults if f.split("=")[0] not in flags]])
os.environ["XLA_FLAGS"] = flags

import jax  # noqa: E402
import pytest  # noqa: E402
from _rolls import interpret_rolls_at_once  # noqa: E402
from jaxtyping import config  # noqa: E402


interpret_rolls_at_once()

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


# Tracing makes many objects, of which few are garbage. The collector's usual pace, a pass for every
# 700, takes 4 to 16 percent of the time of these tests; a slower one than this takes gigabytes.
gc.set_threshold(10_000, 10, 10)


# Functions whose cases differ in what the matrix combines, too, and take seconds each: the default
# run takes each n-th of them. `pytest -m slow` takes the others.
SOME = {
    "test_a_score_may_be_singular_where_nothing_is_visible": 2,
    "test_cases_of_the_matrix": 2,
    "test_explicit_axes": 2,
    "test_feature": 2,
    "test_gradients_round_once": 2,
    "test_no_step_copies_the_cache": 3,
    "test_no_sum_over_devices_is_narrow": 2,
    "test_no_title_is_cut": 5,
    "test_operands_of_any_dtype": 2,
    "test_products_and_their_gradients": 5,
    "test_the_query_decides_and_a_runtime_dtype_overrules_it": 3,
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    seen = collections.Counter()
    for item in items:
        name = getattr(item, "originalname", None)
        if name in SOME and item.get_closest_marker("slow") is None:
            if seen[name] % SOME[name]:
                item.add_marker(pytest.mark.slow)
            seen[name] += 1


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """What one module compiled is of little use to the next, and adds up to gigabytes a worker."""
    yield
    jax.clear_caches()


# Their many cases call the same functions with the same types.
MATRICES = ("conformance", "kernels", "ring")


@pytest.fixture(autouse=True)
def some_types(request):
    """Types are checked in every test but two of three in the matrices, where checking takes a
    fifth of the time. With `EQATTN_TYPES=all` they are checked in each of these, too.
    """
    spared = request.path.parent.name in MATRICES and os.environ.get("EQATTN_TYPES") != "all"
    if not (spared and zlib.crc32(request.node.name.encode()) % 3):
        yield
        return
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def unchecked():
    """As users run it: without the type checker that this suite adds."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.fixture
def registry():
    """To register what is forgotten after the test."""
    from eqattn import AttentionRegistry

    before = dict(AttentionRegistry._registry)
    yield AttentionRegistry
    AttentionRegistry._registry.clear()
    AttentionRegistry._registry.update(before)
