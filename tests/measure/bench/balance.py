"""Measures how balanced the layouts of a ring are for packed documents.

The documents are the files of Python's standard library, shuffled and packed one after the other. A
token is a byte, and each device has 4,096 of them.
"""

import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from eqattn._ring.balanced import Balanced
from eqattn._ring.choice import sharding_plan
from eqattn._ring.layout import AbstractRingLayout, Contiguous, Zigzag
from eqattn._ring.plan import ring_plan
from eqattn.masks import AbstractMask, Causal, Segments, SlidingWindow

from .cases import Case, Row


DEVICES = (8, 16, 32, 64, 128, 256)


def documents(tokens: int) -> np.ndarray:
    """The segment ids `[tokens]` of the packed files."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = [p for p in sorted(folder.rglob("*.py")) if "packages" not in str(p)]
    sizes = np.random.default_rng(0).permutation([p.stat().st_size for p in paths])
    return np.searchsorted(np.cumsum(sizes), np.arange(tokens), side="right").astype(np.int32)


def balance(case: Case, rounds: int) -> Iterator[Row]:
    """Measures the work of the busiest device over the mean, in all and in turn. It does so for
    documents, and for documents together with a window of 1,024 tokens. It also measures the time
    that `Balanced` takes.
    """
    for n in DEVICES:
        tokens = case.tokens * n
        ids = documents(tokens)
        mask = Causal() & Segments(ids)
        near, times = mask & SlidingWindow(1023, 0), []
        layout = Balanced(mask, tokens, n)
        for _ in range(max(rounds // 3, 3)):
            start = time.process_time()
            Balanced(mask, tokens, n)
            times.append((time.process_time() - start) * 1e3)
        note = f"{n} devices have {len(np.unique(ids))} documents"
        for name, other in (("contiguous", Contiguous()), ("zigzag", Zigzag())):
            yield from _rows(case, f"{name}, {n} devices", other, mask, tokens, n)
        yield from _rows(case, f"balanced, {n} devices", layout, mask, tokens, n, note)
        both = Balanced([mask, near], tokens, n)
        for kind, seen in (("documents", mask), ("window", near)):
            plan = ring_plan(tokens, n, layout=both, mask=seen)
            yield case.row(f"balanced for both, {kind}, {n} devices", {"eqattn": plan.balance})
        yield case.row(f"{n} devices, ms", {"eqattn": float(np.median(times))})


def _rows(
    case: Case,
    name: str,
    layout: AbstractRingLayout,
    mask: AbstractMask,
    tokens: int,
    n: int,
    note: str = "",
) -> Iterator[Row]:
    sizes = dict(heads=32, kv_heads=8)
    found = sharding_plan(tokens, n, layout=layout, mask=mask, **sizes)
    ring = next(x for x in found.shardings if x.strategy == "Ring(metadata)")
    assert ring.plan is not None
    yield case.row(name, {"eqattn": ring.plan.balance}, note=note)
    yield case.row(f"{name}, in turn", {"eqattn": ring.plan.in_turn})
    yield case.row(f"{name}, exposed", {"eqattn": ring.exposed / ring.seconds})


EXPERIMENTS = {"balance": balance}
