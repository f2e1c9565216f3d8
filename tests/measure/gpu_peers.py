"""`python tests/measure peers`: jax's own attention kernels, as `gpu-report` shows ours, at the same
sizes.

There are two. One is in Pallas Mosaic GPU, for Hopper and float16, and one is in Pallas Triton.
They get the blocks that `gpu-run` gives them.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import cuda, gpu_report
from .cubins import cubins
from .gpu_run.cases import Case
from .process import End
from .sass import hot_loops, units


MOSAIC, TRITON = "jax Mosaic", "jax Triton"

_SIZES: dict[str, dict[str, Any]] = {
    "full": dict(causal=False),
    "causal": dict(),
    "causal, 64": dict(dim=64),
    "causal, 256": dict(dim=256),
}
_PEERS = {f"{library}: {name}": (library, name) for library in (MOSAIC, TRITON) for name in _SIZES}
del _PEERS[f"{MOSAIC}: causal, 256"]  # its blocks take more shared memory than there is
NAMES = tuple(_PEERS)
"""What is compiled, each with gradients where the kernel has some."""

_PARTS = ("", ": dq", ": dk and dv")
"""The kernels of a gradient, by how much they multiply for each exponential, and what their rows
add to the name of the call.
"""


add_arguments = cuda.add_arguments


def measure(names: Sequence[str] | None = None) -> Iterator[dict[str, Any] | End]:
    """Compiles calls. **Returns:** a row of figures for each kernel, and at last how the process
    ended.
    """
    return cuda.rows_of(__name__, kernels=names or NAMES)


def run(args: argparse.Namespace) -> int:
    """Compiles, prints and writes. **Returns:** 1 if a call failed, else 0."""
    cuda.check_names(args.kernel, NAMES)
    cells = gpu_report.columns
    return cuda.report(measure(args.kernel), cuda.versions(), gpu_report.HEADER, cells, args.json)


def compiled(name: str, folder: Path) -> dict[str, dict[str, Any]]:
    """The figures of jax's kernels for a call, by what their rows are called. A row of what this
    jax lacks says in `absent` why.
    """
    library, size = _PEERS[name]
    case = Case(name, tokens=4096, heads=8, kv_heads=8, **_SIZES[size])
    found: dict[str, dict[str, Any]] = {}
    for gradients in (False, True):
        try:
            rows = _kernels(library, case, gradients, folder)
            for part, row in zip(_PARTS, sorted(rows, key=_products)):
                found.setdefault(name + part, row)  # gradients have a forward pass, too
        except (ImportError, NotImplementedError) as e:
            label = f"{name}: gradients" if gradients else name
            found[label] = {"absent": str(e).splitlines()[0]}
            if isinstance(e, ImportError):
                break
    return found


def _kernels(library: str, case: Case, gradients: bool, folder: Path) -> list[dict[str, Any]]:
    """The figures of each kernel in a call, or in its gradients."""
    import jax
    import jax.numpy as jnp

    from .gpu_run.calls import call_of

    call = call_of(library, case, rehearsed=False)
    assert call is not None
    mesh, place = cuda.placed(cuda.target("h200"))
    shape = (case.batch, case.tokens, case.heads, case.dim)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)
    for old in folder.iterdir():
        old.unlink()
    f = (lambda *xs: jax.vjp(call, *xs[:3])[1](xs[3])) if gradients else call
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(f).trace(*[x] * (3 + gradients))
        program: Any = traced.lower(lowering_platforms=("cuda",)).compile()
    temporary = {"temporary": program.memory_analysis().temp_size_in_bytes}
    if library == MOSAIC:
        said = gpu_report.kernels_of(folder, prefix="", cleans=False)
        return [row | temporary for row in said.values()]
    rows = []
    for kernel in cubins(program.runtime_executable().serialize()):
        resources, listing = cuda.taken_apart(kernel)
        rows += [_of_loop(resources, body) | temporary for body in hot_loops(listing)]
    return rows


def _products(row: dict[str, Any]) -> float:
    """How much the tensor cores do for each exponential."""
    cycles = row["units"]["loop"]
    return cycles["tensor"] / cycles["special"]


def _of_loop(resources: str, body: Sequence[str]) -> dict[str, Any]:
    """The figures of a loop of a kernel in Triton. Its machine code does not say how much shared
    memory it gets.
    """
    return dict(
        spilled=cuda.resource(resources, "STACK"),
        registers=cuda.resource(resources, "REG"),
        shared=None,
        loop=len(body),
        masked=None,
        warnings=0,
        units={"loop": units(body)},
    )


def main() -> None:
    """What the process does: rows, or why there are none, for each call."""
    job = json.load(sys.stdin)
    for name in job["kernels"]:
        cuda.say(name, lambda: compiled(name, Path(job["folder"])))


if __name__ == "__main__":
    main()
