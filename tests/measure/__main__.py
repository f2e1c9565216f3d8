"""`python tests/measure COMMAND`, in a clone of the repository: see `README.md`."""

import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; like that of `python -m eqattn`."""
    from eqattn.__main__ import run_command
    from measure import front, gpu_peers, gpu_report, plots, triton_report
    from measure.bench import cli as bench
    from measure.gpu_run import cli as gpu_run
    from measure.tpu_report import cli as tpu_report

    commands = {
        "bench": (bench, "time, memory and accuracy, side by side with other libraries"),
        "tpu-report": (tpu_report, "schedules of the kernels for TPUs; needs libtpu, no TPU"),
        "gpu-report": (gpu_report, "machine code of the kernels for Hopper; needs CUDA, no GPU"),
        "triton-report": (triton_report, "machine code of the kernels in Triton, likewise"),
        "peers": (gpu_peers, "machine code of jax's own kernels for GPUs, likewise"),
        "gpu-run": (gpu_run, "the kernels on a GPU: conformance, time and memory; --rehearse"),
        "plot": (plots, "a picture of a file of bench or tpu-report; needs matplotlib"),
        "front": (front, "writes the table and the picture of the front pages"),
    }
    return run_command("python tests/measure", "Measures eqattn.", commands, argv)


if __name__ == "__main__":
    tests = Path(__file__).resolve().parents[1]
    # This package and the conformance matrix are found, and the eqattn of this clone.
    sys.path[:1] = [str(tests), str(tests.parent)]
    sys.exit(main())
