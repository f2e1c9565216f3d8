"""Steps of decoding as exported programs, in a process whose caches do not raise."""

import os
import pathlib
import subprocess
import sys

import exported
import pytest


ROOT = pathlib.Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["pages of 8 bits"])
def test_the_batch_may_stay_open(name):
    """Caches of 8 bits and in pages needed a known number of rows."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "EQX_ON_ERROR": "nan", "PYTHONPATH": path}
    call = [sys.executable, exported.__file__, name]
    done = subprocess.run(call, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [name]
