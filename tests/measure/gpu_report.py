"""`python -m eqattn gpu-report`: what NVIDIA's compiler makes of the kernels, without a GPU.

A separate process compiles each call for an H200, which need not be there, and reads what the
compiler wrote about the kernels. This is the number of spilled registers, the shared memory, and
the instructions of the two loops that take all the time. One loop visits full blocks, and the other
blocks that a mask cuts.
"""

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata as distributions
from pathlib import Path
from typing import Any

from .process import End, results
from .results_file import new_file
from .sass import hot_loops, MODEL, modelled, units
from .training_calls import training


NEEDS = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-cuda-nvdisasm")
"""The distributions that compile and disassemble."""

LINKER = "nvidia-nvjitlink"
"""Where it is installed, XLA assembles kernels by this library in place of `ptxas`, as parts of a
larger program. So `setmaxnreg` is ignored, and warpgroups that compute lack registers.
"""

FIGURES = ("spilled", "registers", "shared", "loop", "masked", "warnings", "temporary")
"""The figures of a kernel. First come the bytes of spilled registers, the registers, and the bytes
of shared memory. The instructions of the loops over full and over partial blocks follow; a single
loop counts for both. Last are the number of warnings that products were serialised, and the bytes
of temporary arrays in the call.
"""

KERNELS = dict(fold="", sum_rows=": dq", sum_columns=": dk and dv", sum_pairs=": dbias", decode="")
"""The kernels of a call, and what their rows of the report add to its name."""

_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 151397597184 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation" device_address_bits: 64 name: "NVIDIA H200 141GB HBM3e"
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
"""


def calls() -> dict[str, Callable[[], dict[str, Any]]]:
    """The calls that are compiled: sizes, and arguments of `attention`. Those with `slots` are
    steps over caches with that many tokens a row.
    """
    import jax
    import jax.numpy as jnp

    from .. import (
        ALiBi,
        BlockCausal,
        Causal,
        DenseMask,
        KeyPadding,
        MaskFn,
        PrefixLM,
        ScoreFn,
        Segments,
        SlidingWindow,
        T5Bias,
    )

    ids = lambda: jnp.zeros((1, 4096), jnp.int32)
    pattern = MaskFn(lambda b, h, q, k: (q * 7 + k * 3) % 5 < 3)
    slopes, width = jnp.ones(8), jnp.float32(3)
    bias = lambda: jnp.zeros((8, 1024, 1024), jnp.bfloat16)
    far = lambda s, b, h, q, k: s - slopes[h] * jnp.log1p(abs(q - k).astype(s.dtype))
    waves = lambda s, b, h, q, k: jnp.where(q - k < 99, s + jnp.cos((q - k) / width), jnp.sin(s))
    return {
        "full": lambda: dict(),
        "causal": lambda: dict(mask=Causal()),
        "causal, float16": lambda: dict(mask=Causal(), dtype="float16"),
        "causal, 4 heads a key": lambda: dict(mask=Causal(), kv_heads=2),
        "causal, 64": lambda: dict(mask=Causal(), dim=64),
        "causal, 256": lambda: dict(mask=Causal(), dim=256),
        "causal, 192 and 128": lambda: dict(mask=Causal(), dim=192, width=128),
        "causal, 64 and 128": lambda: dict(mask=Causal(), dim=64, width=128),
        "window": lambda: dict(mask=SlidingWindow(1023, 0)),
        "segments": lambda: dict(mask=Causal() & Segments(ids())),
        "blocks": lambda: dict(mask=BlockCausal(100)),
        "prefix": lambda: dict(mask=PrefixLM(jnp.array([7]))),
        "not and or": lambda: dict(mask=~SlidingWindow(3, 5) | KeyPadding(jnp.array([7]))),
        "function": lambda: dict(mask=pattern),
        "dense": lambda: dict(tokens=1024, mask=DenseMask(jnp.ones((1024, 1024), bool))),
        "soft cap": lambda: dict(mask=Causal(), cap=20.0),
        "bias": lambda: dict(tokens=1024, mask=Causal(), bias=bias()),
        "learned bias": lambda: dict(mask=Causal(), learned=8),
        "shared bias": lambda: dict(mask=Causal(), learned=1),
        "shared bias, 4 heads a key": lambda: dict(mask=Causal(), learned=1, kv_heads=2),
        "alibi": lambda: dict(mask=Causal(), score=ALiBi(jnp.ones(8))),
        "t5": lambda: dict(mask=Causal(), score=T5Bias(jnp.ones((32, 8)))),
        "score": lambda: dict(mask=Causal(), score=ScoreFn(far)),
        "score, waves": lambda: dict(mask=Causal(), score=ScoreFn(waves)),
        "dropout": lambda: dict(mask=Causal(), rate=0.1, key=jax.random.key(0)),
        "odd lengths": lambda: dict(mask=Causal(), tokens=1001, dim=72),
        "decode": lambda: dict(slots=8192),
        "decode, a long row": lambda: dict(slots=131072, rows=1),
        "decode, pages": lambda: dict(slots=8192, page=16),
        "decode, window": lambda: dict(slots=8192, page=128, mask=SlidingWindow(1023, 0)),
        "decode, 4 drafts": lambda: dict(slots=8192, tokens=4, dtype="float16"),
        "decode, 64": lambda: dict(slots=8192, dim=64),
        "decode, 256": lambda: dict(slots=8192, dim=256),
        "decode, int8": lambda: dict(slots=8192, stored="int8"),
        "decode, int8 in pages": lambda: dict(slots=8192, stored="int8", page=64),
        "decode, float8": lambda: dict(slots=8192, stored="float8_e4m3fn"),
        "decode, latents": lambda: dict(slots=8192, dim=512, rest=64),
    }


DIFFERENTIATED = (
    "full", "causal, 192 and 128", "causal", "causal, 4 heads a key", "causal, 64", "causal, 256",
    "window", "segments", "dense", "soft cap", "learned bias", "shared bias",
    "shared bias, 4 heads a key", "alibi", "t5", "score, waves", "dropout", "odd lengths",
)  # fmt: skip
"""The calls whose gradients of query, key, value and a learned bias are compiled, too."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `gpu-report`."""
    from .triton_report import CHIPS

    add = parser.add_argument
    add("--kernel", nargs="+", metavar="NAME", help="which calls; None: all")
    add("--chip", nargs="+", choices=CHIPS, help="compile in Pallas Triton for these chips")
    add("--json", type=new_file, help="write figures here, beside others'")


