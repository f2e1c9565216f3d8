"""Runs work in a separate Python process."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


TESTS = Path(__file__).resolve().parents[1]
"""The folder of tests in a clone, where this package lies and the conformance matrix."""


@dataclasses.dataclass(frozen=True)
class End:
    """How a process ended: its status, and the last line of its standard error. After a signal, it
    is the last line that names an error of CUDA or a failed check, if there is one.
    """

    status: int
    message: str

    def __str__(self) -> str:
        return f"status {self.status}: {self.message}"


def results(
    arguments: Sequence[str],
    job: Mapping[str, Any],
    environment: Mapping[str, str],
    patience: float | None = None,
) -> Iterator[dict[str, Any] | End]:
    """Runs Python in another process.

    **Arguments:**

    - `arguments`: the command line arguments of Python.
    - `job`: what the process reads from its standard input, as JSON.
    - `environment`: the environment variables of the process. It finds this package and the eqattn
        of this clone, in whatever folder it runs.
    - `patience`: the seconds without a line after which the process is killed; None means never.

    **Returns:** the JSON objects that the process prints, one a line, as they come. The last item
    is an `End`.
    """
    pipe = subprocess.PIPE
    path = [str(TESTS), str(TESTS.parent), environment.get("PYTHONPATH", "")]
    with (
        tempfile.TemporaryFile("w+") as errors,  # a pipe that nobody reads would fill up
        subprocess.Popen(
            [sys.executable, *arguments],
            stdin=pipe,
            stdout=pipe,
            stderr=errors,
            text=True,
            env={**environment, "PYTHONPATH": os.pathsep.join(path)},
        ) as child,
    ):
        assert child.stdin and child.stdout
        child.stdin.write(json.dumps(job))
        child.stdin.close()
        lines = iter(child.stdout)
        try:
            while (line := _next(lines, child, patience)) is not None:
                if line.startswith('{"'):  # a library may have printed other lines
                    yield json.loads(line)
        except BaseException:  # as one who reads stops, by Ctrl-C or earlier than the end
            child.kill()
            raise
        status = child.wait()
        errors.seek(0)
        said = errors.read().strip().splitlines() or ["no message"]
    yield End(status, _telling(said) if status < 0 else said[-1])


def _telling(lines: Sequence[str]) -> str:
    """What XLA said before a signal ended the process: frames of its stack may follow."""
    found = [x for x in lines if "CUDA_ERROR" in x or "Check failed" in x]
    return (found or lines)[-1]


def _next(lines: Iterator[str], child: subprocess.Popen, patience: float | None) -> str | None:
    """The next line that a process prints; None when it has ended, or is killed as none came."""
    if patience is None:
        return next(lines, None)
    timer = threading.Timer(patience, child.kill)
    timer.start()
    try:
        return next(lines, None)
    finally:
        timer.cancel()
