"""`python -m measure.tpu_report.child` compiles kernels or whole calls for a chip and prints
their rows, as JSON lines.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, SingleDeviceSharding

from . import calls, schedule, whole
from .chips import CHIPS
from .kernels import choose
from .rows import Row
from .specification import Kernel
from .steps import Steps


UNITS = {
    "vector": "VALU",
    "exponential": "EUP",
    "lanes": "XLU",
    "load": "VLOAD",
    "store": "VSTORE",
}


def compile_for(device: Any, build: Callable[..., Any]) -> Any:
    """Compiles what `build` returns."""
    function, args = build()
    place = SingleDeviceSharding(device)
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tuple(args)
    )
    return jax.jit(function, out_shardings=place).lower(*args).compile()


def measure(name: str, kernel: Kernel, folder: Path) -> Row:
    """Makes the row of a kernel from its schedule, which the compiler left in the `folder`."""
    chip, tile, info = CHIPS[name], kernel.tile(), pltpu.get_tpu_info()
    found = schedule.dumped(folder, kernel.call)
    if len(found) != 1:
        raise ValueError(f"the program has {len(found)} kernels {kernel.call}, not one")
    steps = Steps(schedule.read(folder, found[0], chip), kernel.innermost, kernel.cleans)
    full, masked = steps.full, getattr(steps, kernel.masked) if steps.masked else None
    heads_per_step = kernel.heads_per_step()
    ideal = heads_per_step * tile[0] * tile[1] * kernel.products / chip.products
    entire = None
    if (w := kernel.whole) is not None:
        counts = whole.count(w.tokens, tile, w.heads // heads_per_step, w.kept, w.lag, steps.skips)
        cycles = counts.cycles(steps, w.once)
        pairs = w.heads * whole.visible_pairs(w.tokens)
        entire = pairs * kernel.products / chip.products / cycles
    # A product is two operations, so this is the clock rate: cycles per second.
    rate = info.bf16_ops_per_second / (2 * chip.products)
    overlays, back = schedule.overlays(folder, kernel.call)
    return Row(
        kernel=kernel.name,
        chip=name,
        plain=kernel.plain,
        tile=tile,
        cycles=round(full.cycles / heads_per_step),
        masked=None if masked is None else round(masked.cycles / heads_per_step),
        useful=_rounded(ideal / full.cycles) if kernel.products else None,
        whole=None if entire is None else _rounded(entire),
        memory=_rounded(kernel.nbytes * tile[1] / info.mem_bw_bytes_per_second * rate / full.cycles)
        if kernel.nbytes
        else None,
        units={"matrix": _rounded(full.matrix_share)}
        | {name: _rounded(full.share(slot)) for name, slot in UNITS.items()},
        spills=full.total(full.schedule.slots["VSTORE:SPILL"]),
        fills=full.total(full.schedule.slots["VLOAD:FILL"]),
        vmem=full.schedule.vmem,
        overlays=overlays,
        back=back,
    )


def _rounded(share: float) -> float:
    return round(share, 4)


def main() -> None:
    """Reads the job, a JSON object, from standard input."""
    job = json.load(sys.stdin)
    folder, topology = Path(job["folder"]), CHIPS[job["chip"]].topology
    built: Any = None
    program: Any = None
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    for name in job["names"]:
        try:
            # Code that is lowered may ask for the kind of device, which the mesh tells.
            with jax.sharding.use_abstract_mesh(Mesh([device], ("x",)).abstract_mesh):
                (chosen,) = (calls.choose if job["call"] else choose)([name], peers=True)
                what: Any = chosen
                if what.build is not built:  # several kernels may be of one program
                    built = None
                    for path in folder.iterdir():
                        path.unlink()
                    program = compile_for(device, what.build)
                    built = what.build
                if job["call"]:
                    temporary = program.memory_analysis().temp_size_in_bytes
                    row = calls.measure(job["chip"], what, temporary, folder)
                else:
                    row = measure(job["chip"], what, folder)
                item = {"row": row.to_dict()}
        except Exception as e:  # what the compiler says is the result
            item = {"failed": name, "why": f"{type(e).__name__}: {e}"[:600]}
        print(json.dumps(item), flush=True)


if __name__ == "__main__":
    main()