def versions(needs: tuple[str, ...] = ()) -> dict[str, str]:
    """The versions of the distributions that compile. **Raises:** `ValueError` that says what to
    install.
    """
    found = {}
    for name in ("jax", *(needs or NEEDS)):
        try:
            found[name] = distributions.version(name)
        except distributions.PackageNotFoundError:
            raise ValueError(
                f"gpu-report needs {name}: python -m pip install 'jax>=0.12' jax-cuda13-plugin "
                "jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-cuda-nvdisasm nvidia-cuda-cuobjdump (no "
                "GPU is needed)"
            ) from None
    with contextlib.suppress(distributions.PackageNotFoundError):
        if not needs:
            found[LINKER] = distributions.version(LINKER)
    return found


def measure(names: list[str] | None = None) -> Iterator[dict[str, Any] | End]:
    """Compiles calls. **Returns:** a row of figures for each kernel, and at last how the process
    ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_TO": folder}
        environment.pop("XLA_FLAGS", None)  # those of this process may be unknown to that one
        job = {"kernels": names, "folder": folder}
        yield from results(["-W", "ignore", "-m", __name__], job, environment)


def run(args: argparse.Namespace) -> int:
    """Compiles, prints and writes. **Returns:** 1 if a call failed, else 0."""
    if args.chip:
        from . import triton_report

        return triton_report.run(args)
    from .gpu_peers import NAMES

    if unknown := sorted(set(args.kernel or ()) - (known := {*calls(), *NAMES})):
        raise ValueError(f"{unknown} are not among {sorted(known)}")
    found, rows, failed = versions(), {}, False
    print(", ".join(f"{name} {version}" for name, version in found.items()))
    if LINKER in found:
        print(f"{LINKER} assembles, without setmaxnreg: other figures than those of ptxas")
    print(f"{'':30}" + "".join(f"{x:>11}" for x in (*FIGURES, *MODEL, *MODEL)))
    for row in measure(args.kernel):
        if isinstance(row, End):
            if row.status:
                print(row)
            failed |= row.status != 0
        elif "error" in row or "absent" in row:
            print(f"{row['kernel']:30} {row.get('error') or 'absent: ' + row['absent']}")
            failed |= "error" in row
        else:
            rows[name := row.pop("kernel")] = row
            print(f"{name:30}" + "".join(f"{x!s:>11}" for x in columns(row)), flush=True)
    if args.json is not None:
        if args.kernel is not None and args.json.exists():
            rows = json.loads(args.json.read_text())["kernels"] | rows
        args.json.write_text(json.dumps({"versions": found, "kernels": rows}, indent=1) + "\n")
    return int(failed)


def columns(row: dict[str, Any]) -> list[Any]:
    """The figures of a kernel, and what the model says of its loops over full and partial
    blocks.
    """
    model = [modelled(row["units"].get(loop)) for loop in ("loop", "masked")]
    return [*(row[x] for x in FIGURES), *model[0], *model[1]]


def compiled(name: str, target: str, folder: Path) -> dict[str, dict[str, Any]]:
    """The figures of the kernels of one call, by what their rows are called."""
    import jax

    mesh, place = placed(target)
    given = calls()[name]()
    if "slots" in given:
        jobs = [decoding(place, **given)]
    else:
        call, args, gradients, more = training(place, given)
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
                found[" ".join([name + KERNELS[base], *number.split()])] = row
    return found


def placed(target: str) -> tuple[Any, Any]:
    """The mesh of a device that is not there, and the sharding of arrays on it.

    **Arguments:**

    - `target`: what the compiler wants to know of the device.
    """
    import jax
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
    mesh = topologies.make_mesh(devices, (1,), ("x",))
    return mesh, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def decoding(place: Any, slots: int, platform: str = "gpu", **given: Any) -> tuple[Any, tuple]:
    """A step of new tokens over caches, of 32 heads that share 8 key heads: a function and its
    arguments. Latents, which have a `rest` that is no part of their value, are those of 128 heads.
    """
    import jax
    import jax.numpy as jnp

    from .. import attention, AttentionMetadata, Causal, KeyPadding, Ragged
    from .._problem.joined import Joined
    from .._problem.storage import Pages, Quantized

    rows, tokens, dim = given.get("rows", 64), given.get("tokens", 1), given.get("dim", 128)
    page, mask, rest = given.get("page"), given.get("mask"), given.get("rest", 0)
    dtype, stored = jnp.dtype(given.get("dtype", "bfloat16")), given.get("stored")
    how = Ragged(AttentionMetadata(platform=platform, runtime_dtype=dtype))

    def array(*shape: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    lead = (rows, slots) if page is None else (rows * slots // page, page)
    table = [] if page is None else [array(rows, slots // page, dtype=jnp.int32)]
    heads, kv_heads = (128, 1) if rest else (32, 8)

    def step(q, k, v, lengths, *table):
        if stored is not None:
            k, v = (Quantized(x[0], x[1], dtype) for x in (k, v))
        k, v = [Pages(x, *table) for x in (k, v)] if table else (k, v)
        k, v = (Joined(k, v), k) if rest else (k, v)
        seen = Causal() & KeyPadding(lengths)
        seen = seen if mask is None else seen & mask
        return attention(q, k, v, how, mask=seen, q_offset=lengths - tokens).attention_outputs

    kv = [array(*lead, kv_heads, n) for n in (dim, rest or dim)]
    if stored is not None:
        scales = array(lead[0], 1, lead[1] * kv_heads, dtype=jnp.float32)
        kv = [(array(*x.shape, dtype=jnp.dtype(stored)), scales) for x in kv]
    return step, (array(rows, tokens, heads, dim + rest), *kv, array(rows, dtype=jnp.int32), *table)


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
    from . import gpu_peers

    folder = Path(job["folder"])
    for name in job["kernels"] or (*calls(), *gpu_peers.NAMES):
        try:
            with contextlib.redirect_stdout(sys.stderr):
                if name in gpu_peers.NAMES:
                    rows = gpu_peers.compiled(name, folder)
                else:
                    rows = compiled(name, _H200, folder)
        except Exception as e:
            rows = {name: {"error": f"{type(e).__name__}: {e}".splitlines()[0]}}
        for kernel, row in rows.items():
            print(json.dumps({"kernel": kernel, **row}), flush=True)


if __name__ == "__main__":
    main()
