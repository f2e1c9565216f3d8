"""What the tests of programs share."""

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
OLD = importlib.metadata.version("jaxlib").startswith("0.10.")
# The options of a program whose memory is judged: the code that XLA makes by default. `conftest.py`
# asks for code that compiles faster, and copies less.
DEFAULT_CODE = {"xla_cpu_use_fusion_emitters": True} if OLD else {}


def start(script: str, *arguments, **kwargs) -> subprocess.Popen:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / script), *map(str, arguments)],
        env=os.environ | dict(PYTHONPATH=path, JAX_PLATFORMS="cpu"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,
    )


def run(script: str, *arguments, **kwargs) -> tuple[str, str]:
    """Its output and its standard error."""
    process = start(script, *arguments, **kwargs)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-3000:]
    return out, err


def refuses(main, arguments: Sequence[str], message: str, capsys) -> None:
    """A program ends with a message and no traceback."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
