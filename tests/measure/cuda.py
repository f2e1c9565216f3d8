"""What the reports on kernels for NVIDIA GPUs share: chips, calls, versions, and how a process that
compiles is asked and answers.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata as distributions
from pathlib import Path
from typing import Any

from .process import End, results
from .results_file import new_file


NEEDS = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-cuda-nvdisasm")
"""The distributions that compile and disassemble."""

LINKER = "nvidia-nvjitlink"
"""Where it is installed, XLA assembles kernels by this library in place of `ptxas`, as parts of a
larger program. So `setmaxnreg` is ignored, and warpgroups that compute lack registers.
"""

KERNELS = dict(fold="", sum_rows=": dq", sum_columns=": dk and dv", sum_pairs=": dbias", decode="")
"""The kernels of a call, and what their rows of the report add to its name."""

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


def calls() -> dict[str, Callable[[], dict[str, Any]]]:
    """The calls that are compiled: sizes, and arguments of `attention`. Those with `slots` are
    steps over caches with that many tokens a row.
    """
    import jax
    import jax.numpy as jnp

    from eqattn import (
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
                f"this report needs {name}: python -m pip install 'jax>=0.12' jax-cuda13-plugin "
                "jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-cuda-nvdisasm nvidia-cuda-cuobjdump (no "
                "GPU is needed)"
            ) from None
    with contextlib.suppress(distributions.PackageNotFoundError):
        if not needs:
            found[LINKER] = distributions.version(LINKER)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that all reports have."""
    add = parser.add_argument
    add("--kernel", nargs="+", metavar="NAME", help="which calls; None: all")
    add("--json", type=new_file, help="write figures here, beside others'")


def check_names(given: Sequence[str] | None, known: Iterable[str]) -> None:
    """**Raises:** `ValueError` for calls that there are not."""
    if unknown := sorted(set(given or ()) - set(known)):
        raise ValueError(f"{unknown} are not among {sorted(known)}")


def rows_of(child: str, **job: Any) -> Iterator[dict[str, Any] | End]:
    """The rows that a process compiles, and at last how it ended.

    **Arguments:**

    - `child`: the module that runs there.
    - `job`: what it is to do. It also gets a `folder`, into which the compiler writes of kernels in
        Mosaic.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_TO": folder}
        environment.pop("XLA_FLAGS", None)  # those of this process may be unknown to that one
        yield from results(["-W", "ignore", "-m", child], job | {"folder": folder}, environment)


def say(name: str, compiled: Callable[[], dict[str, dict[str, Any]]]) -> None:
    """Prints the rows of a call, or why there are none, as such a process does."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            rows = compiled()
    except Exception as e:
        rows = {name: {"error": f"{type(e).__name__}: {e}".splitlines()[0]}}
    for kernel, row in rows.items():
        print(json.dumps({"kernel": kernel, **row}), flush=True)


def report(
    measured: Iterable[dict[str, Any] | End],
    found: Mapping[str, str],
    header: Sequence[str],
    columns: Callable[[dict[str, Any]], list[Any]],
    path: Path | None,
) -> int:
    """Prints rows as they come, and writes them beside others that a file has.

    **Returns:** 1 if a call failed, else 0. **Raises:** `ValueError` if the file has figures of
    other versions.
    """
    rows, failed = {}, False
    if path is not None and path.exists():
        recorded = json.loads(path.read_text())
        rows, before = recorded["kernels"], recorded["versions"]
        if before != found:
            raise ValueError(f"{path} was recorded with {before}, not {found}; remove it first.")
    print(", ".join(f"{name} {version}" for name, version in found.items()))
    if LINKER in found:
        print(f"{LINKER} assembles, without setmaxnreg: other figures than those of ptxas")
    print(f"{'':36}" + "".join(f"{x:>11}" for x in header))
    for row in measured:
        if isinstance(row, End):
            if row.status:
                print(row)
            failed |= row.status != 0
        elif "error" in row or "absent" in row:
            print(f"{row['kernel']:36} {row.get('error') or 'absent: ' + row['absent']}")
            failed |= "error" in row
        else:
            rows[name := row.pop("kernel")] = row
            print(f"{name:36}" + "".join(f"{x!s:>11}" for x in columns(row)), flush=True)
    if path is not None:
        path.write_text(json.dumps({"versions": found, "kernels": rows}, indent=1) + "\n")
    return int(failed)


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

    from eqattn import attention, AttentionMetadata, Causal, KeyPadding, Ragged
    from eqattn._problem.storage import LatentKV, Pages, Quantized

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
        k, v = (LatentKV(k, v), k) if rest else (k, v)
        seen = Causal() & KeyPadding(lengths)
        seen = seen if mask is None else seen & mask
        return attention(q, k, v, how, mask=seen, q_offset=lengths - tokens).attention_outputs

    kv = [array(*lead, kv_heads, n) for n in (dim, rest or dim)]
    if stored is not None:
        scales = array(lead[0], 1, lead[1] * kv_heads, dtype=jnp.float32)
        kv = [(array(*x.shape, dtype=jnp.dtype(stored)), scales) for x in kv]
    return step, (array(rows, tokens, heads, dim + rest), *kv, array(rows, dtype=jnp.int32), *table)


def training(
    place: Any, given: dict[str, Any], platform: str = "gpu"
) -> tuple[Any, tuple, Any, tuple]:
    """A call and its gradients: functions, each with its arguments."""
    import jax
    import jax.numpy as jnp

    from eqattn import attention, AttentionMetadata, Blockwise

    tokens, dim = given.pop("tokens", 4096), given.pop("dim", 128)
    width, kv_heads = given.pop("width", dim), given.pop("kv_heads", 8)
    dtype = jnp.dtype(given.pop("dtype", "bfloat16"))
    fields = dict(logits_soft_cap=given.pop("cap", None), dropout_prob=given.pop("rate", 0.0))
    how = Blockwise(AttentionMetadata(platform=platform, runtime_dtype=dtype, **fields))
    heads = {"q": (8, dim), "k": (kv_heads, dim), "v": (kv_heads, width), "g": (8, width)}
    shapes = {x: (1, tokens, *n) for x, n in heads.items()}
    if learned := given.pop("learned", 0):  # the heads of a bias that is an argument
        shapes = {"bias": (1, learned, tokens, tokens)} | shapes
    *bias, q, k, v, g = (jax.ShapeDtypeStruct(x, dtype, sharding=place) for x in shapes.values())

    def call(q, k, v, *bias):
        more = given | {"bias": bias[0]} if bias else given
        return attention(q, k, v, how, **more).attention_outputs

    gradients = lambda g, *xs: jax.vjp(call, *xs)[1](g)
    return call, (q, k, v, *bias), gradients, (g, q, k, v, *bias)


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
