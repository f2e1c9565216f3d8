"""`python -m eqattn info`."""

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    **Arguments:**

    - `argv`: the words after `python -m eqattn`, by default those of this process.

    **Returns:** the exit status. For bad arguments it is 2, and a message says why.
    """
    from . import _info as info

    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in ("bench", "tpu-report", "gpu-report", "gpu-run"):
        there = f"in a clone of the repository: python tests/measure {words[0]}"
        print(
            f"python -m eqattn: {words[0]} is not in the package. Run it {there}", file=sys.stderr
        )
        return 2
    summary = "what would run for a call of attention, and why not something else"
    description = "Exact, memory-efficient attention in JAX."
    return run_command("python -m eqattn", description, {"info": (info, summary)}, words)


def run_command(
    program: str,
    description: str,
    commands: Mapping[str, tuple[Any, str]],
    argv: Sequence[str] | None = None,
) -> int:
    """Runs one of some commands.

    **Arguments:**

    - `program`, `description`: what the help calls the program, and says of it.
    - `commands`: by its name, a module with `add_arguments` and `run`, and what the help says.
    - `argv`: the words after `program`, by default those of this process.

    **Returns:** the exit status.
    """
    parser = argparse.ArgumentParser(prog=program, description=description)
    choices = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (module, summary) in commands.items():
        command = choices.add_parser(
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
