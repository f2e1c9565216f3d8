"""`python -m eqattn gpu-report --chip`: what NVIDIA's compiler makes of kernels in Pallas Triton.

A separate process compiles each call for a chip that need not be there, and analyses the machine
code. It counts the registers, those that are spilled to memory, and the instructions of the two
loops that take all the time. One loop visits full blocks, and the other blocks that a mask cuts.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata as distributions
from typing import Any

from . import gpu_report
from .cubins import cubins
from .process import End, results
from .sass import hot_loops
from .training_calls import training


NEEDS = (*gpu_report.NEEDS, "nvidia-cuda-cuobjdump")

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

# A chip has the two numbers of its capability, its features, and the number of multiprocessors. The
# shared memory of a multiprocessor and of a program follow, in KiB. Then come the second-level
# cache in MiB, the memory in GB, its rate in GB/s and the clock in GHz. Last are the number of
# units and the name.
_CHIPS = {
    "a100": (8, 0, "NONE", 108, 164, 163, 40, 80, 2039, 1.41, 64, "NVIDIA A100-SXM4-80GB"),
    "rtx4090": (8, 9, "NONE", 128, 100, 99, 72, 24, 1008, 2.52, 128, "NVIDIA GeForce RTX 4090"),
    "h200": (9, 0, "ACCELERATED_FEATURES", 132, 228, 227, 50, 141, 4800, 1.98, 128,
             "NVIDIA H200 141GB HBM3e"),
    "b200": (10, 0, "ACCELERATED_FEATURES", 148, 228, 227, 126, 180, 7672, 1.965, 128,
             "NVIDIA B200"),
    "rtxpro6000": (12, 0, "ACCELERATED_FEATURES", 188, 100, 99, 128, 96, 1792, 2.6, 128,
                   "NVIDIA RTX PRO 6000"),
}  # fmt: skip
CHIPS = tuple(_CHIPS)

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
"""The calls of `gpu_report` that are compiled, too."""

DIFFERENTIATED = ("causal", "dense", "t5", "shared bias", "shared bias, 4 heads a key")
"""Those whose gradients of query, key, value and a learned bias are compiled, too."""


def calls() -> dict[str, Callable[[], dict[str, Any]]]:
    """The calls that are compiled: sizes, and arguments of `attention`."""
    from .. import Causal

    given = gpu_report.calls()
    exact = {"causal, float32": lambda: dict(mask=Causal(), dtype="float32")}
    return {name: given[name] for name in NAMES} | exact


def target(chip: str) -> str:
    """What the compiler wants to know of a chip."""
    (major, minor, features, cores, shared, own, cache, memory, rate, clock, units, name) = _CHIPS[
        chip
    ]
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared * 1024} shared_memory_per_block_optin: {own * 1024}
  threads_per_core_limit: {1536 if shared == 100 else 2048} core_count: {cores}
  fpus_per_core: {units} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {rate * 10**9} l2_cache_size: {cache << 20}
  clock_rate_ghz: {clock} device_memory_size: {memory * 10**9}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation" device_address_bits: 64 name: "{name}"
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA" device_description_str: "{name}"
"""


def measure(chips: list[str], names: list[str] | None = None) -> Iterator[dict[str, Any] | End]:
    """Compiles calls. **Returns:** a row of figures for each call and chip, and at last how the
    process ended.
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)  # those of this process may be unknown to that one
    job = {"chips": chips, "kernels": names}
    yield from results(["-W", "ignore", "-m", __name__], job, environment)


def run(args: argparse.Namespace) -> int:
    """Compiles, prints and writes. **Returns:** 1 if a call failed, else 0."""
    if unknown := sorted(set(args.kernel or ()) - set(calls())):
        raise ValueError(f"{unknown} are not among {sorted(calls())}")
    found, rows, failed = gpu_report.versions(NEEDS), {}, False
    print(", ".join(f"{name} {version}" for name, version in found.items()))
    print(f"{'':36}" + "".join(f"{x:>11}" for x in FIGURES))
    for row in measure(args.chip, args.kernel):
        if isinstance(row, End):
            if row.status:
                print(row)
            failed |= row.status != 0
        elif "error" in row:
            print(f"{row['kernel']:36} {row['error']}")
            failed = True
        else:
            name = row.pop("kernel")
            rows[name] = row
            print(f"{name:36}" + "".join(f"{row[x]!s:>11}" for x in FIGURES), flush=True)
    if args.json is not None:
        if args.json.exists():
            rows = json.loads(args.json.read_text())["kernels"] | rows
        args.json.write_text(json.dumps({"versions": found, "kernels": rows}, indent=1) + "\n")
    return int(failed)


def compiled(name: str, chip: str) -> dict[str, dict[str, Any]]:
    """The figures of the kernels of a call on a chip, by what their rows are called."""
    import jax

    mesh, place = gpu_report.placed(target(chip))
    given = calls()[name]()
    if "slots" in given:
        jobs = [gpu_report.decoding(place, platform="triton", **given)]
    else:
        call, args, *gradients = training(place, given, platform="triton")
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
                resources, listing = taken_apart(kernel)
            except subprocess.CalledProcessError:
                continue  # It only looked like machine code.
            for of, number in re.findall(r"\beqattn_([a-z_]+?)(?:__(\d+))?:", resources):
                missing.discard(of)
                if of.endswith("_again"):
                    continue  # It seldom does anything.
                row = name + gpu_report.KERNELS[of] + (f" {int(number) + 1}" if number else "")
                if row not in found:
                    row_of = figures(resources, listing, cleans=of != "fold")
                    found[row] = row_of | {"temporary": temporary}
        if missing or not found:
            raise ValueError(f"no machine code was found of {sorted(missing) or 'any kernel'}")
    return found


def taken_apart(kernel: bytes) -> tuple[str, str]:
    """What NVIDIA's tools say of machine code: its resources, and its instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel)
        file.flush()
        said = []
        for tool, flags in (("cuobjdump", ["--dump-resource-usage"]), ("nvdisasm", [])):
            package = distributions.distribution(f"nvidia-cuda-{tool}")
            (path,) = [x for x in package.files or () if x.name == tool]
            command = [str(path.locate()), *flags, file.name]
            said.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return said[0], said[1]


def resource(resources: str, name: str) -> int:
    """How much of a resource the functions of some machine code take at most."""
    return max(int(x) for x in re.findall(rf"\b{name}:(\d+)", resources))


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
        stack=resource(resources, "STACK"),
        spills=sum(bool(memory.search(text)) for body in bodies for text in body),
        registers=resource(resources, "REG"),
        loop=len(bodies[0]),
        masked=len(bodies[1]) if len(bodies) > 1 else None,
    )


def main() -> None:
    """What the process does: a row, or why there is none, for each chip and call."""
    job = json.load(sys.stdin)
    for chip in job["chips"]:
        for name in calls() if job["kernels"] is None else job["kernels"]:
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    rows = compiled(name, chip)
            except Exception as e:
                rows = {name: {"error": f"{type(e).__name__}: {e}".splitlines()[0]}}
            for kernel, row in rows.items():
                print(json.dumps({"kernel": f"{chip}: {kernel}", **row}), flush=True)


if __name__ == "__main__":
    main()
