"""`python -m eqattn`: `info`, `bench`, `tpu-report`, `gpu-report` and `gpu-run`."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    **Arguments:**

    - `argv`: the words after `python -m eqattn`, by default those of this process.

    **Returns:** the exit status. For bad arguments it is 2, and a message says why.
    """
    from ._tools import gpu_report, info as _info
    from ._tools.bench import cli
    from ._tools.gpu_run import cli as gpu_run
    from ._tools.tpu_report import cli as tpu_report

    parser = argparse.ArgumentParser(
        prog="python -m eqattn", description="Exact, memory-efficient attention in JAX."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for module, name, summary in (
        (_info, "info", "what would run for a call of attention, and why not something else"),
        (cli, "bench", "time, memory and accuracy, side by side with other libraries"),
        (tpu_report, "tpu-report", "the schedules of the kernels for TPUs; needs libtpu, no TPU"),
        (gpu_report, "gpu-report", "machine code of the GPU kernel; needs CUDA's compiler, no GPU"),
        (
            gpu_run,
            "gpu-run",
            "the GPU kernels on a GPU: conformance, time and memory; --rehearse",
        ),
    ):
        command = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run, error=command.error)
    args, out = parser.parse_args(argv), sys.stdout  # None if it was closed before Python began
    try:
        status = args.run(args)
        if out is not None:
            out.flush()
        return status
    except BrokenPipeError:  # whoever read it, such as `head`, has closed the pipe
        if out is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # for the flush at exit
        return 128 + signal.SIGPIPE if hasattr(signal, "SIGPIPE") else 1
    except KeyboardInterrupt:  # what was measured so far has been printed
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except (ValueError, TypeError) as e:  # what the library says of bad arguments
        return args.error(str(e))


if __name__ == "__main__":
    sys.exit(main())
