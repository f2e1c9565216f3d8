"""Every case of the covering array: values and all gradients within the bound of the oracle.

Here is the whole pairwise array. The 3-wise one is in tests/nightly/test_three_wise.py, and kernels and
caches as targets in tests/nightly/test_pairwise_targets.py.
"""

from __future__ import annotations

import contextlib

import jax
import numpy as np
import pytest

from eqattn._problem import block_classes, fold, lists as listed_blocks
from eqattn._sweep import loops, lowering
from eqattn._sweep.grid import DIAGONAL, EMPTY, FULL, PARTIAL
from eqattn._sweep.lowering import XLALowering
from eqattn._sweep.tokens import TokenPairs
from eqattn.kernels.nvidia._lowering import NvidiaLowering
from eqattn.kernels.tpu import (
    _backward as _backward_step,
    _forward as _step,
    _operands,
    _windows,
    TPULowering,
)
from eqattn.strategies import _fold

from . import build, transforms
from .bound import excess
from .cases import covering, name_of, needs_x64, on_stairs, PER_KEY
from .library import library_call


def judge(result: dict, built: build.Built) -> dict[str, float]:
    """The worst error over its bound, for every array of the result."""
    worst = {}

    def compare(label, actual: dict, reference: dict):
        for name, x in actual.items():
            x = np.asarray(x)
            shape = np.shape(reference[name].primal)
            expected = (
                built.variants[0].get(name)
                if label.startswith(("grads", "hvps", "summed"))
                else None
            )
            if expected is not None:
                assert (x.shape, x.dtype) == (expected.shape, expected.dtype), (
                    f"{label} {name}: {x.shape} {x.dtype}"
                )
            if name == "out":
                assert (x.shape, x.dtype) == (built.ct_out.shape, built.ct_out.dtype), (
                    f"{label} out: {x.shape} {x.dtype}"
                )
            if name in ("lse", "top"):
                assert (x.shape, x.dtype) == (built.ct_lse.shape, built.ct_lse.dtype), (
                    f"{label} lse: {x.shape} {x.dtype}"
                )
            worst[f"{label}.{name}"] = excess(x.reshape(shape), reference[name])

    references = {"values": built.values, "values_under_vjp": built.values, "grads": built.grads}
    references |= {"tangents": built.tangents, "hvps": built.hvps}
    for kind, per_variant in result.items():
        if kind == "summed":
            # JAX's scan rounds each step's cotangent to the argument's dtype, then adds.
            terms = [built.grads(0), built.grads(1)]
            dtypes = {n: x.dtype for n, x in per_variant.items()}
            compare(
                kind,
                per_variant,
                {n: sum(g[n].rounded(dtypes[n]) for g in terms) for n in per_variant},
            )
        else:
            for i, actual in enumerate(per_variant):
                compare(f"{kind}[{i}]", actual, references[kind](i))
    return worst


def mesh_of(case):
    """The mesh of a case's devices, as a context; none for one device."""
    n = case["target"][1]
    if n == 1:
        return contextlib.nullcontext()
    auto = (jax.sharding.AxisType.Auto,)
    return jax.set_mesh(jax.make_mesh((n,), ("sp",), auto, devices=jax.devices()[:n]))


def cut(n: int, most: int) -> list[slice]:
    """A side of a small block in so many parts, or in two, where that is even."""
    size = n // next(parts for parts in (most, 2, 1) if n % parts == 0)
    return [slice(i, i + size) for i in range(0, n, size)]


def of_forward(n: int, size: int) -> list[slice]:
    """The parts of a side of the forward kernel's windows, in halves, or quarters if these are half
    as wide as others.
    """
    return cut(n, 2 if size == _windows.WINDOW else 4)


def of_backward(keys: int, rows: int, masked: bool) -> list[tuple[slice, slice]]:
    """The windows of the backward kernel: half of the keys, and half or, if masked, a quarter of the
    rows.
    """
    return [(at, to) for to in cut(rows, 4 if masked else 2) for at in cut(keys, 2)]


