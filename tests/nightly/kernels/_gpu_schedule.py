"""What XLA makes of a ring of NVIDIA GPUs, without one: it is compiled for named chips, and the moves
are read off the scheduled program.

    python tests/nightly/kernels/_gpu_schedule.py '{"topology": "h200:1x1x4", "platform": "gpu"}' ...

prints one JSON object for each case. A topology is a chip, and how many slices, hosts, and GPUs of
a host there are.
"""

import json
import os
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "kernels"))

from _tpu_schedule import Case, lowered, report  # noqa: E402


FLAG = "xla_gpu_enable_latency_hiding_scheduler"


def compiled(case: Case):
    """A case compiled for all GPUs of its topology, and how many are in its ring."""
    from jax.experimental import topologies
    from measure.cuda import target

    chip, shape = case.topology.split(":")
    devices = topologies.get_topology_desc(
        platform="cuda", target_config=target(chip), topology=shape
    ).devices
    program, n = lowered(case, devices, "cuda")
    given = {} if case.hides is None else {FLAG: case.hides}
    return program.compile(compiler_options=given), n


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.append(str(Path(__file__).parents[2]))
    for case in sys.argv[1:]:
        print(json.dumps(report(*compiled(Case(**json.loads(case))))), flush=True)
