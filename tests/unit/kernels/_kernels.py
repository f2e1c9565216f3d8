"""How the kernels of each device are asked for, interpreted and judged, and read off a program that
is lowered for the device on any machine.
"""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix import bound, oracle

from eqattn import AttentionMetadata, Blockwise


NEWEST = jax.__version_info__ >= (0, 12)
newest = pytest.mark.skipif(
    not NEWEST, reason="the kernels for Hopper are written for jax 0.12 and newer"
)
HOPPER = pytest.param("cuda", marks=newest)
# For tests that lower programs. Those that interpret kernels have the argument `interpreted`.
EACH = pytest.mark.parametrize("backend", ["tpu", HOPPER, "triton"])
NVIDIA = pytest.mark.parametrize("backend", [HOPPER, "triton"])
# Whose kernels a call of a table is for.
ALL, OF_GPUS, OLDER = ("tpu", "cuda", "triton"), ("cuda", "triton"), ("tpu", "triton")

NAMES = {"tpu": "@tpu_custom_call", "cuda": "@mosaic_gpu_v2", "triton": "@__gpu$xla.gpu.triton("}
# A program for Triton is lowered for a chip that Hopper's kernels do not know.
A100: Any = jax.sharding.AbstractDevice(
    device_kind="NVIDIA A100-SXM4-80GB", num_cores=None, platform="gpu"
)


def over(calls: dict[str, tuple], later: tuple[str, ...] = ()):
    """Gives a test that interprets kernels the `name` of each call that they serve: the last entry
    of a call names their backends. Those that come `later` are for the nightly tests.
    """

    def mark(test):
        test.calls, test.later = calls, later
        return test

    return mark


def parametrise(metafunc: Any, nightly: bool) -> None:
    """Gives a test the backends whose kernels it interprets as `interpreted`: by default that of
    TPUs, or those of a table of calls. Those for Hopper, whose interpreter takes many times as long,
    are for the nightly tests.
    """
    if "interpreted" not in metafunc.fixturenames:
        return
    calls = getattr(metafunc.function, "calls", None)
    if calls is None:
        metafunc.parametrize("interpreted", OF_GPUS if nightly else ("tpu",))
        return
    last = lambda backend, name: backend == "cuda" or name in metafunc.function.later
    pairs = [
        (b, name) for name, (*_, who) in calls.items() for b in who if last(b, name) == nightly
    ]
    metafunc.parametrize("interpreted, name", pairs)


def dtype_of(backend: str):
    """The widest dtype that all kernels of a backend take."""
    return jnp.float32 if backend == "tpu" else jnp.bfloat16


def how(backend: str, platform: str = "interpret", strategy: Any = Blockwise, **fields: Any):
    """A strategy that runs the kernels of a backend: interpreted, or where their device is."""
    given: dict[str, Any] = dict(runtime_dtype=dtype_of(backend)) | fields
    return strategy(AttentionMetadata(platform=platform, backend=backend, **given))


def text_of(backend: str, f, *args, axis: str = "x", size: int = 1) -> str:
    """A program as it is lowered for a device. For Triton, `axis` is one of a mesh of `size`."""
    device = "tpu" if backend == "tpu" else "cuda"
    lower = lambda: jax.jit(f).trace(*args).lower(lowering_platforms=(device,)).as_text()
    if backend != "triton":
        return lower()
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((size,), (axis,), auto, abstract_device=A100)
    with jax.sharding.use_abstract_mesh(mesh):
        return lower()


def first_visits(backend: str, text: str) -> list[str]:
    """The lines of a program with a kernel. Of GPUs, those that change what another one wrote are
    left out: they visit blocks a second time.
    """
    found = [x for x in text.splitlines() if NAMES[backend] in x]
    return [x for x in found if backend == "tpu" or "output_operand_alias" not in x]


def kernels(backend: str, f, *args, **mesh: Any) -> int:
    """How many kernels a program has."""
    return len(first_visits(backend, text_of(backend, f, *args, **mesh)))


def of(backend: str) -> tuple:
    """`kernels`, `text_of` and `first_visits` of one backend."""
    return tuple(ft.partial(f, backend) for f in (kernels, text_of, first_visits))


def results(call, given: dict[str, Any], ct: Any = None, only: Any = None) -> dict[str, Any]:
    """The output of a call, and gradients of what it is given.

    **Arguments:**

    - `call`: a function of `given`.
    - `given`: arrays by what the oracle calls them: `q`, `k`, `v`, and perhaps others.
    - `ct`: the cotangent of the output. Without one there are no gradients.
    - `only`: whose gradients are asked for, if not those of all.
    """
    names = () if ct is None else tuple(given) if only is None else only

    @jax.jit
    def run(given, ct):
        rest = {n: x for n, x in given.items() if n not in names}
        f = lambda learned: call(**rest, **learned)
        out, pull = jax.vjp(f, {n: given[n] for n in names})
        return dict(out=out) | (pull(ct)[0] if names else {})

    return run(given, ct)


def judge(call, given: dict[str, Any], ct: Any = None, only: Any = None, **problem: Any) -> dict:
    """The `results` of a call, which are within the bound of the oracle. See `check`."""
    found = results(call, given, ct, only)
    check(found, given, ct, **problem)
    return found


def check(found: dict, given: dict[str, Any], ct: Any = None, **problem: Any) -> None:
    """Results, by what the oracle calls them, within its bound. `problem`: what else it is told."""
    dtype, d = given["q"].dtype, given["q"].shape[-1]
    exact = oracle.Problem(**dict(scale=d**-0.5) | wide(given) | problem)
    # Kernels divide cotangents by denominators before products read them, as in matrix/.
    precision = bound.precision_of(dtype, normalised=True)
    want = bound.values(exact, precision)
    if ct is not None:
        want |= bound.grads(exact, np.float64(ct), np.zeros(ct.shape[:3]), precision)
    worst = {n: bound.excess(np.asarray(x), want[n]) for n, x in found.items()}
    assert max(worst.values()) <= 1, worst


def wide(given: dict[str, Any]) -> dict[str, Any]:
    return {n: np.float64(x) for n, x in given.items()}


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape)).astype(dtype)


def drawn(backend: str, t=40, s=48, heads=4, kv_heads=2, dim=16, width=8, batch=1) -> tuple:
    """A query, keys, values and a cotangent, of the dtype of a backend. The first three by name."""
    shapes = (t, heads, dim), (s, kv_heads, dim), (s, kv_heads, width), (t, heads, width)
    q, k, v, ct = (normal(i, batch, *x, dtype=dtype_of(backend)) for i, x in enumerate(shapes))
    return dict(q=q, k=k, v=v), ct


def mesh_of(n: int, name: str = "sp", kind: Any = jax.sharding.AxisType.Auto):
    return jax.make_mesh((n,), (name,), (kind,), devices=jax.devices()[:n])
