"""Everything in this suite runs under JAX's strictest promotion rules, one CPU thread a program,
with eight virtual devices.
"""

import gc
import importlib.metadata
import os
import pathlib


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
from _contexts import forget_context, keep_contexts, put_arrays_at_once  # noqa: E402
from _rolls import interpret_rolls_at_once  # noqa: E402
from jaxtyping import config  # noqa: E402


interpret_rolls_at_once()
keep_contexts()
put_arrays_at_once()

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Programs that name no lines of Python are lowered and compiled in 5% less time.
jax.config.update("jax_traceback_in_locations_limit", 0)


# Tracing makes many objects, of which few are garbage. The collector's usual pace, a pass for every
# 700, takes 4 to 16 percent of the time of these tests; a slower one than this takes gigabytes.
gc.set_threshold(10_000, 10, 10)


# What lies in these folders runs by `-m slow`.
NIGHTLY = [pathlib.Path(__file__).parent / name for name in ("nightly", "measure")]


def is_nightly(path: pathlib.Path) -> bool:
    return any(folder in (path, *path.parents) for folder in NIGHTLY)


def pytest_ignore_collect(collection_path, config):
    """Listing what the default run does not take would cost it seconds."""
    return is_nightly(collection_path) and config.getoption("markexpr") == "not slow" or None


def pytest_collection_modifyitems(items):
    for item in items:
        if is_nightly(item.path):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """What one module compiled is of little use to the next, and adds up to gigabytes a worker."""
    yield
    jax.clear_caches()
    forget_context()


# Their many cases call the same functions with the same types, of which checking takes a tenth to a
# fifth of the time. The tests of other folders check them.
UNCHECKED = [
    pathlib.Path(__file__).parent / name
    for name in ("matrix", "unit/kernels", "unit/ring", "nightly/ring")
]


@pytest.fixture(autouse=True)
def types(request):
    """Types are checked in all tests but those of some folders; with `EQATTN_TYPES=all`, there too."""
    spared = any(folder in request.path.parents for folder in UNCHECKED)
    if not spared or os.environ.get("EQATTN_TYPES") == "all":
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
