"""A fuzzer of what training does with attention: drawn calls under drawn transformations and
meshes, values and all gradients compared with a float64 oracle.

    python tests/nightly/fuzz/train.py --cases 200 --seed 0

Each case is drawn from one seed, so `--seed N --cases 1` runs the case that failed as N again.
"""

import argparse
import os
import sys
import time
import traceback
from pathlib import Path


if __name__ == "__main__":
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
        "--xla_cpu_multi_thread_eigen=false",
    )
    sys.path[:0] = [str(p) for p in Path(__file__).parents[1:3]]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from fuzz._calls import Call, worst  # noqa: E402
from fuzz._targets import draw_call, draw_target, Target  # noqa: E402
from fuzz._transforms import TRANSFORMS  # noqa: E402


LIMIT = 1e-10  # of float64, relative to the largest number of an array, or to 1
ROUNDINGS = 8  # how many times the change that rounding all inputs once makes is allowed
DTYPES = ("float64", "float32", "bfloat16", "float16")


def draw(seed: int, only: dict[str, str | None]) -> tuple[Target, Call, str, np.random.Generator]:
    """The case of a seed."""
    rng = np.random.default_rng(seed)
    target = draw_target(rng, only.get("target"))
    call = draw_call(rng, target)
    name = only.get("transform") or list(TRANSFORMS)[int(rng.integers(len(TRANSFORMS)))]
    dtype, mixed = only.get("dtype") or "float64", np.random.default_rng([seed, 1]).integers(2)
    call.narrow(jnp.dtype(dtype), np.float32 if mixed and dtype != "float64" else jnp.dtype(dtype))
    return target, call, name, rng


def check(seed: int, **only: str | None) -> tuple[float, str]:
    """The largest error of a case as a multiple of what is allowed, and where.

    In float64 that is `LIMIT`. In a narrow dtype it follows from what rounding the inputs does.
    """
    target, call, name, rng = draw(seed, only)
    with jax.enable_x64(call.dtype == np.float64), target.context():
        found = TRANSFORMS[name](call, rng, target.run(call))
        error, where = max(worst(got, want) for got, want in found)
    eps = float(jnp.finfo(call.dtype).eps)
    limit = LIMIT if call.dtype == np.float64 else ROUNDINGS * (call.condition + eps)
    return error / limit, where


def main() -> int:
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=50, help="how many cases")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first")
    parser.add_argument("--target", help="a strategy, or one or many for one or many devices")
    parser.add_argument("--transform", choices=sorted(TRANSFORMS))
    parser.add_argument("--dtype", choices=DTYPES, help="that of queries, keys and values")
    parser.add_argument("--show", action="store_true", help="print each case")
    args = parser.parse_args()
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    only = dict(target=args.target, transform=args.transform, dtype=args.dtype)
    failed, largest = [], 0.0
    for seed in tqdm(range(args.seed, args.seed + args.cases)):
        begin = time.time()
        target, call, name, _ = draw(seed, only)
        if args.show:
            tqdm.write(f"{seed}: {name} {target} {call}")
        try:
            error, where = check(seed, **only)
            text = f"{error:.1e} times the error allowed, of {where}"
        except Exception as e:
            error, text = np.inf, "".join(traceback.format_exception_only(e)).strip()
            if args.cases == 1:
                traceback.print_exc()
        largest = max(largest, error)
        if not error <= 1:
            failed.append(seed)
            given = "".join(f" --{n} {x}" for n, x in only.items() if x)
            tqdm.write(f"FAILED: python tests/nightly/fuzz/train.py --cases 1 --seed {seed}{given}")
            tqdm.write(f"  {name} {target}\n  {call}\n  {text}  ({time.time() - begin:.1f} s)")
    print(f"{len(failed)} of {args.cases} cases failed: {failed}")
    print(f"The largest error is {largest:.2g} times what is allowed.")
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main())
