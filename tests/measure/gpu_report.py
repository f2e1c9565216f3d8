"""`python tests/measure gpu-report`: what NVIDIA's compiler makes of the kernels, without a GPU.

A separate process compiles each call for an H200, which need not be there, and reads what the
compiler wrote about the kernels. This is the number of spilled registers, the shared memory, and
the instructions of the two loops that take all the time. One loop visits full blocks, and the other
blocks that a mask cuts.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import cuda
from .process import End
from .sass import hot_loops, MODEL, modelled, units


FIGURES = ("spilled", "registers", "shared", "loop", "masked", "warnings", "temporary")
"""The figures of a kernel. First come the bytes of spilled registers, the registers, and the bytes
of shared memory. The instructions of the loops over full and over partial blocks follow; a single
loop counts for both. Last are the number of warnings that products were serialised, and the bytes
of temporary arrays in the call.
"""

DIFFERENTIATED = (
    "full", "causal, 192 and 128", "causal", "causal, 4 heads a key", "causal, 64", "causal, 256",
    "window", "segments", "dense", "soft cap", "learned bias", "shared bias",
    "shared bias, 4 heads a key", "alibi", "t5", "score, waves", "dropout", "odd lengths",
)  # fmt: skip
"""The calls whose gradients of query, key, value and a learned bias are compiled, too."""


add_arguments = cuda.add_arguments


def measure(names: Sequence[str] | None = None) -> Iterator[dict[str, Any] | End]:
    """Compiles calls. **Returns:** a row of figures for each kernel, and at last how the process
    ended.
    """
    return cuda.rows_of(__name__, kernels=names or list(cuda.calls()))


def run(args: argparse.Namespace) -> int:
    """Compiles, prints and writes. **Returns:** 1 if a call failed, else 0."""
    cuda.check_names(args.kernel, cuda.calls())
    return cuda.report(measure(args.kernel), cuda.versions(), HEADER, columns, args.json)


HEADER = (*FIGURES, *MODEL, *MODEL)
"""The names of the `columns`."""


def columns(row: dict[str, Any]) -> list[Any]:
    """The figures of a kernel, and what the model says of its loops over full and partial
    blocks.
    """
    model = [modelled(row["units"].get(loop)) for loop in ("loop", "masked")]
    return [*(row[x] for x in FIGURES), *model[0], *model[1]]


def compiled(name: str, folder: Path) -> dict[str, dict[str, Any]]:
    """The figures of the kernels of one call, by what their rows are called."""
    import jax

    mesh, place = cuda.placed(cuda.target("h200"))
    given = cuda.calls()[name]()
    if "slots" in given:
        jobs = [cuda.decoding(place, **given)]
    else:
        call, args, gradients, more = cuda.training(place, given)
        jobs = [(call, args), (gradients, more)][: 1 + (name in DIFFERENTIATED)]
    found: dict[str, dict[str, Any]] = {}
    for f, args in jobs:
        for old in folder.iterdir():
            old.unlink()
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            traced = jax.jit(f).trace(*args)
            program = traced.lower(lowering_platforms=("cuda",)).compile()
        memory: Any = program.memory_analysis()
        for kernel, row in kernels_of(folder).items():
            if f is jobs[0][0] or not kernel.startswith("fold"):
                base, _, number = kernel.partition(" ")
                row |= {"temporary": memory.temp_size_in_bytes}
                found[" ".join([name + cuda.KERNELS[base], *number.split()])] = row
    return found


def kernels_of(
    folder: Path, prefix: str = "eqattn_", cleans: bool = True
) -> dict[str, dict[str, Any]]:
    """The figures of each kernel that the compiler wrote about. Of two with one name, the second
    has a number. The compiler works on several, and may number their resources otherwise.

    **Arguments:**

    - `prefix`: how the names of the kernels begin.
    - `cleans`: whether sums of several loops have one for what is not finite. Folds have another
        kernel for it, which is left out, as it seldom does anything.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob(f"{prefix}*.ptxas")):
        if (base := path.stem.rpartition("_")[0]).endswith("_again"):
            continue
        said = {name: path.with_suffix(f".{name}").read_text() for name in ("ptxas", "sass_ctrl")}
        resources = [x.read_text() for x in folder.glob(f"{base}_[0-9]*.resources.txt")]
        name = base.removeprefix(prefix)
        name = f"{name} 2" if name in found else name
        said["resources.txt"] = "".join(resources)
        found[name] = figures(said, cleans=cleans and name.startswith("sum"))
    return found


def figures(found: dict[str, str], cleans: bool = True) -> dict[str, Any]:
    """What the compiler wrote, by the ends of the names of its files, as numbers.

    **Arguments:**

    - `cleans`: whether a kernel of several loops has one for what is not finite.
    """

    def numbers(pattern: str, text: str) -> list[int]:
        return [int(x) for match in re.finditer(pattern, text) for x in match.groups()]

    loops = hot_loops(found["sass_ctrl"])
    # The last of several replaces what is not finite, and runs only where there is some.
    loops = loops[: max(len(loops) - cleans, 1)]
    spilled = r"stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    return dict(
        spilled=sum(numbers(spilled, found["ptxas"])),
        registers=max(numbers(r"Used (\d+) registers", found["ptxas"])),
        shared=max(numbers(r"smem_scratch_bytes=(\d+)", found["resources.txt"])),
        loop=len(loops[0]),
        masked=len(loops[1]) if len(loops) > 1 else None,
        warnings=len(re.findall(r"C75\d\d", found["ptxas"])),
        units=dict(zip(("loop", "masked"), map(units, loops))),
    )


def main() -> None:
    """What the process does: rows, or why there are none, for each call."""
    job = json.load(sys.stdin)
    for name in job["kernels"]:
        cuda.say(name, lambda: compiled(name, Path(job["folder"])))


if __name__ == "__main__":
    main()
