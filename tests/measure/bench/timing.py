"""Times calls in turn, and computes the ratios of their times."""

import gc
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


# A sample repeats a call until it takes about this many seconds. The resolution of the clock and
# the cost of a dispatch are small against that. It was chosen by trial: the quartiles that `bench`
# prints show how much samples scatter.
_SHORTEST = 0.02
# Libraries other than the two of the target are measured in each third round only, to save time.
_OTHERS = 3


def rounds_of(
    calls: dict[str, Callable[[], Any]],
    rounds: int,
    rare: Sequence[str] = (),
    wall: bool = False,
    wait: Callable[[Any], None] = lambda _: None,
) -> dict[str, np.ndarray]:
    """The seconds of each call in each round; NaN where a rare call was left out. They are CPU
    seconds or, with `wall`, elapsed seconds, which are what counts on several cores. `wait` waits
    for the result of the last of several calls, where these only begin their work.
    """
    clock = time.perf_counter if wall else time.process_time
    times = {name: np.full(rounds, np.nan) for name in calls}
    repeats = {name: max(1, math.ceil(_SHORTEST / max(_once(f, 1, clock, wait), 1e-6)))
               for name, f in calls.items()}  # fmt: skip
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            names = [n for n in calls if n not in rare or i % _OTHERS == 0]
            for name in names if i % 2 == 0 else names[::-1]:
                # This call is not timed. The system takes back the large arrays of the program
                # before only after its results are ready, and this program would pay for that.
                wait(calls[name]())
                times[name][i] = _once(calls[name], repeats[name], clock, wait)
    finally:
        gc.enable()
    return times


def _once(
    call: Callable[[], Any],
    repeats: int,
    clock: Callable[[], float],
    wait: Callable[[Any], None],
) -> float:
    start, last = clock(), None
    for _ in range(repeats):
        last = call()
    wait(last)
    return (clock() - start) / repeats


def ratios(times: dict[str, np.ndarray], reference: str) -> tuple[dict, dict]:
    """The medians and the quartiles of each call's time over the time of the reference."""
    medians, quartiles = {}, {}
    for name, x in times.items():
        ratio = (x / times[reference])[np.isfinite(x)]
        low, middle, high = np.percentile(ratio, (25, 50, 75))
        medians[name], quartiles[name] = float(middle), [float(low), float(high)]
    return medians, quartiles
