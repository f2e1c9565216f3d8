"""A fuzzer of how kernels rewrite scores and masks: drawn functions of a pair and their derivatives,
evaluated as kernels do, but outside of kernels, and compared with float64.

    python tests/nightly/fuzz/programs.py --cases 500 --seed 0

Each case is drawn from one seed, so `--seed N --cases 1` runs the case that failed as N again.
"""

import argparse
import collections
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


if __name__ == "__main__":
    sys.path[:0] = [str(p) for p in Path(__file__).parents[1:3]]

import numpy as np  # noqa: E402

from fuzz._cases import Case, Given, turned  # noqa: E402
from fuzz._evaluators import of_gpu, of_tpu  # noqa: E402


FACTOR = 4  # how many times the change that the oracle's disturbances make is allowed
LEAST = 2.0**-20  # the error that is always allowed, of the number
ATOL = 1e-20
WINDOWS = (4, 8), (8, 4), (2, 4), (8, 8)


def rows_of(x: Any, case: Case, head: int) -> Any:
    """Pairs `[..., keys, rows]` of a block, from those of all heads."""
    group = case.heads // case.kv_heads
    x = x[..., head * group : (head + 1) * group, :]
    return x.reshape(*x.shape[:-2], -1)


def wanted(case: Case, given: Given, head: int) -> dict[str, tuple[Any, Any]]:
    """What the evaluators should find, `[times, ...]`, and where that can be judged."""
    own = lambda x: rows_of(x, case, head)
    pairs, p, fine = own(given.pairs), own(given.p), ~own(given.bad)
    g, q = own(turned(case.g)), own(turned(case.q))
    some = fine.all(1)[:, None]
    return {
        "logits": (own(given.exact.logits), fine),
        "pairs of keys": (pairs, fine),
        "pairs of queries": (pairs, fine),
        "p of values": (p, fine),
        "gradient of queries": (pairs, fine),
        "gradient of keys": (np.where(fine, pairs, 0) @ q.T, some),
        "gradient of values": (np.where(fine, p, 0) @ g.T, some),
    }


def compared(name: str, got: Any, want: Any, fine: Any) -> tuple[float, int]:
    """The largest error, as a multiple of what is allowed, and how many numbers were judged."""
    got, first = np.float64(got), want[0]
    with np.errstate(all="ignore"):
        spread = np.abs(want - first).max(0)
        allowed = FACTOR * spread + LEAST * np.abs(first) + ATOL
        error = np.where(got == first, 0, np.abs(got - first) / allowed)
    # Where a comparison may go either way, nothing can be said.
    sure = np.isfinite(first) & (spread <= 0.01 * np.abs(first) + 1e-12)
    sure = (sure | (first == want).all(0)) & fine
    error = np.where(sure, np.where(np.isnan(error), np.inf, error), 0)
    return float(error.max(initial=0)), int(sure.sum())


def check(seed: int, counts: Any = None) -> list[tuple[float, str]]:
    """The errors of a case, with what they are errors of."""
    case, counts = Case.draw(seed), collections.Counter() if counts is None else counts
    given, rng = Given.of(case, seed), np.random.default_rng([seed, 9])
    head, window = int(rng.integers(case.kv_heads)), WINDOWS[rng.integers(len(WINDOWS))]
    runs: dict[str, Callable] = {
        "gpu": lambda: of_gpu(case, given.lse, head),
        "tpu": lambda: of_tpu(case, given.lse, head, window),
    }
    errors = []
    for device, run in runs.items():
        try:
            found = run()
        except ValueError as e:
            if "which the compiler of kernels does not know" not in str(e):
                raise
            counts[f"{device}: {e}"] += 1
            continue
        truth = wanted(case, given, head)
        for name, got in found.items():
            want, fine = truth[name.partition(",")[0]]
            error, judged = compared(name, got, want, fine)
            counts[f"{device}: {name}"] += judged
            errors.append((error, f"{device}: {name}"))
    return errors


def main() -> int:
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=200, help="how many cases")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first")
    parser.add_argument("--show", action="store_true", help="print each case")
    args = parser.parse_args()
    failed, counts = [], collections.Counter()
    for seed in tqdm(range(args.seed, args.seed + args.cases)):
        if args.show:
            tqdm.write(f"{seed}: {Case.draw(seed)}")
        try:
            wrong = [x for x in check(seed, counts) if not x[0] <= 1]
        except Exception as e:
            wrong = [(np.inf, "".join(traceback.format_exception_only(e)).strip())]
            if args.cases == 1:
                traceback.print_exc()
        if wrong:
            failed.append(seed)
            tqdm.write(f"FAILED: python tests/nightly/fuzz/programs.py --cases 1 --seed {seed}")
            tqdm.write(f"  {Case.draw(seed)}")
            for error, what in wrong:
                tqdm.write(f"  {error:.2g} times the error allowed: {what}"[:400])
    for name, count in sorted(counts.items()):
        print(f"{count:9} {name}")
    print(f"{len(failed)} of {args.cases} cases failed: {failed}")
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main())
