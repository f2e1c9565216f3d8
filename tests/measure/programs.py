"""Hashes of the programs of the matrix, which show that a change of the code changes no program.

    python tests/measure/programs.py --out before.json     # at the old commit
    python tests/measure/programs.py --against before.json  # at the new one

A program is what JAX gives XLA for a case of the pairwise array: the loops of a strategy or an interpreted
kernel, with the transformation of the case. Names of functions do not count.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import re
import sys
from pathlib import Path


def parts_of(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="where the hashes are written")
    parser.add_argument("--against", type=Path, help="the hashes to compare with")
    parser.add_argument("--every", type=int, default=1, help="every n-th case")
    parser.add_argument("--texts", type=Path, help="a folder for the programs themselves")
    return parser.parse_args(argv)


def nameless(text: str) -> str:
    """The text with functions numbered in the order in which they appear, and without places."""
    numbers: dict[str, int] = {}
    text = re.sub(r"@[\w.$-]+", lambda m: f"@{numbers.setdefault(m[0], len(numbers))}", text)
    return re.sub(r" loc\(.*?\)|^#loc.*$|module @\d+", "", text, flags=re.MULTILINE)


def program_of(case) -> str:
    import jax
    from matrix import build, transforms
    from matrix.cases import needs_x64
    from matrix.library import library_call
    from matrix.test_conformance import mesh_of

    with jax.enable_x64(True) if needs_x64(case) else contextlib.nullcontext():
        built = build.build(case)
        call, dynamic = library_call(built)
        transform = transforms.TRANSFORMS[case["transform"]]

        def program(variants, directions, cts, dynamic):
            return transform(lambda a, **more: call(a, dynamic, **more), variants, directions, cts)

        cotangents = built.ct_out, built.ct_lse
        with mesh_of(case):
            lowered = jax.jit(program).lower(built.variants, built.directions, cotangents, dynamic)
    return nameless(lowered.as_text())


def main(argv: list[str] | None = None) -> int:
    args = parts_of(argv)
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import jax
    from matrix.cases import covering, interpreted_on_a_gpu, name_of, of_the_tpu
    from tqdm import tqdm

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    before = json.loads(args.against.read_text()) if args.against else {}
    hashes, other = {}, []
    for case in tqdm(
        [
            *itertools.islice(
                [
                    *covering(2),
                    *of_the_tpu(2),
                    *interpreted_on_a_gpu(2, newest=jax.__version_info__ >= (0, 12)),
                ],
                0,
                None,
                args.every,
            )
        ]
    ):
        text, name = program_of(case), name_of(case)
        hashes[name] = hashlib.sha256(text.encode()).hexdigest()[:16]
        if before.get(name, hashes[name]) != hashes[name]:
            other.append(name)
            tqdm.write(f"other program: {name}")
        if args.texts:
            args.texts.mkdir(exist_ok=True)
            (args.texts / (hashlib.md5(name.encode()).hexdigest() + ".txt")).write_text(text)
    if args.out:
        args.out.write_text(json.dumps(hashes, indent=0))
    gone = before.keys() - hashes.keys() if args.every == 1 else ()
    print(f"{len(hashes)} programs, {len(other)} other than before, {len(gone)} cases are missing")
    return bool(other or gone)


if __name__ == "__main__":
    sys.exit(main())
