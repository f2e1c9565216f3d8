"""Calls in turn, and the ratios of their times."""

import gc
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


_SHORTEST = 0.02  # seconds of one sample
_OTHERS = 3  # other libraries than the two of the target are measured in each third round


def rounds_of(
    calls: dict[str, Callable[[], Any]], rounds: int, rare: Sequence[str] = (), wall: bool = False
) -> dict[str, np.ndarray]:
    """Seconds of each call in each round; NaN where a rare one was left out. They are CPU seconds,
    or with `wall` those that pass, which is what counts on several cores.
    """
    clock = time.perf_counter if wall else time.process_time
    times = {name: np.full(rounds, np.nan) for name in calls}
    repeats = {name: max(1, math.ceil(_SHORTEST / max(_once(f, 1, clock), 1e-6)))
               for name, f in calls.items()}  # fmt: skip
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            names = [n for n in calls if n not in rare or i % _OTHERS == 0]
            for name in names if i % 2 == 0 else names[::-1]:
                # Not timed: a program's large arrays are given back to the system only after its
                # results are ready, which would be charged to the next program.
                calls[name]()
                times[name][i] = _once(calls[name], repeats[name], clock)
    finally:
        gc.enable()
    return times


def _once(call: Callable[[], Any], repeats: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


def ratios(times: dict[str, np.ndarray], reference: str) -> tuple[dict, dict]:
    """Medians and quartiles of each call's time over the reference's."""
    medians, quartiles = {}, {}
    for name, x in times.items():
        ratio = (x / times[reference])[np.isfinite(x)]
        low, middle, high = np.percentile(ratio, (25, 50, 75))
        medians[name], quartiles[name] = float(middle), [float(low), float(high)]
    return medians, quartiles