@contextlib.contextmanager
def as_large_ones(case, mask):
    """Kernels work on a small block in several parts, as on large ones, and in the forms of all
    chips. Some lists of small blocks are visited as those of large ones are.
    """
    with pytest.MonkeyPatch.context() as patch:
        if build.visits_listed_blocks(mask):
            # Queries are visited together where one is too few.
            least = 1 if 1 in (*case["block"], *case["length"]) else 2
            for lowering in (XLALowering, TPULowering, NvidiaLowering):
                patch.setattr(lowering, "least_listed", (least, least))
                patch.setattr(lowering, "copy_pairs", 10**6)
        several = lambda *sides: min(sides) > 1 and case["lead"] == ()
        patch.setattr(_operands, "fill_registers", several)
        patch.setattr(_windows, "_even", of_forward)
        patch.setattr(block_classes, "STEP", max(1, min(case["block"]) // 2))
        patch.setattr(_step, "sums_by_product", lambda: build.sums_by_product(case))
        patch.setattr(_backward_step, "windows", of_backward)
        patch.setattr(_backward_step, "suits", lambda step: case["lead"] != ())
        yield


def check(case) -> None:
    with jax.enable_x64(True) if needs_x64(case) else contextlib.nullcontext():
        built = build.build(case)
        call, dynamic = library_call(built)
        transform = transforms.TRANSFORMS[case["transform"]]

        @jax.jit
        def program(variants, directions, cts, dynamic):
            run = lambda a, **more: call(a, dynamic, **more)
            return transform(run, variants, directions, cts)

        with mesh_of(case), as_large_ones(case, built.mask):
            result = program(
                built.variants, built.directions, (built.ct_out, built.ct_lse), dynamic
            )
        result = jax.tree.map(np.asarray, result)
        with np.errstate(all="ignore"):
            worst = judge(result, built)
    failures = {name: ratio for name, ratio in worst.items() if not ratio <= 1}
    assert not failures, f"error / bound: {failures}"


@pytest.mark.parametrize("case", covering(2), ids=name_of)
def test_pairwise(case):
    check(case)


def test_lists_of_blocks_are_visited_where_they_lie():
    """In cases above and in others of their kind, as far as tracing tells; others gather their keys."""
    jax.clear_caches()  # What a case above has traced is not traced again.
    cases = [c for c in covering(2) if (c["mask"], c["target"]) == ("selected", ("blockwise", 1))]
    cases = [c | {"length": length} for c in cases for length in ((32, 48), (1, 23))]
    found = []
    for case in cases:
        with jax.enable_x64(True) if needs_x64(case) else contextlib.nullcontext():
            built = build.build(case)
            call, dynamic = library_call(built)
            with pytest.MonkeyPatch.context() as patch, as_large_ones(case, built.mask):

                def seen(*xs, f=listed_blocks.live_blocks, case=case):
                    live = f(*xs)
                    found.append((case["transform"], max(live.shape[-2:]) > 1))
                    return live

                patch.setattr(_fold, "live_blocks", seen)
                jax.eval_shape(call, built.variants[0], dynamic)
    assert {name for name, _ in found} == {c["transform"] for c in cases}
    assert {several for _, several in found} == {False, True}  # lists of one row of blocks


def test_cases_on_stairs():
    """All of them are, as far as tracing tells."""
    jax.clear_caches()
    for case in on_stairs(2):
        found = []
        with jax.enable_x64(True) if needs_x64(case) else contextlib.nullcontext():
            built = build.build(case)
            call, dynamic = library_call(built)
            with pytest.MonkeyPatch.context() as patch, as_large_ones(case, built.mask):
                seen = lambda *xs, f=fold.subtile_classes, to=found: to.append(f(*xs)) or to[-1]
                patch.setattr(fold, "subtile_classes", seen)
                jax.eval_shape(call, built.variants[0], dynamic)
        on_diagonal = ((DIAGONAL, ((PARTIAL, EMPTY), (FULL, PARTIAL))),)
        assert found and set(found) == {on_diagonal}, case


def in_place(cases, biases: tuple[str, ...] = PER_KEY["bias"]) -> list[dict]:
    """Cases with a bias, whose blocks divide the lengths."""
    return [
        case | dict(length=(32, 48), block=(16, 16), bias=biases[i % len(biases)])
        for i, case in enumerate(cases)
        if case["mask"] != "selected"  # keys are gathered, or visited several blocks in a step
    ]


PLACED = in_place(case for case in covering(2) if case["target"] == ("blockwise", 1))
OF_EACH_TRANSFORM = {case["transform"]: case for case in PLACED}.values()


@pytest.mark.parametrize("of_pairs", OF_EACH_TRANSFORM, ids=name_of)
def test_pairs_are_read_where_they_lie(of_pairs, monkeypatch):
    """Small blocks are visited one by one, as large ones are, and windows of a bias are read."""
    found = []
    read = lambda *xs, f=loops.by_pairs: found.append(f(*xs)) or found[-1]
    monkeypatch.setattr(loops, "by_pairs", read)
    monkeypatch.setattr(lowering, "loops_over_batch", lambda ctx, layout: True)
    check(of_pairs)
    assert any(isinstance(x, TokenPairs) for x in found)
