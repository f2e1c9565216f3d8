"""`python tests/measure triton-report`: what NVIDIA's compiler makes of kernels in Pallas Triton.

A separate process compiles each call for a chip that need not be there, and analyses the machine
code. It counts the registers, those that are spilled to memory, and the instructions of the two
loops that take all the time. One loop visits full blocks, and the other blocks that a mask cuts.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import cuda
from .cubins import cubins
from .process import End
from .sass import hot_loops


NEEDS = (*cuda.NEEDS, "nvidia-cuda-cuobjdump")

FIGURES = ("stack", "spills", "registers", "loop", "masked", "temporary")
"""The figures of a kernel. First come the bytes of memory that a thread has in addition to
registers, and the instructions in the two loops that access this memory. Registers and the
instructions of the loops over full and over partial blocks follow. Last are the bytes of temporary
arrays in the call.
"""

LEAST_EXPONENTIALS = 4
"""The least exponentials of a thread in a loop: those for the smallest tile, 32 rows of 32 keys in
256 threads.
"""

NAMES = (
    "full",
    "causal",
    "causal, 64",
    "causal, 256",
    "dense",
    "soft cap",
    "t5",
    "shared bias",
    "shared bias, 4 heads a key",
    "dropout",
    "decode",
    "decode, pages",
    "decode, 4 drafts",
    "decode, 256",
    "decode, int8",
    "decode, int8 in pages",
    "decode, latents",
)
"""Which of the calls are compiled."""

DIFFERENTIATED = ("causal", "dense", "t5", "shared bias", "shared bias, 4 heads a key")
"""Those whose gradients of query, key, value and a learned bias are compiled, too."""


def calls() -> dict[str, Callable[[], dict[str, Any]]]:
    """The calls that are compiled: sizes, and arguments of `attention`."""
    from eqattn import Causal

    given = cuda.calls()
    exact = {"causal, float32": lambda: dict(mask=Causal(), dtype="float32")}
    return {name: given[name] for name in NAMES} | exact


def measure(
    chips: Sequence[str], names: Sequence[str] | None = None
) -> Iterator[dict[str, Any] | End]:
    """Compiles calls. **Returns:** a row of figures for each kernel and chip, and at last how the
    process ended.
    """
    return cuda.rows_of(__name__, chips=chips, kernels=names or list(calls()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `triton-report`."""
    chips = list(cuda.CHIPS)
    parser.add_argument("--chip", nargs="+", choices=chips, default=chips, help="for which chips")
    cuda.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Compiles, prints and writes. **Returns:** 1 if a call failed, else 0."""
    cuda.check_names(args.kernel, calls())
    cells = lambda row: [row[x] for x in FIGURES]
    found = cuda.versions(NEEDS)
    return cuda.report(measure(args.chip, args.kernel), found, FIGURES, cells, args.json)


def compiled(name: str, chip: str) -> dict[str, dict[str, Any]]:
    """The figures of the kernels of a call on a chip, by what their rows are called."""
    import jax

    mesh, place = cuda.placed(cuda.target(chip))
    given = calls()[name]()
    if "slots" in given:
        jobs = [cuda.decoding(place, platform="triton", **given)]
    else:
        call, args, *gradients = cuda.training(place, given, platform="triton")
        jobs = [(call, args), gradients][: 1 + (name in DIFFERENTIATED)]
    found: dict[str, dict[str, Any]] = {}
    for call, args in jobs:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            traced = jax.jit(call).trace(*args)
            program: Any = traced.lower(lowering_platforms=("cuda",)).compile()
        temporary = program.memory_analysis().temp_size_in_bytes
        missing = set(re.findall(r"\beqattn_([a-z_]+?)(?:__\d+)?\b", program.as_text()))
        for kernel in cubins(program.runtime_executable().serialize()):
            try:
                resources, listing = cuda.taken_apart(kernel)
            except subprocess.CalledProcessError:
                continue  # It only looked like machine code.
            for of, number in re.findall(r"\beqattn_([a-z_]+?)(?:__(\d+))?:", resources):
                missing.discard(of)
                if of.endswith("_again"):
                    continue  # It seldom does anything.
                row = name + cuda.KERNELS[of] + (f" {int(number) + 1}" if number else "")
                if row not in found:
                    row_of = figures(resources, listing, cleans=of != "fold")
                    found[row] = row_of | {"temporary": temporary}
        if missing or not found:
            raise ValueError(f"no machine code was found of {sorted(missing) or 'any kernel'}")
    return found


def figures(resources: str, listing: str, cleans: bool = True) -> dict[str, Any]:
    """What the tools say, as numbers.

    **Arguments:**

    - `cleans`: whether a kernel of several loops has one for what is not finite. Folds have another
        kernel for it, which is left out.
    """
    bodies = hot_loops(listing, "H?MMA|FFMA", LEAST_EXPONENTIALS)
    # The last of several replaces what is not finite, and runs only where there is some.
    bodies = bodies[: max(len(bodies) - cleans, 1)]
    memory = re.compile(r"\b(LDL|STL)\b")
    return dict(
        stack=cuda.resource(resources, "STACK"),
        spills=sum(bool(memory.search(text)) for body in bodies for text in body),
        registers=cuda.resource(resources, "REG"),
        loop=len(bodies[0]),
        masked=len(bodies[1]) if len(bodies) > 1 else None,
    )


def main() -> None:
    """What the process does: a row, or why there is none, for each chip and call."""
    job = json.load(sys.stdin)
    for chip in job["chips"]:
        for name in job["kernels"]:
            rows = lambda: {f"{chip}: {of}": row for of, row in compiled(name, chip).items()}
            cuda.say(f"{chip}: {name}", rows)


if __name__ == "__main__":
    main()
